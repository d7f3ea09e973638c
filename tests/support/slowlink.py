"""A link with a rate and a delay, in user space: what a home's uplink or a tunnel does to bytes.

    link = SlowLink(listener.port, rate=25e6, delay_s=0.025)   # 200 Mbit/s, 50 ms round trip
    session = dial(code.with_address("127.0.0.1", link.port), ...)

All connections through one link share its rate, up and down each for itself. A sender sees a full buffer once
`_BUFFER_S` of traffic waits, as with a router's queue.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

_PIECE = 64 << 10
_BUFFER_S = 0.1


class _Way:
    """One direction: when the next byte may leave."""

    def __init__(self, rate: float, delay_s: float) -> None:
        self.rate, self.delay_s = rate, delay_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def arrival_of(self, count: int) -> float:
        """Book so many bytes; gives the time at which the last of them arrives."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.rate
            return self._free_at + self.delay_s


class SlowLink:
    """Accepts on `port` and passes on to `target_port`, both on loopback."""

    def __init__(self, target_port: int, rate: float, delay_s: float) -> None:
        self._target_port = target_port
        self._ways = _Way(rate, delay_s), _Way(rate, delay_s)
        self._room = max(4, int((_BUFFER_S + delay_s) * rate / _PIECE))
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._server, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += (near, far)
                for way, (origin, to) in zip(self._ways, ((near, far), (far, near)), strict=True):
                    origin.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(self._room)
                    threading.Thread(target=self._read, args=(way, origin, waiting), daemon=True).start()
                    threading.Thread(target=self._write, args=(to, waiting), daemon=True).start()

    def _read(self, way: _Way, origin: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"x"
        while data:
            try:
                data = origin.recv(_PIECE)
            except OSError:
                data = b""
            waiting.put((way.arrival_of(len(data)), data))

    def _write(self, to: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    to.shutdown(socket.SHUT_WR)
                    return
                to.sendall(data)
