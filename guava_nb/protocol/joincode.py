"""The one line that a person copies from the orchestrator's notebook to a worker's.

    guava1:<base64url of the body, without padding>

    body    length (1)  scheme (1)  port (2, big endian)  secret (16)  fingerprint length (1, 0 or 16)  fingerprint
            host length (1)  host (UTF-8)  checksum (4)

`length` counts the whole body, so that a code that was cut off is told from one that was damaged. The checksum is the
beginning of SHA-256 over all before it. Who has the line may join: it stands in the
cell to paste alone, never in a log or an error.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import struct
import unicodedata
from dataclasses import dataclass, field, replace

from guava_nb.errors import JoinCodeError

__all__ = ["SCHEMES", "JoinCode", "check_same_session"]

#: How the listener is reached; the position is the number in the code.
SCHEMES = ("tcp", "tls", "ws", "wss")
_VERSION = 1
_SECRET_BYTES = 16
_FINGERPRINT_BYTES = 16
_CHECKSUM_BYTES = 4
_MAX_HOST_BYTES = 180
_FIXED = struct.Struct(">BBH16sB")
_PREFIX = re.compile(r"guava\s*([0-9]+)\s*:", re.IGNORECASE)
_ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
# What programs put into a line on its way through a clipboard: quotes, prompts, marks of continued lines.
_HARMLESS = frozenset("\"'`\u2018\u2019\u201c\u201d\u00ab\u00bb>$%\\.\u2026|:")
# Text editors turn hyphens into these.
_HYPHENS = str.maketrans({"\u2010": "-", "\u2011": "-", "\u2212": "-", "\u2013": "-", "\u2014": "--"})
_COPY_AGAIN = "copy the whole line again from the orchestrator's notebook"


@dataclass(frozen=True, slots=True, repr=False)
class JoinCode:
    """Where a listener is and what proves that it is the right one.

    Attributes:
        host: name or address, IPv6 without brackets.
        port: 1 to 65535.
        fingerprint: first 16 bytes of SHA-256 of the listener's DER certificate; b"" when TLS is off.
        secret: 16 bytes.
        scheme: one of `SCHEMES`; "tls" has a fingerprint, "tcp" has none, "ws" and "wss" may have one.
    """

    host: str
    port: int
    fingerprint: bytes
    secret: bytes = field(repr=False)
    scheme: str = "tls"

    def __post_init__(self) -> None:
        """Refuse what could not be encoded or dialled.

        Raises:
            JoinCodeError: a part is out of its range; the message never shows the secret.
        """
        problem = _problem(self)
        if problem:
            raise JoinCodeError(problem)

    @classmethod
    def new(
        cls, host: str, port: int, fingerprint: bytes = b"", secret: bytes | None = None, scheme: str | None = None
    ) -> JoinCode:
        """Make a code for a listener.

        Args:
            host: name or address; brackets around an IPv6 address are taken off.
            port: 1 to 65535.
            fingerprint: 16 bytes, or b"" when TLS is off.
            secret: 16 bytes; drawn when None.
            scheme: "tls" with a fingerprint and "tcp" without when None.

        Raises:
            JoinCodeError: a part is out of its range.
        """
        secret = secrets.token_bytes(_SECRET_BYTES) if secret is None else secret
        return cls(_bare(host), port, fingerprint, secret, scheme or ("tls" if fingerprint else "tcp"))

    def with_address(self, host: str, port: int, scheme: str | None = None) -> JoinCode:
        """The same listener at another address, as behind a tunnel.

        Args:
            host, port: where it is reached.
            scheme: one of `SCHEMES`; None keeps the present one.
        """
        return replace(self, host=_bare(host), port=port, scheme=scheme or self.scheme)

    @property
    def address(self) -> str:
        """host:port, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def encode(self) -> str:
        """The line to hand over; treat it like a password."""
        host = self.host.encode()
        rest = self.fingerprint + bytes([len(host)]) + host
        length = _FIXED.size + len(rest) + _CHECKSUM_BYTES
        scheme = SCHEMES.index(self.scheme)
        body = _FIXED.pack(length, scheme, self.port, self.secret, len(self.fingerprint)) + rest
        return f"guava{_VERSION}:" + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> JoinCode:
        """Read a code as people paste it.

        Spaces, line breaks, quotes, prompt characters, zero-width characters, and text before or after it do no harm.

        Raises:
            JoinCodeError: no code, another version, cut off, or damaged; the message shows nothing of the code.
        """
        return cls._from_body(_checked(_body(text)))

    @classmethod
    def _from_body(cls, body: bytes) -> JoinCode:
        _, scheme, port, secret, fingerprint_bytes = _FIXED.unpack_from(body)
        at = _FIXED.size + fingerprint_bytes
        if at >= len(body) or at + 1 + body[at] != len(body):
            raise JoinCodeError("the join code's parts do not fit its length: it was not made by guava_nb")
        if scheme >= len(SCHEMES):
            raise JoinCodeError("the join code asks for a way to connect that this version lacks: update guava-nb here")
        try:
            host = body[at + 1 :].decode()
        except UnicodeDecodeError as error:
            raise JoinCodeError("the join code's host name cannot be read: it was not made by guava_nb") from error
        return cls(host, port, body[_FIXED.size : at], secret, SCHEMES[scheme])

    def __repr__(self) -> str:
        return f"JoinCode({self.address}, secret hidden)"

    __str__ = __repr__


def check_same_session(old: JoinCode, new: JoinCode) -> None:
    """Refuse a new code that does not lead to the listener of the old one: another secret, or another certificate's fingerprint.

    Raises:
        JoinCodeError: it is of another listener.
    """
    same_certificate = not (old.fingerprint and new.fingerprint) or old.fingerprint == new.fingerprint
    if not (secrets.compare_digest(old.secret, new.secret) and same_certificate):
        raise JoinCodeError(
            "this join code belongs to another session than the one that is worked for: take the newest code of the same "
            "session, or leave this one first"
        )


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _problem(code: JoinCode) -> str:
    host = code.host.encode(errors="replace")
    if not 0 < len(host) <= _MAX_HOST_BYTES or any(not char.isprintable() or char.isspace() for char in code.host):
        return f"a join code needs a host name or address of 1 to {_MAX_HOST_BYTES} bytes without spaces"
    if not 0 < code.port < 1 << 16:
        return f"a join code needs a port from 1 to 65535, not {code.port}"
    if len(code.secret) != _SECRET_BYTES:
        return f"a join code needs a secret of {_SECRET_BYTES} bytes, not {len(code.secret)}"
    if len(code.fingerprint) not in (0, _FINGERPRINT_BYTES):
        return f"a join code needs a fingerprint of {_FINGERPRINT_BYTES} bytes or none, not {len(code.fingerprint)}"
    if code.scheme not in SCHEMES:
        return f"a join code needs a scheme out of {', '.join(SCHEMES)}, not {code.scheme!r}"
    if code.scheme in ("tcp", "tls") and (code.scheme == "tls") != bool(code.fingerprint):
        return f"a join code of scheme {code.scheme} {'needs a' if code.scheme == 'tls' else 'has no'} fingerprint"
    return ""


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"guava join code" + body).digest()[:_CHECKSUM_BYTES]


def _body(text: str) -> bytes:
    """Find the code in pasted text and give its bytes, whole or not."""
    visible = "".join(char for char in text if unicodedata.category(char) not in ("Cf", "Cc", "Mn") or char.isspace())
    plain = unicodedata.normalize("NFKC", visible).translate(_HYPHENS)
    start = _PREFIX.search(plain)
    if start is None:
        raise JoinCodeError(f"this is no join code: it has {len(text)} characters but no 'guava1:'; {_COPY_AGAIN}")
    if int(start[1][:9]) != _VERSION:
        raise JoinCodeError(
            f"this join code is of version {start[1][:9]}, this package reads version {_VERSION}: "
            "install the same guava-nb on both sides"
        )
    symbols = []
    for char in plain[start.end() :]:
        if char in _ALPHABET:
            symbols.append(char)
        elif not char.isspace() and char not in _HARMLESS:
            break
    if len(symbols) % 4 == 1:  # a lone symbol is less than a byte
        symbols.pop()
    return base64.urlsafe_b64decode("".join(symbols) + "=" * (-len(symbols) % 4))


def _checked(data: bytes) -> bytes:
    """Check length and checksum; give the body without its checksum."""
    if not data:
        raise JoinCodeError(f"the join code is cut off right after its beginning; {_COPY_AGAIN}")
    length = data[0]
    if length < _FIXED.size + _CHECKSUM_BYTES + 2:
        raise JoinCodeError(f"the join code is damaged at its beginning; {_COPY_AGAIN}")
    if len(data) < length:
        raise JoinCodeError(
            f"the join code is cut off: {_missing(length - len(data), length)} is missing; {_COPY_AGAIN}"
        )
    body, checksum = data[: length - _CHECKSUM_BYTES], data[length - _CHECKSUM_BYTES : length]
    if not secrets.compare_digest(checksum, _checksum(body)):
        raise JoinCodeError(f"the join code is damaged: its checksum does not fit; {_COPY_AGAIN}")
    return body


def _missing(count: int, length: int) -> str:
    """How much of a code is not there, in words, since a count of bytes helps no reader."""
    part = count / length
    return "most of it" if part > 0.6 else "about half of it" if part > 0.4 else "a part" if part > 0.1 else "its end"
