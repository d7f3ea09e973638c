"""A small TCP relay in user space that can cut, stall, and cut at byte N: what a bad network does, on demand.

    with Relay(listener.port) as relay:
        session = dial(code.with_address("127.0.0.1", relay.port), ...)
        relay.links[0].cut()

Links are numbered in the order in which they were accepted. Nothing here sleeps; stalled bytes wait in the relay.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

UP, DOWN = "up", "down"  # from the dialler to the listener, and back
_RESET = struct.pack("ii", 1, 0)
_PIECE = 64 << 10


class Link:
    """One relayed connection."""

    def __init__(self, dialler: socket.socket, listener: socket.socket, plan: dict[str, int]) -> None:
        self.bytes = {UP: 0, DOWN: 0}
        host, port = listener.getsockname()[:2]
        self.address = f"{host}:{port}"  # as the listener sees its peer
        self.is_cut = threading.Event()
        self._ends = {UP: (dialler, listener), DOWN: (listener, dialler)}
        self._cut_at = dict(plan)
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._pump, args=(way,), name=f"relay-{way}", daemon=True) for way in (UP, DOWN)
        ]
        for thread in self._threads:
            thread.start()

    def cut(self, reset: bool = False) -> None:
        """End both sides, politely or with a reset."""
        with self._lock:
            if self.is_cut.is_set():
                return
            self.is_cut.set()
            self._flowing.set()
            for sock in self._ends[UP]:
                with contextlib.suppress(OSError):
                    if reset:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def cut_at(self, way: str, byte: int) -> None:
        """Cut as soon as so many bytes have gone that way; exactly so many are passed on."""
        with self._lock:
            self._cut_at[way] = byte

    def stall(self) -> None:
        """Pass nothing on, keep everything open: a network that swallows."""
        self._flowing.clear()

    def flow(self) -> None:
        """End a stall."""
        self._flowing.set()

    def close(self) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(10)
        for sock in self._ends[UP]:
            sock.close()

    def _pump(self, way: str) -> None:
        source, sink = self._ends[way]
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                self._flowing.wait()
                limit = self._cut_at.get(way)
                if limit is not None and self.bytes[way] + len(data) >= limit:
                    data = data[: limit - self.bytes[way]]
                    sink.sendall(data)
                    self.bytes[way] += len(data)
                    break
                sink.sendall(data)
                self.bytes[way] += len(data)
        self.cut()


class Relay:
    """Relays a loopback port to another."""

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self.target = (host, target_port)
        self.links: list[Link] = []
        self.accepting = True
        self.plans: list[dict[str, int]] = []  # for coming links, in order: {UP: byte, DOWN: byte}
        self._changed = threading.Condition()
        self._sock = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="relay-accept", daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(10)
        for link in self.links:
            link.close()

    def refuse(self) -> None:
        """From now on end every new connection at once."""
        self.accepting = False

    def admit(self) -> None:
        """Relay new connections again."""
        self.accepting = True

    def cut_all(self, reset: bool = False) -> None:
        for link in self.links:
            link.cut(reset)

    def wait_for(self, condition: Callable[[Relay], object], timeout_s: float = 20.0) -> None:
        """Wait until a condition on the relay holds; looks after every accept, and now and then."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition(self):
                assert time.monotonic() < deadline, "the relay never saw it"
                self._changed.wait(0.01)

    def _accept(self) -> None:
        while True:
            try:
                dialler, _ = self._sock.accept()
            except OSError:
                return
            try:
                if not self.accepting:
                    raise ConnectionRefusedError
                listener = socket.create_connection(self.target, timeout=10)
            except OSError:
                dialler.close()
                continue
            listener.settimeout(None)
            for sock in (dialler, listener):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self.links.append(Link(dialler, listener, self.plans.pop(0) if self.plans else {}))
                self._changed.notify_all()
