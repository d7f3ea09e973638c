"""cloudflared is fetched once, said before, and run only if it is the release whose hash we know; failures have sentences."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import platform
import tarfile
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from guava_nb.errors import ConfigError
from guava_nb.tunnels import cloudflared_program
from guava_nb.tunnels.cloudflared_program import FILES, VERSION, fetched_path, find_cloudflared, required_cloudflared

PROGRAM = b"#!/bin/sh\necho cloudflared version 0\n"


class Answer(io.BytesIO):
    """What a server sends, as urllib gives it."""

    def __init__(self, content: bytes, size: int | None = None) -> None:
        super().__init__(content)
        self.headers = {"Content-Length": str(len(content) if size is None else size)}


class Server:
    """In place of the network: what was asked, and the answer to all of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Any = Answer(PROGRAM)

    def __call__(self, url: str, timeout: float) -> Answer:
        assert timeout > 0
        self.asked.append(url)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    made = Server()
    monkeypatch.setattr(cloudflared_program.urllib.request, "urlopen", made)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    known = hashlib.sha256(PROGRAM).hexdigest()
    monkeypatch.setitem(FILES, ("linux", "x86_64"), ("cloudflared-linux-amd64", known))
    return made


def test_it_is_fetched_once_and_said_before(server: Server) -> None:
    said: list[str] = []
    path = Path(required_cloudflared("", said.append))
    assert path == fetched_path() and path.read_bytes() == PROGRAM and os.access(path, os.X_OK)
    assert server.asked == [f"{cloudflared_program.RELEASES}/{VERSION}/cloudflared-linux-amd64"]
    assert said[0] == f"cloudflared is not on PATH: fetching version {VERSION} (20 to 55 MB) from {server.asked[0]}\n"
    assert said[1].startswith("Its SHA-256 is right") and str(path) in said[1]
    assert required_cloudflared("", said.append) == str(path) == find_cloudflared()
    assert len(server.asked) == 1 and len(said) == 2


def test_the_one_on_path_or_named_is_taken_and_nothing_fetched(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "cloudflared"
    own.write_bytes(PROGRAM)
    own.chmod(0o700)
    assert required_cloudflared(str(own)) == str(own)
    with pytest.raises(ConfigError, match="there is no program /no/such: get it from https://developers"):
        required_cloudflared("/no/such")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert required_cloudflared() == str(own)
    assert server.asked == []


def test_other_bytes_than_the_release_are_thrown_away(server: Server) -> None:
    server.answer = Answer(b"<html>Please log in</html>")
    with pytest.raises(
        ConfigError, match=r"\(26 bytes\) is not cloudflared .* so it was thrown away\. A proxy or login page"
    ):
        required_cloudflared("", len)
    assert not fetched_path().exists()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (urllib.error.HTTPError("u", 404, "Not Found", None, None), r"\(the server answered 404\)"),  # type: ignore[arg-type]
        (urllib.error.URLError(OSError(111, "Connection refused")), r"\(Connection refused\)"),
        (TimeoutError("timed out"), r"\(timed out\)"),
        (Answer(PROGRAM[:9], len(PROGRAM)), rf"\(the connection ended after 9 of {len(PROGRAM)} bytes\)"),
    ],
)
def test_each_failure_has_its_sentence(server: Server, answer: Any, why: str) -> None:
    server.answer = answer
    with pytest.raises(
        ConfigError, match=f"could not be fetched from http.*{why}: get it from https://developers"
    ) as caught:
        required_cloudflared("", len)
    assert "\n" not in str(caught.value)
    assert not fetched_path().exists()


def test_a_full_disk_leaves_nothing_half(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"\(No space left on device\)"):
        required_cloudflared("", len)
    assert list(fetched_path().parent.iterdir()) == []


def test_a_download_that_drips_or_never_ends_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudflared_program, "WHOLE_S", -1.0)
    with pytest.raises(ConfigError, match="not done after"):
        required_cloudflared("", len)
    monkeypatch.setattr(cloudflared_program, "WHOLE_S", 60.0)
    monkeypatch.setattr(cloudflared_program, "_MOST_BYTES", 5)
    server.answer = Answer(PROGRAM)
    with pytest.raises(ConfigError, match="more than 0 MB came"):
        required_cloudflared("", len)


def test_a_system_without_a_release_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="none is fetched for linux on riscv64: get it from"):
        required_cloudflared("", len)
    assert server.asked == []


def packed_for_macos() -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        info = tarfile.TarInfo("cloudflared")
        info.size = len(PROGRAM)
        tar.addfile(info, io.BytesIO(PROGRAM))
    return packed.getvalue()


def test_the_release_for_macos_is_unpacked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_for_macos()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    known = hashlib.sha256(packed).hexdigest()
    monkeypatch.setitem(FILES, ("darwin", "arm64"), ("cloudflared-darwin-arm64.tgz", known))
    server.answer = Answer(packed)
    assert Path(required_cloudflared("", len)).read_bytes() == PROGRAM


def test_every_release_file_has_a_hash() -> None:
    assert all(len(sha256) == 64 and int(sha256, 16) for _, sha256 in FILES.values())


@pytest.mark.parametrize(
    "damage", ["other bytes", "a link to another program", "of a version before, without its archive"]
)
@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_a_fetched_program_that_was_changed_is_not_run_but_fetched_anew(
    system: str, damage: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = PROGRAM
    if system == "Darwin":
        content = packed_for_macos()
        monkeypatch.setattr(platform, "system", lambda: "Darwin")
        monkeypatch.setattr(platform, "machine", lambda: "arm64")
        known = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(FILES, ("darwin", "arm64"), ("cloudflared-darwin-arm64.tgz", known))
    server.answer = Answer(content)
    path = Path(required_cloudflared("", len))
    assert find_cloudflared() == str(path)
    if damage == "other bytes":
        path.write_bytes(b"#!/bin/sh\ntouch touched\n")
    elif damage.startswith("a link"):
        (tmp_path / "other").write_bytes(b"#!/bin/sh\ntouch touched\n")
        path.unlink()
        path.symlink_to(tmp_path / "other")
    elif system == "Darwin":
        path.with_name(f"{path.name}.tgz").unlink()
    else:
        path.write_bytes(b"")
    assert find_cloudflared() is None
    server.answer = Answer(content)
    assert required_cloudflared("", len) == str(path) == find_cloudflared()
    assert path.read_bytes() == PROGRAM and len(server.asked) == 2


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner and no mode here")
def test_its_folder_is_of_this_user_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o002)
    try:
        required_cloudflared("", len)
    finally:
        os.umask(before)
    folder = fetched_path().parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o775)
    assert find_cloudflared() and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert find_cloudflared() is None
    with pytest.raises(ConfigError, match="another user owns it"):
        required_cloudflared("", len)
