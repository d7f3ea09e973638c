"""WebSocket (RFC 6455) as a layer over any stream, for ways that pass nothing but HTTP.

The bytes of the stream travel in binary messages whose borders mean nothing. The rules (handshake, masking, control frames) are
`websockets`' sans-I/O protocols; here are the stream below, the limits, and two threads at once:

- `_rules` is held while the protocol object works on memory, never while waiting for the network.
- `_sending` covers making frames *and* sending them, so that they leave whole and in order.
- What reading wants to send (a pong, the answer to a close) goes out at once only if that cannot block, else before the
  next message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from guava_nb.config.version import installed_version
from guava_nb.errors import FrameTooLarge, GuavaError, LinkBroken, LinkTimeout, RemoteProtocolError
from guava_nb.transport.http_answers import ngrok_page, read_answer, refusal
from guava_nb.transport.stream import Buffer, Stream, flatten

__all__ = ["PATH", "WebSocketStream", "begins_http"]

#: What a dialler asks for; everything else on the port is a stranger.
PATH = "/guava"
#: A browser's name here would make ngrok answer with a page for people instead of passing the request on.
_HEADERS = {"User-Agent": f"guava-nb/{installed_version()}", "ngrok-skip-browser-warning": "1"}

_PIECE_BYTES = 128 << 10  # one message: few calls, and still in the processor's cache
_MAX_MESSAGE_BYTES = 256 << 10  # taken from the peer; a whole one waits in memory
_FETCH_BYTES = 128 << 10
_MAX_REQUEST_BYTES = 16 << 10
_MAX_ANSWER_BYTES = 1 << 20  # an error page, which is read for its sentence
_MAX_OWED_BYTES = 16 << 10  # pongs that wait for a sender; a peer that asks for more than it reads is cut off
_NO_PAGE = b"this is no web page\n"
_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(_NO_PAGE) + _NO_PAGE
_METHODS = (b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC", b"PRI ")


def begins_http(beginning: bytes) -> bool:
    """Whether the first 4 bytes of a connection are an HTTP request."""
    return beginning.startswith(_METHODS)


class WebSocketStream(Stream):
    """A stream inside the binary messages of a WebSocket. Made by `over_client` or `over_server`."""

    def __init__(
        self,
        stream: Stream,
        protocol: ClientProtocol | ServerProtocol,
        where: str = "",
        ngrok: Callable[[int], str] = ngrok_page,
    ) -> None:
        self.local, self.peer = stream.local, stream.peer
        self._where = where or stream.peer  # as people know it: a gateway's address says little
        self._ngrok = ngrok
        self._stream, self._protocol = stream, protocol
        self._rules = threading.Lock()
        self._sending = threading.Lock()
        self._fetched = memoryview(bytearray(4096))
        self._ready: deque[memoryview] = deque()
        self._owed: list[bytes] = []
        self._heard = b""  # of the handshake
        self._ended = False
        self._recv_s: float | None = None

    @classmethod
    def over_client(
        cls,
        stream: Stream,
        host: str,
        port: int,
        secure: bool,
        timeout_s: float = 10.0,
        ngrok: Callable[[int], str] = ngrok_page,
    ) -> WebSocketStream:
        """Ask the other side to speak WebSocket.

        Args:
            stream: connected; closed by the caller if this raises.
            host: as the other side is called, for the request.
            port: likewise.
            secure: whether `stream` is encrypted, which makes another port the usual one.
            timeout_s: seconds for the whole handshake.
            ngrok: what a code means that ngrok answers with.

        Raises:
            LinkBroken: the connection ended, or a gateway says that nothing is behind it now.
            RemoteProtocolError: something else answers, with the sentence that fits its answer.
            LinkTimeout: the handshake took too long.
        """
        name = f"[{host}]" if ":" in host else host
        uri = parse_uri(f"{'wss' if secure else 'ws'}://{name}:{port}{PATH}")
        protocol = ClientProtocol(uri, max_size=_MAX_MESSAGE_BYTES)
        request = protocol.connect()
        for key, value in _HEADERS.items():
            request.headers[key] = value
        protocol.send_request(request)
        made = cls(stream, protocol, f"{name}:{port}", ngrok)
        made._send_answer()
        made._shake_hands(timeout_s, _MAX_ANSWER_BYTES)
        return made

    @classmethod
    def over_server(cls, stream: Stream, early: bytes = b"", timeout_s: float = 10.0) -> WebSocketStream:
        """Answer a request for a WebSocket; every other one gets a short HTTP answer.

        Args:
            stream: connected; closed by the caller if this raises.
            early: what was received of the request already.
            timeout_s: seconds for the whole handshake.

        Raises:
            RemoteProtocolError: it asks for something else; it has been told.
            FrameTooLarge: its request is longer than 16 KiB.
            LinkTimeout: the handshake took too long.
            LinkBroken: the connection ended.
        """
        made = cls(stream, ServerProtocol(max_size=_MAX_MESSAGE_BYTES))
        made._take(early)
        made._shake_hands(timeout_s, _MAX_REQUEST_BYTES - len(early))
        return made

    # ---------------------------------------------------------------------------------------------------- the handshake

    def _shake_hands(self, timeout_s: float, most_bytes: int) -> None:
        deadline = time.monotonic() + timeout_s
        while self._protocol.state is State.CONNECTING:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._too_slow(timeout_s)
            self._stream.set_deadline(left_s)
            try:
                count = self._stream.recv_into(self._fetched)
            except LinkTimeout:
                raise self._too_slow(timeout_s) from None
            most_bytes -= count
            if most_bytes < 0:
                raise self._instead() or FrameTooLarge(f"{self._where} sent HTTP headers without end")
            if not count:
                self._protocol.receive_eof()
            self._take(bytes(self._fetched[:count]))
            if not count and self._protocol.state is State.CONNECTING:
                raise LinkBroken(f"{self._where} closed the connection during the WebSocket handshake")
        self.set_deadline(None)
        self._heard, self._fetched = b"", memoryview(bytearray(_FETCH_BYTES))

    def _take(self, data: bytes) -> None:
        """Hand bytes of the handshake to the protocol, and go on as far as they allow."""
        if data:
            self._heard += data
            self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._answer(event)
            elif isinstance(event, Frame):
                self._arrived(event)
        problem = self._protocol.handshake_exc
        if problem is not None:
            if isinstance(self._protocol, ServerProtocol):  # what could not even be read as a request
                self._stream.send_all(self._outgoing() or (_BAD_REQUEST,))
            raise self._instead() or self._no_handshake(problem)

    def _instead(self) -> GuavaError | None:
        """What the other side answered instead of agreeing, read without the library, which wants such pages to be whole."""
        answer = read_answer(self._heard)
        return None if answer is None or answer.status == 101 else refusal(self._where, answer, self._ngrok)

    def _answer(self, request: Request) -> None:
        protocol = cast(ServerProtocol, self._protocol)
        ours = request.path.split("?")[0] == PATH
        response = protocol.accept(request) if ours else protocol.reject(404, "")
        if response.status_code != 101:
            response.body = _NO_PAGE  # what the library says is for people who write servers
            del response.headers["Content-Length"]
            response.headers["Content-Length"] = str(len(_NO_PAGE))
        protocol.send_response(response)
        self._send_answer()
        if response.status_code != 101:
            raise RemoteProtocolError(
                f"it sent a plain HTTP request (a web browser or scanner), answered with {response.status_code}"
            )

    def _send_answer(self) -> None:
        answer = self._outgoing()
        if answer:
            self._stream.send_all(answer)

    def _outgoing(self) -> list[bytes]:
        """What the protocol wants sent. Its empty part asks for the end, which our owner decides about."""
        return [part for part in self._protocol.data_to_send() if part]

    def _too_slow(self, timeout_s: float) -> GuavaError:
        return self._instead() or LinkTimeout(
            f"the WebSocket handshake with {self._where} was not done within {timeout_s:.3g} s"
        )

    def _no_handshake(self, problem: Exception) -> GuavaError:
        cause = problem.__cause__ or problem
        if isinstance(cause, EOFError):
            return LinkBroken(f"{self._where} closed the connection during the WebSocket handshake")
        error = RemoteProtocolError(f"{self._where} does not speak WebSocket: {cause}")
        error.__cause__ = problem
        return error

    # ---------------------------------------------------------------------------------------------------------- sending

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Send in messages of at most about 128 KiB; small buffers share one."""
        with self._sending:
            for piece in _pieces(flatten(buffers)):
                with self._rules:
                    is_open = self._protocol.state is State.OPEN
                    if is_open:
                        self._protocol.send_binary(piece)
                    frames, self._owed = [*self._owed, *self._outgoing()], []
                if frames:
                    self._stream.send_all(frames)
                if not is_open:
                    raise LinkBroken(f"{self.peer} closed the WebSocket while {self.local} was sending")

    def _send_owed(self) -> None:
        if not self._sending.acquire(blocking=False):
            return
        try:
            # Frame by frame: there is room for a few kilobytes, and this reader must not wait for a peer that reads nothing.
            while self._stream.can_send_now():
                with self._rules:
                    if not self._owed:
                        return
                    first = self._owed.pop(0)
                self._stream.send_all([first])
        finally:
            self._sending.release()

    def can_send_now(self) -> bool:
        """Whether no thread is sending and the stream below takes a few kilobytes at once."""
        return not self._sending.locked() and self._stream.can_send_now()

    # -------------------------------------------------------------------------------------------------------- receiving

    def recv_into(self, view: memoryview) -> int:
        """Copy what came, or wait for the next message."""
        if not self._ready and not self._wait_for_data():
            return 0
        done = 0
        while self._ready and done < len(view):
            part = self._ready.popleft()
            fits = min(len(part), len(view) - done)
            view[done : done + fits] = part[:fits]
            done += fits
            if fits < len(part):
                self._ready.appendleft(part[fits:])
        return done

    def _wait_for_data(self) -> bool:
        """Wait for bytes of ours; False at the end. Pings and empty frames, which a gateway on the way may send, are none."""
        until = None if self._recv_s is None else time.monotonic() + self._recv_s
        try:
            while not self._ready:
                count = 0 if self._ended else self._stream.recv_into(self._fetched)
                if not count:
                    return False
                self._receive(self._fetched[:count])
                if until is not None and not self._ready:
                    left_s = until - time.monotonic()
                    if left_s <= 0:
                        raise LinkTimeout(f"nothing but WebSocket pings came from {self.peer} for {self._recv_s:g} s")
                    self._stream.set_deadline(left_s)
        finally:
            if until is not None:
                self._stream.set_deadline(self._recv_s)
        return True

    def _receive(self, data: memoryview) -> None:
        with self._rules:
            self._protocol.receive_data(cast(bytes, data))  # a view does as well, and is not copied for it
            events = self._protocol.events_received()
            self._owed += self._outgoing()
            owed_bytes = sum(map(len, self._owed))
        for event in events:
            self._arrived(cast(Frame, event))
        if owed_bytes:
            self._send_owed()
        if owed_bytes > _MAX_OWED_BYTES:
            raise RemoteProtocolError(f"{self.peer} sends pings and does not read the answers")
        if self._protocol.parser_exc is not None:
            self._ended = True
            problem = self._protocol.parser_exc
            raise RemoteProtocolError(f"{self.peer} broke the rules of WebSocket: {problem}") from problem

    def _arrived(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.BINARY, Opcode.CONT):
            if frame.data:
                self._ready.append(memoryview(frame.data))
        elif frame.opcode is Opcode.TEXT:
            self._ended = True
            raise RemoteProtocolError(f"{self.peer} sent text over the WebSocket: it is no guava_nb")
        elif frame.opcode is Opcode.CLOSE:
            self._ended = True

    def set_deadline(self, recv_s: float | None) -> None:
        """Let each later wait for bytes of ours last at most `recv_s` seconds; a ping of a proxy is no sign of life of theirs."""
        self._recv_s = recv_s
        self._stream.set_deadline(recv_s)

    def shutdown(self) -> None:
        """End the stream below. No close frame is sent: it could block; a true end is said by our own goodbye."""
        self._stream.shutdown()

    def close(self) -> None:
        """Close the stream below."""
        self._stream.close()


def _pieces(views: list[memoryview]) -> Iterator[memoryview]:
    """Cut big views and join small ones, so that each piece is worth a message."""
    small: list[memoryview] = []
    small_bytes = 0
    for view in views:
        if small_bytes + len(view) <= _PIECE_BYTES:
            small.append(view)
            small_bytes += len(view)
            continue
        if small:
            yield memoryview(b"".join(small))
        small, small_bytes = [], 0
        whole = len(view) - len(view) % _PIECE_BYTES
        for start in range(0, whole, _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
        if whole < len(view):
            small, small_bytes = [view[whole:]], len(view) - whole
    if small:
        yield small[0] if len(small) == 1 else memoryview(b"".join(small))
