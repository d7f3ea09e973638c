r"""The mutual proof: both sides show that they hold the join code's secret before anything else is parsed.

Knows a fixed layout of bytes; knows no records and no sockets. The secret itself never travels. Each proof covers the
role, the certificate's fingerprint and both nonces, so that it serves no other connection, direction or certificate.

    dialler to listener   "GUAVA9\0\0"  nonce (32)
    listener to dialler   "GUAVA9\0\0"  nonce (32)
    dialler to listener   HMAC-SHA256(secret, "dialler" fingerprint dialler's-nonce listener's-nonce)
    listener to dialler   0x01  HMAC-SHA256(secret, "listener" fingerprint dialler's-nonce listener's-nonce)
                 or       0x00  reason (1)
"""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable

from guava_nb.errors import (
    AuthenticationError,
    ConfigError,
    GuavaError,
    LocalProtocolError,
    RemoteProtocolError,
    VersionMismatch,
)
from guava_nb.protocol.header import WIRE_VERSION

__all__ = ["MIN_SECRET_BYTES", "PREAMBLE", "DiallerProof", "ListenerProof"]

#: Tells the wire version, so that both sides of two versions learn why they do not understand each other.
PREAMBLE = b"GUAVA%d\0\0" % WIRE_VERSION
#: Shorter secrets could be found by trying.
MIN_SECRET_BYTES = 16

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_ACCEPTED, _REFUSED = b"\x01", b"\x00"
_WRONG_PROOF, _REFLECTED = b"\x01", b"\x02"
_REASONS = {
    _WRONG_PROOF: "it does not know this join code, or the code belongs to another certificate",
    _REFLECTED: "it got its own bytes back, so something between the two sides repeats what it hears",
}
_NEW_CODE = "Copy the newest join code from the orchestrator's notebook and try again"
# How strangers begin, longest first where one begins with another.
_STRANGERS = {
    b"\x16\x03": "a TLS hello where this side is plain: a browser, a scanner, or a join code of another listener",
    b"HTTP/": "an HTTP answer: the address belongs to a web server or to a tunnel of another kind",
    b"GET ": "an HTTP request: a web browser or a scanner",
    b"POST ": "an HTTP request: a web browser or a scanner",
    b"PUT ": "an HTTP request: a web browser or a scanner",
    b"HEAD ": "an HTTP request: a web browser or a scanner",
    b"OPTIONS ": "an HTTP request: a web browser or a scanner",
    b"CONNECT ": "an HTTP request: a proxy or a scanner",
    b"SSH-": "an SSH greeting: the address belongs to an SSH server or client",
}


def _stranger(preamble: bytes) -> RemoteProtocolError:
    if preamble.startswith(b"GUAVA"):
        version = preamble[5:6].decode("ascii", "replace")
        return VersionMismatch(
            f"the other side proves itself by version {version!r}, this side by '{WIRE_VERSION}'; install the same "
            "guava-nb on both"
        )
    for beginning, who in _STRANGERS.items():
        if preamble.startswith(beginning):
            return RemoteProtocolError(f"the other side is no guava_nb: it began with {who}")
    return RemoteProtocolError("the other side is no guava_nb: its first bytes are unknown; check the address and port")


class _Proof(ABC):
    """What both roles share: bytes in by exact counts, bytes out, and an end."""

    def __init__(self, secret: bytes, fingerprint: bytes) -> None:
        """Draw the nonce.

        Args:
            secret: the join code's secret, at least 16 bytes.
            fingerprint: the join code's certificate fingerprint; b"" without TLS.

        Raises:
            ConfigError: the secret is too short.
        """
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"a secret of {len(secret)} bytes can be guessed; at least {MIN_SECRET_BYTES} are needed")
        self._secret, self._fingerprint = secret, fingerprint
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._peer_nonce = b""
        self._outgoing = b""
        self._pending = b""
        self._wanted = 0
        self.done = False
        self.error: GuavaError | None = None

    @property
    def bytes_wanted(self) -> int:
        """How many bytes must come next; 0 when nothing more is read, after `done` or `error`."""
        return self._wanted - len(self._pending)

    def to_send(self) -> bytes:
        """Take the bytes to send now, b"" for none. Ask after every `receive`, even when it led to an error."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def receive(self, data: bytes) -> None:
        """Take bytes from the peer, at most `bytes_wanted` of them.

        Raises:
            LocalProtocolError: more bytes than wanted; what follows the proof belongs to the decoder.
        """
        if len(data) > self.bytes_wanted:
            raise LocalProtocolError(f"the proof wants {self.bytes_wanted} bytes, not {len(data)}")
        self._pending += data
        if self._pending and len(self._pending) == self._wanted:
            whole, self._pending, self._wanted = self._pending, b"", 0
            self._came(whole)

    @abstractmethod
    def _came(self, data: bytes) -> None:
        """Handle the whole of what was wanted, and say what is wanted next."""

    def _hmac(self, role: bytes, dialler_nonce: bytes, listener_nonce: bytes) -> bytes:
        return hmac.digest(self._secret, role + self._fingerprint + dialler_nonce + listener_nonce, "sha256")

    def _fail(self, error: GuavaError) -> None:
        self.error = error

    def __repr__(self) -> str:
        state = "done" if self.done else "failed" if self.error else f"wants {self.bytes_wanted} bytes"
        return f"<{type(self).__name__} {state}, secret hidden>"


class DiallerProof(_Proof):
    """The dialler's half. `error` is a VersionMismatch, RemoteProtocolError or AuthenticationError once it failed."""

    def __init__(self, secret: bytes, fingerprint: bytes) -> None:
        """Begin; see `_Proof`."""
        super().__init__(secret, fingerprint)
        self._outgoing = PREAMBLE + self._nonce
        self._wanted = len(PREAMBLE)
        self._next: Callable[[bytes], None] = self._preamble_came

    def _came(self, data: bytes) -> None:
        self._next(data)

    def _preamble_came(self, preamble: bytes) -> None:
        if preamble != PREAMBLE:
            self._fail(_stranger(preamble))
            return
        self._wanted, self._next = _NONCE_BYTES, self._nonce_came

    def _nonce_came(self, nonce: bytes) -> None:
        if hmac.compare_digest(nonce, self._nonce):
            self._fail(AuthenticationError("the other side only repeats what it hears: it is no listener of guava_nb"))
            return
        self._peer_nonce = nonce
        self._outgoing = self._hmac(b"dialler", self._nonce, nonce)
        self._wanted, self._next = 1, self._verdict_came

    def _verdict_came(self, verdict: bytes) -> None:
        if verdict == _ACCEPTED:
            self._wanted, self._next = _PROOF_BYTES, self._proof_came
        elif verdict == _REFUSED:
            self._wanted, self._next = 1, self._reason_came
        else:
            self._fail(RemoteProtocolError(f"the listener answered the proof with {verdict!r}, which means nothing"))

    def _reason_came(self, reason: bytes) -> None:
        why = _REASONS.get(reason, f"reason {reason[0]}, which this version does not know")
        self._fail(AuthenticationError(f"the listener refused the join code: {why}. {_NEW_CODE}."))

    def _proof_came(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._hmac(b"listener", self._nonce, self._peer_nonce)):
            self._fail(
                AuthenticationError(
                    f"the listener cannot prove that it made this join code. {_NEW_CODE}; nothing was sent."
                )
            )
            return
        self.done = True


class ListenerProof(_Proof):
    """The listener's half. `error` as in `DiallerProof`; what `to_send` gives after it tells the peer why."""

    def __init__(self, secret: bytes, fingerprint: bytes) -> None:
        """Begin; see `_Proof`."""
        super().__init__(secret, fingerprint)
        self._wanted = len(PREAMBLE)
        self._next: Callable[[bytes], None] = self._preamble_came

    def _came(self, data: bytes) -> None:
        self._next(data)

    def _preamble_came(self, preamble: bytes) -> None:
        if preamble != PREAMBLE:
            error = _stranger(preamble)
            # A dialler of another version learns from these bytes what it met; strangers learn nothing.
            self._outgoing = PREAMBLE if isinstance(error, VersionMismatch) else b""
            self._fail(error)
            return
        self._wanted, self._next = _NONCE_BYTES, self._nonce_came

    def _nonce_came(self, nonce: bytes) -> None:
        self._peer_nonce = nonce
        self._outgoing = PREAMBLE + self._nonce
        self._wanted, self._next = _PROOF_BYTES, self._proof_came

    def _proof_came(self, proof: bytes) -> None:
        if hmac.compare_digest(self._peer_nonce, self._nonce):
            self._refuse(_REFLECTED, "the dialler sent this side's own nonce")
        elif not hmac.compare_digest(proof, self._hmac(b"dialler", self._peer_nonce, self._nonce)):
            self._refuse(_WRONG_PROOF, "the dialler does not hold this join code, or an older one")
        else:
            self._outgoing = _ACCEPTED + self._hmac(b"listener", self._peer_nonce, self._nonce)
            self.done = True

    def _refuse(self, reason: bytes, sentence: str) -> None:
        self._outgoing = _REFUSED + reason
        self._fail(AuthenticationError(sentence))
