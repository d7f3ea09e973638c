"""TLS 1.3 as a layer over any stream.

`ssl.SSLSocket` must not be read and written by two threads at once, and cannot run over anything but a socket. Here an
`ssl.SSLObject` works on two memory buffers and the bytes travel over the stream below:

- `_crypto` is held around cryptography only, never while waiting for the network: reading and writing overlap.
- `_sending` covers encrypting *and* sending, so that records leave in the order they were made.
- What reading wants to send (a key update) joins the buffer of encrypted bytes. The reader sends it only if that cannot
  block; otherwise the next sender does: a reader that waits for a sender may wait for a peer that waits for it.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from guava_nb.errors import AuthenticationError, LinkBroken, LinkTimeout, RemoteProtocolError
from guava_nb.transport.certificate import fingerprint_of
from guava_nb.transport.stream import Buffer, Stream, flatten

__all__ = ["TlsStream"]

_FIRST_BYTES = 16
_RECORD_BYTES = 16 << 10  # the largest TLS record
_SEAL_BYTES = 8 * _RECORD_BYTES  # encrypted, then sent: few calls, and still in the processor's cache
_FETCH_BYTES = 16 * _RECORD_BYTES  # ciphertext taken at once, at most: the buffer of a busy stream grows to it
# But not before its owner has read so much: a stranger is read no further than its proof, however much it sends.
_GROWS_AFTER_BYTES = 64 << 10
# Each record that is decrypted gives the interpreter's lock away and takes it again, so that streams which decrypt at one time
# mostly wake each other. They take turns, and a stream that waits for its turn does not compete.
_TURN = threading.Lock()


class TlsStream(Stream):
    """An encrypted stream over another one. Made by `over_client`, `over_server` or `over_gateway`."""

    def __init__(self, stream: Stream, context: ssl.SSLContext, server_side: bool, name: str | None = None) -> None:
        self.local, self.peer = stream.local, stream.peer
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=name)
        self._crypto = threading.Lock()
        self._sending = threading.Lock()
        self._fetched = memoryview(bytearray(_RECORD_BYTES))
        self._opened_bytes = 0  # that its owner has read
        self._is_full = False  # the last view was filled: more of its record may wait in OpenSSL
        self._first = b""  # bytes of the other side: they tell who it is when it is no TLS

    @classmethod
    def over_client(cls, stream: Stream, fingerprint: bytes, timeout_s: float = 10.0) -> TlsStream:
        """Shake hands as the dialler and check the listener's certificate.

        Args:
            stream: connected; closed by the caller if this raises.
            fingerprint: what `Certificate.fingerprint16` of the listener must be.
            timeout_s: seconds for the whole handshake.

        Raises:
            AuthenticationError: another certificate than the join code promises.
            RemoteProtocolError: the other side does not speak TLS 1.3.
            LinkTimeout: the handshake took too long.
            LinkBroken: the connection ended.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the fingerprint decides, right below
        tls = cls(stream, context, server_side=False)
        tls._shake_hands(timeout_s)
        seen = fingerprint_of(tls._tls.getpeercert(binary_form=True) or b"")
        if not hmac.compare_digest(seen, fingerprint):
            raise AuthenticationError(
                "the join code is of a session that was closed and opened again, or another machine is in between: ask for the "
                f"newest one ({stream.peer} shows the certificate {seen[:4].hex()}..., the code says {fingerprint[:4].hex()}...)"
            )
        return tls

    @classmethod
    def over_gateway(cls, stream: Stream, name: str, timeout_s: float = 10.0) -> TlsStream:
        """Shake hands with the HTTPS server of a tunnel's operator, whose certificate an authority vouches for.

        What passes is ours to encrypt once more: this layer only gets it through the operator's door.

        Args:
            stream: connected; closed by the caller if this raises.
            name: host name that the certificate must be for.
            timeout_s: seconds for the whole handshake.

        Raises:
            AuthenticationError: no authority that this machine trusts vouches for that name.
            RemoteProtocolError: the other side does not speak TLS.
            LinkTimeout: the handshake took too long.
            LinkBroken: the connection ended.
        """
        tls = cls(stream, _gateway_context(), server_side=False, name=name)
        tls._shake_hands(timeout_s)
        return tls

    @classmethod
    def over_server(
        cls, stream: Stream, context: ssl.SSLContext, timeout_s: float = 10.0, early: bytes = b""
    ) -> TlsStream:
        """Shake hands as the listener.

        Args:
            stream: connected; closed by the caller if this raises.
            context: from `Certificate.server_context`.
            timeout_s: seconds for the whole handshake.
            early: what was received of the other side's hello already.

        Raises:
            RemoteProtocolError: the other side does not speak TLS 1.3.
            LinkTimeout: the handshake took too long.
            LinkBroken: the connection ended.
        """
        tls = cls(stream, context, server_side=True)
        tls._incoming.write(early)
        tls._first = early
        tls._shake_hands(timeout_s)
        return tls

    def _shake_hands(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        late = LinkTimeout(f"the TLS handshake with {self.peer} was not done within {timeout_s:.3g} s")
        while not self._handshake_step():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise late
            self._stream.set_deadline(left_s)
            try:
                count = self._fetch()
            except LinkTimeout:
                raise late from None
            if not count:
                raise LinkBroken(f"{self.peer} closed the connection during the TLS handshake")
            self._first = self._first or bytes(self._fetched[: min(count, _FIRST_BYTES)])
        self._stream.set_deadline(None)

    def _handshake_step(self) -> bool:
        """Go on as far as the bytes at hand allow; whether the handshake is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLCertVerificationError as problem:
            raise AuthenticationError(
                f"{self._tls.server_hostname} shows a certificate that this machine does not trust "
                f"({problem.verify_message}): another's address, a wrong clock here, or a proxy that opens encrypted "
                "traffic, whose own authority SSL_CERT_FILE must name"
            ) from problem
        except ssl.SSLError as problem:
            raise RemoteProtocolError(
                f"{self.peer} does not speak our TLS: {_reason(problem, self._first)}"
            ) from problem
        finally:
            if self._outgoing.pending:
                self._stream.send_all((self._outgoing.read(),))
        return True

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Encrypt and send, a piece that fits the processor's cache at a time."""
        is_record = len(buffers) == 1 and type(buffers[0]) is bytes and 0 < len(buffers[0]) <= _RECORD_BYTES
        with self._sending:
            for piece in (buffers,) if is_record else _pieces(flatten(buffers)):
                with self._crypto:
                    sealed = self._seal(piece)
                self._stream.send_all((sealed,))

    def _seal(self, piece: Sequence[Buffer]) -> bytes:
        write = self._tls.write
        try:
            for view in piece:
                done = write(view)  # all of it: memory never pushes back
                while done < len(view):
                    done += write(view[done:])
        except ssl.SSLError as problem:
            raise LinkBroken(f"TLS to {self.peer} broke: {_reason(problem)}") from problem
        return self._outgoing.read()

    def recv_into(self, view: memoryview) -> int:
        """Decrypt into `view` all that is at hand, or wait for the first bytes."""
        while True:
            # Asking OpenSSL in vain costs an exception: more than decrypting a small message. Asking what is pending there
            # gives the interpreter's lock away, and a thread that takes it may keep it while the next message waits here.
            if self._incoming.pending or (self._is_full and self._tls.pending()):
                if self._incoming.pending < _RECORD_BYTES:  # little, and perhaps urgent
                    count = self._open(view)
                else:
                    with _TURN:
                        count = self._open(view)
                if self._outgoing.pending:
                    self._send_owed()
                if count is not None:
                    return count
            if not self._fetch():
                return 0

    def _open(self, view: memoryview) -> int | None:
        """Decrypt record after record; None when the next one is not here yet, 0 when the peer ended TLS."""
        with self._crypto:
            count = self._open_records(view)
        self._is_full = count == len(view)
        self._opened_bytes += count or 0
        return count

    def _open_records(self, view: memoryview) -> int | None:
        read = cast(Callable[[int, memoryview], int], self._tls.read)  # with a buffer it gives a count
        size, done = len(view), 0
        try:
            while done < size:
                count = read(size, view[done:])
                done += count
                if not count or not self._incoming.pending:  # with room left in view, the record was read to its end
                    break
        except ssl.SSLWantReadError:
            return done or None
        except ssl.SSLZeroReturnError:
            return done
        except ssl.SSLError as problem:
            raise LinkBroken(f"TLS from {self.peer} broke: {_reason(problem)}") from problem
        return done

    def _fetch(self) -> int:
        """Wait for ciphertext; 0 at the end of the stream."""
        count = self._stream.recv_into(self._fetched)
        if count:
            with self._crypto:
                self._incoming.write(self._fetched[:count])
        if count == len(self._fetched) < _FETCH_BYTES and self._opened_bytes >= _GROWS_AFTER_BYTES:
            # A hub of 1,000 workers has 2,000 streams, few of them busy.
            self._fetched = memoryview(bytearray(4 * count))
        return count

    def _send_owed(self) -> None:
        if not self._sending.acquire(blocking=False):
            return
        try:
            if self._stream.can_send_now():
                with self._crypto:
                    owed = self._outgoing.read()
                self._stream.send_all((owed,))
        finally:
            self._sending.release()

    def can_send_now(self) -> bool:
        """Whether no thread is sending and the stream below takes a few kilobytes at once."""
        return not self._sending.locked() and self._stream.can_send_now()

    def set_deadline(self, recv_s: float | None) -> None:
        """Let each later wait for ciphertext last at most `recv_s` seconds."""
        self._stream.set_deadline(recv_s)

    def shutdown(self) -> None:
        """End the stream below. No TLS alert is sent: it could block; a true end is said by our own goodbye."""
        self._stream.shutdown()

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()


def _gateway_context() -> ssl.SSLContext:
    """Trust whom the system trusts, or the authorities in SSL_CERT_FILE; HTTP/1.1, since HTTP/2 has no upgrade."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:  # none, or a folder that is read when it is asked
        with contextlib.suppress(ImportError):
            certifi = importlib.import_module("certifi")
            context.load_verify_locations(certifi.where())
    context.set_alpn_protocols(["http/1.1"])
    return context


def _pieces(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """Group views to be encrypted and sent at once.

    Small ones are joined into one record, together with the start of a big one that follows: neither a header nor a
    short list of scalars costs a record of its own. Big ones are cut.
    """
    if sum(map(len, views)) <= _RECORD_BYTES:
        if views:
            yield [views[0] if len(views) == 1 else memoryview(b"".join(views))]
        return
    small: list[memoryview] = []
    small_bytes = 0
    for view in views:
        head = min(len(view), _RECORD_BYTES - small_bytes) if small or len(view) < _RECORD_BYTES else 0
        if head:
            small.append(view[:head])
            small_bytes += head
        if head == len(view):
            continue
        lead = [memoryview(b"".join(small))] if small else []
        small, small_bytes = [], 0
        stop = head + _SEAL_BYTES - (_RECORD_BYTES if lead else 0)
        while True:
            if len(view) - stop < _RECORD_BYTES:
                stop = len(view)  # a short rest is not worth a call of its own
            yield [*lead, view[head:stop]]
            if stop == len(view):
                break
            lead, head, stop = [], stop, stop + _SEAL_BYTES
    if small:
        yield [memoryview(b"".join(small))]


def _reason(problem: ssl.SSLError, first: bytes = b"") -> str:
    if first.startswith(b"SSH-"):
        return "an SSH server or client answers there"
    if first.startswith(b"HTTP/"):
        return "a web server answers there"
    known = {
        "HTTP_REQUEST": "it sent a plain HTTP request (a web browser or scanner)",
        "HTTPS_PROXY_REQUEST": "it sent an HTTP proxy request (a web browser or scanner)",
        "WRONG_VERSION_NUMBER": "its bytes are not TLS (plain text to an encrypted port, or the other way round)",
        "RECORD_LAYER_FAILURE": "its bytes are not TLS (plain text to an encrypted port, or the other way round)",
        "UNSUPPORTED_PROTOCOL": "it has no TLS 1.3",
        "NO_SHARED_CIPHER": "no common cipher",
    }
    reason = problem.reason or ""
    return known.get(reason, reason.lower().replace("_", " ") or "bad record")
