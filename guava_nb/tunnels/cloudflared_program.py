"""Which cloudflared runs: the one that is named, the one on PATH, or a release of it, fetched once and checked by its hash."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import os
import platform
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from guava_nb.config.state_folder import make_private_folder, write_private
from guava_nb.errors import ConfigError

__all__ = ["DOWNLOADS", "VERSION", "fetched_path", "find_cloudflared", "required_cloudflared"]

DOWNLOADS = "https://developers.cloudflare.com/cloudflare-one/networks/connectors/cloudflare-tunnel/downloads/"
VERSION = "2026.9.3"
#: Where Cloudflare publishes it.
RELEASES = "https://github.com/cloudflare/cloudflared/releases/download"
#: System and processor to the file of that release and its SHA-256.
FILES = {
    ("linux", "x86_64"): (
        "cloudflared-linux-amd64",
        "77e26d8d900e0b8469f416239d14b5f296525fdf79fee6f511ef55609e3fbac2",
    ),
    ("linux", "aarch64"): (
        "cloudflared-linux-arm64",
        "aaeb2d7d0da3614634c7e03ab13487a1522c2e79165ed2929cfe23d5e95b326d",
    ),
    ("darwin", "arm64"): (
        "cloudflared-darwin-arm64.tgz",
        "587c2cfb1c230fe36c7fa7727da78be459dae028cabe8c001291999350f07095",
    ),
    ("darwin", "x86_64"): (
        "cloudflared-darwin-amd64.tgz",
        "d1155d0837487f261183b15c1eab6c4ebcad9dc49b94675f1524c3564cea3977",
    ),
    ("windows", "amd64"): (
        "cloudflared-windows-amd64.exe",
        "f096265ec2fcbe9bb6e2d64268db167ced3fcbb83d894bdb9e2fcdb26f2ea7e2",
    ),
}
#: Seconds without a byte, and for the whole; the files have 20 to 55 MB.
SILENCE_S, WHOLE_S = 20.0, 600.0
_MOST_BYTES = 200 << 20
_PIECE_BYTES = 1 << 20
_GET_ONE = f"get it from {DOWNLOADS} (one file, no account) and put it on PATH, or name it as in cloudflared:/path/to/cloudflared"


def find_cloudflared(what: str = "") -> str | None:
    """Path of the program; None where the first start would fetch it.

    Args:
        what: path or name; "" looks for `cloudflared` on PATH, then for one that was fetched before.

    A program that was fetched before is named only if its SHA-256 is still the one that we know, and is fetched anew otherwise.

    Raises:
        ConfigError: there is no program of the name that was given.
    """
    found = shutil.which(os.path.expanduser(what) or "cloudflared")
    if found is None and what:
        raise ConfigError(f"there is no program {what}: {_GET_ONE}")
    return found or (str(fetched_path()) if _is_as_fetched(fetched_path()) else None)


def required_cloudflared(what: str = "", tell: Callable[[str], object] = sys.stderr.write) -> str:
    """Path of the program, fetched where there is none.

    Args:
        what: as for `find_cloudflared`.
        tell: gets a line before anything is downloaded, and one after.

    Raises:
        ConfigError: there is none, and none can be fetched; the sentence says why, and where to get it.
    """
    found = find_cloudflared(what)
    if found is not None:
        return found
    if (release := _release()) is None:
        system, machine = _machine()
        raise ConfigError(
            f"cloudflared is not installed here, and none is fetched for {system} on {machine}: {_GET_ONE}"
        )
    name, sha256 = release
    url, target = f"{RELEASES}/{VERSION}/{name}", fetched_path()
    tell(f"cloudflared is not on PATH: fetching version {VERSION} (20 to 55 MB) from {url}\n")
    began = time.monotonic()
    try:
        make_private_folder(target.parent, target.parent)
        content = _download(url)
        if not hmac.compare_digest(hashlib.sha256(content).hexdigest(), sha256):
            raise ConfigError(
                f"what came from {url} ({len(content)} bytes) is not cloudflared {VERSION}: its SHA-256 is another one, so it "
                f"was thrown away. A proxy or login page may be in between: use another network, or {_GET_ONE}"
            )
        # As a whole: a program that is half there is never found.
        if name.endswith(".tgz"):  # the hash is the archive's, which stays for the next look
            write_private(_archive_of(target), content)
            write_private(target, _unpacked(content), 0o700)
        else:
            write_private(target, content, 0o700)
    except (OSError, http.client.HTTPException, tarfile.TarError) as problem:
        raise ConfigError(f"cloudflared could not be fetched from {url} ({_reason(problem)}): {_GET_ONE}") from problem
    tell(f"Its SHA-256 is right; it took {time.monotonic() - began:.0f} s and stays at {target}\n")
    return str(target)


def fetched_path() -> Path:
    """Where a fetched program lies: a folder of this user for what can be had again."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    ending = ".exe" if os.name == "nt" else ""
    return Path(base).expanduser() / "guava_nb" / f"cloudflared-{VERSION}{ending}"


def _machine() -> tuple[str, str]:
    return platform.system().lower(), platform.machine().lower()


def _release() -> tuple[str, str] | None:
    return FILES.get(_machine())


def _archive_of(program: Path) -> Path:
    return program.with_name(f"{program.name}.tgz")


def _is_as_fetched(program: Path) -> bool:
    """Whether a program that lies there is the release, to the byte: it is run as this user."""
    if (release := _release()) is None:
        return False
    name, sha256 = release
    try:
        make_private_folder(program.parent, program.parent)
        content = program.read_bytes()
        source = _archive_of(program).read_bytes() if name.endswith(".tgz") else content
        right = hmac.compare_digest(hashlib.sha256(source).hexdigest(), sha256)
        return right and (source is content or content == _unpacked(source))
    except (OSError, tarfile.TarError, EOFError):
        return False


def _download(url: str) -> bytes:
    until = time.monotonic() + WHOLE_S
    parts = io.BytesIO()
    with urllib.request.urlopen(url, timeout=SILENCE_S) as answer:
        size = int(answer.headers.get("Content-Length") or 0)
        while piece := answer.read(_PIECE_BYTES):
            parts.write(piece)
            if parts.tell() > _MOST_BYTES:
                raise OSError(f"more than {_MOST_BYTES >> 20} MB came")
            if time.monotonic() > until:
                raise TimeoutError(f"not done after {WHOLE_S:g} s")
    if parts.tell() < size:
        raise OSError(f"the connection ended after {parts.tell()} of {size} bytes")
    return parts.getvalue()


def _unpacked(archive: bytes) -> bytes:
    """The program in a release for macOS."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        inside = next((one for one in tar if one.isfile() and Path(one.name).name == "cloudflared"), None)
        file = inside and tar.extractfile(inside)
        if not file:
            raise OSError("the archive has no cloudflared in it")
        return file.read()


def _reason(problem: Exception) -> str:
    if isinstance(problem, urllib.error.HTTPError):
        return f"the server answered {problem.code}"
    cause = getattr(problem, "reason", problem)
    said = getattr(cause, "strerror", None) or str(cause) or type(problem).__name__
    return " ".join(str(said).split())
