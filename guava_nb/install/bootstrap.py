"""What a pasted cell does: fetch guava_nb from a session, check it, have pip install it. The standard library alone.

`cell.py` puts the text of this file into the cell, without docstrings, annotations and comments; so it imports nothing of
ours. Its connection begins as a worker's does (`link/handshake.py`): TCP; where the code says so the operator's TLS and a
WebSocket; TLS whose certificate the code pins; the proof of the secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib
import json
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Any

__all__ = ["NotBrought", "bring", "fetch"]


PLAIN = re.compile(r"[-_.]+")
VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?(\+[a-z0-9.]+)?")
NEWEST = "run %guava_up again in the other notebook, and paste the cell that it shows then"


class NotBrought(Exception):  # noqa: N818 - what happened, as in the tree of our own errors
    """What went wrong, in a sentence; a notebook shows that alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class WebSocket:
    """The dialler's end of a WebSocket (RFC 6455), as `sendall` and `recv`."""

    def __init__(self, sock: Any, host: str) -> None:
        self.sock, self.file = sock, sock.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET /guava HTTP/1.1\r\nHost: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "User-Agent: guava-nb"]
        sock.sendall("\r\n".join([*lines, "ngrok-skip-browser-warning: 1\r\n\r\n"]).encode())
        answer = self.file.readline(4096)
        if b" 101 " not in answer:
            raise NotBrought(f"{host} answered {answer[:80]!r}: the tunnel stands, and no session is behind it now")
        while self.file.readline(4096).strip():
            continue

    def sendall(self, data: bytes) -> None:
        """One masked binary message."""
        size, mask = len(data), os.urandom(4)
        head = bytes([0x82, 0x80 | size]) if size < 126 else struct.pack(">BBH", 0x82, 0xFE, size)
        self.sock.sendall(head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)))

    def recv(self, most: int) -> bytes:
        """The next message that is data; b"" at the end."""
        while len(head := self.file.read(2)) == 2:
            size = head[1] & 127
            if size > 125:
                form, width = ((">H", 2), (">Q", 8))[size - 126]
                (size,) = struct.unpack(form, self.file.read(width))
            if head[0] & 15 == 8 or size > 1 << 20:
                break
            data = bytes(self.file.read(size))
            if head[0] & 15 in (0, 2) and data:  # neither a ping nor empty
                return data
        return b""


class PinnedTls:
    """TLS inside anything that has `sendall` and `recv`; the certificate must have this fingerprint."""

    def __init__(self, below: Any, fingerprint: bytes) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint decides
        self.below, self.came, self.leaves = below, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.came, self.leaves)
        self.until_done(self.tls.do_handshake)
        seen = hashlib.sha256(self.tls.getpeercert(True) or b"").digest()[: len(fingerprint)]
        if not hmac.compare_digest(seen, fingerprint):
            raise NotBrought(
                "another certificate than this cell's answers: the session was opened anew, or another machine is in between; "
                + NEWEST
            )

    def until_done(self, call: Any, *words: Any) -> Any:
        """Call until TLS wants no more bytes of the other side."""
        while True:
            try:
                return call(*words)
            except ssl.SSLWantReadError:
                self.flush()
                data = self.below.recv(1 << 16)
                if not data:
                    raise ConnectionError("the other side closed the connection") from None
                self.came.write(data)
            finally:
                self.flush()

    def flush(self) -> None:
        """Send what TLS has to say."""
        if self.leaves.pending:
            self.below.sendall(self.leaves.read())

    def sendall(self, data: bytes) -> None:
        """Encrypt and send."""
        self.until_done(self.tls.write, data)

    def recv(self, most: int) -> bytes:
        """Some bytes; b"" at the end."""
        try:
            return bytes(self.until_done(self.tls.read, most))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError, ConnectionError):
            return b""


def exactly(stream: Any, count: int) -> bytes:
    """So many bytes, or fewer where the stream ends before."""
    parts: list[bytes] = []
    while count > 0 and (data := stream.recv(count)):
        parts.append(data)
        count -= len(data)
    return b"".join(parts)


def fetch(code: str, size: int, preamble: bytes, request: bytes) -> bytes:
    """Return `size` bytes of the session's answer to `request`, over a connection that both sides proved."""
    text = code.partition(":")[2]
    body = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    _, scheme, port, secret, width = struct.unpack_from(">BBH16sB", body)
    fingerprint, rest = body[21 : 21 + width], body[21 + width :]
    host = rest[1 : 1 + rest[0]].decode()
    sock: Any = socket.create_connection((host, port), timeout=4)
    try:
        sock.settimeout(20)
        if scheme == 3:  # the tunnel's operator has an HTTPS server; inside it is TLS of ours
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        stream = WebSocket(sock, f"{host}:{port}") if scheme >= 2 else sock
        if fingerprint:
            stream = PinnedTls(stream, fingerprint)
        nonce = os.urandom(32)
        stream.sendall(preamble + nonce)
        answer = exactly(stream, len(preamble) + 32)
        theirs = answer[len(preamble) :]
        if answer[: len(preamble)] != preamble or len(theirs) < 32 or theirs == nonce:
            raise NotBrought(f"{host}:{port} answers, and it is no session of this version of guava_nb")
        both = fingerprint + nonce + theirs
        stream.sendall(hmac.digest(secret, b"dialler" + both, "sha256"))
        if exactly(stream, 33) != b"\1" + hmac.digest(secret, b"listener" + both, "sha256"):
            raise NotBrought(f"the session there does not know this cell's join code: {NEWEST}")
        stream.sendall(request)
        return exactly(stream, size)
    finally:
        sock.close()


def pip(doing: str, *words: str) -> None:
    """Run pip of this very Python; its last lines are the reason where it refuses."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-8:]
        raise NotBrought("\n".join([f"pip could not {doing}, and nothing that was here has changed:", *lines]))


def is_here(version: str, sha256: str) -> bool:
    """Whether this wheel is installed, or this version by other means: then pip has noted no hash, which is said."""
    try:
        here = metadata.distribution("guava-nb")
    except metadata.PackageNotFoundError:
        return False
    noted = json.loads(here.read_text("direct_url.json") or "{}").get("archive_info", {})
    known = noted.get("hashes", {}).get("sha256") or str(noted.get("hash", "")).partition("=")[2]
    if here.version == version and not known:
        sys.stdout.write(f"Using the guava_nb {version} that is installed here: it has no recorded hash to check.\n")
    return here.version == version and known in (sha256, "")


def bring(code: str, name: str, size: int, sha256: str, needs: list[str], preamble: bytes, request: bytes) -> None:
    """Install this very version of guava_nb, unless it is here.

    Args:
        code: the session's join code.
        name: of the wheel's file.
        size: of the wheel, in bytes.
        sha256: of it.
        needs: what a worker imports, as pip writes requirements. What is here keeps its version, whatever it is.
        preamble: of the proof.
        request: what asks the session for the wheel.

    Raises:
        NotBrought: with the sentence for a person.
    """
    version = name.split("-")[1]
    if is_here(version, sha256):
        return
    sys.stdout.write(f"Fetching guava_nb {version} ({size / 1e6:.1f} MB) from the session.\n")
    try:
        wheel = fetch(code, size, preamble, request)
    except (OSError, struct.error) as problem:
        raise NotBrought(
            f"the session is not reached ({problem}): it was closed, or its tunnel was; {NEWEST}"
        ) from None
    if hashlib.sha256(wheel).hexdigest() != sha256:
        raise NotBrought(f"{len(wheel)} of {size} bytes came, and they are not what this cell expects; {NEWEST}")
    versions = {PLAIN.sub("-", str(one.metadata["Name"])).lower(): one.version for one in metadata.distributions()}
    missing = [need for need in needs if re.split("[<>=!~ ]", need)[0] not in versions]
    with tempfile.TemporaryDirectory() as folder:
        frozen, path = os.path.join(folder, "frozen.txt"), os.path.join(folder, name)
        with open(frozen, "w", encoding="utf-8") as file:
            kept = {one: at for one, at in versions.items() if at and VERSION.fullmatch(at) and one != "guava-nb"}
            file.writelines(f"{one}=={at}\n" for one, at in kept.items())
        with open(path, "wb") as binary:
            binary.write(wheel)
        if missing:
            pip(f"install {', '.join(missing)}", "--constraint", frozen, *missing)
        pip(f"install guava_nb {version}", "--no-deps", "--force-reinstall", path)
    if "guava_nb" in sys.modules:
        raise NotBrought(
            f"guava_nb {version} is installed, and this kernel has another one: restart it and run this again"
        )
    importlib.invalidate_caches()
    sys.stdout.write(f"Installed{''.join(f' {need},' for need in missing)} guava_nb {version}.\n")
