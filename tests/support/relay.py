"""A link emulator in user space: rate, round trip, stall, reset, cut at byte N. What a real network does, on demand.

    with Relay(listener.port, rate_bytes_s=25e6, round_trip_s=0.05) as relay:  # 200 Mbit/s
        session = dial(code.with_address("127.0.0.1", relay.port), ...)
        relay.links[0].cut()

Links are numbered in the order in which they were accepted. All links of a relay share its rate, up and down each for
itself, as connections through one router do; a sender sees a full buffer once `BUFFER_S` of traffic waits. Stalled bytes
wait in the relay. `python -m tests.benchmarks.emulator` measures the emulator against its own settings.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable

UP, DOWN = "up", "down"  # from the dialler to the listener, and back
_RESET = struct.pack("ii", 1, 0)
_PIECE = 64 << 10
_PIECE_S = 0.002  # a slow link passes smaller pieces, so that bytes do not come in lumps
_SOCKET_BYTES = 128 << 10  # what the kernel may hold beside the emulated buffer
BUFFER_S = 0.1  # of traffic that a router's queue holds


class Way:
    """One direction of a link: when bytes arrive that are handed in now.

    Args:
        rate_bytes_s: None is as fast as it gets.
        delay_s: from one end to the other.
        jitter_s: by so much longer at most a piece takes, each by chance; none overtakes another.
    """

    def __init__(self, rate_bytes_s: float | None, delay_s: float, jitter_s: float = 0.0) -> None:
        self.rate_bytes_s, self.delay_s, self.jitter_s = rate_bytes_s, delay_s, jitter_s
        self._free_at = self._last = 0.0
        self._random = random.Random(1)
        self._lock = threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """How much is passed on at once."""
        return _PIECE if self.rate_bytes_s is None else max(1, min(_PIECE, int(self.rate_bytes_s * _PIECE_S)))

    @property
    def pieces_held(self) -> int:
        """Pieces under way and in the queue before it, at most."""
        rate = self.rate_bytes_s or 1e9
        return max(4, int((BUFFER_S + self.delay_s + self.jitter_s) * rate / self.piece_bytes))

    def arrival(self, num_bytes: int, now: float) -> float:
        """Book so many bytes; returns when the last of them arrives (the clock of `now`)."""
        with self._lock:
            self._free_at = max(self._free_at, now) + num_bytes / (self.rate_bytes_s or float("inf"))
            self._last = max(self._last, self._free_at + self.delay_s + self._random.uniform(0.0, self.jitter_s))
            return self._last


class Link:
    """One relayed connection: for each way a thread that reads and one that writes in time."""

    def __init__(
        self,
        dialler: socket.socket,
        listener: socket.socket,
        plan: dict[str, int],
        ways: dict[str, Way],
        resets: bool = False,
    ) -> None:
        self.bytes = {UP: 0, DOWN: 0}
        host, port = listener.getsockname()[:2]
        self.address = f"{host}:{port}"  # as the listener sees its peer
        self.is_cut = threading.Event()
        self._ends = {UP: (dialler, listener), DOWN: (listener, dialler)}
        self._cut_at, self._resets = dict(plan), resets
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._ways = ways
        self._threads = []
        for way in (UP, DOWN):
            waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(ways[way].pieces_held)
            for target in (self._read, self._write):
                name = f"relay{target.__name__}-{way}"
                self._threads.append(threading.Thread(target=target, args=(way, waiting), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def cut(self, reset: bool = False) -> None:
        """End both sides, politely or with a reset; bytes under way are lost."""
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

    def cut_at(self, way: str, byte: int, reset: bool = False) -> None:
        """Cut, politely or with a reset, as soon as so many bytes have gone that way; exactly so many are passed on."""
        with self._lock:
            self._cut_at[way], self._resets = byte, reset

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

    def _read(self, way: str, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        source, emulated = self._ends[way][0], self._ways[way]
        data = b"x"
        while data:
            try:
                data = source.recv(emulated.piece_bytes)
            except OSError:
                data = b""
            piece = (emulated.arrival(len(data), time.monotonic()), data)
            while not self._hand_over(piece, waiting):
                if self.is_cut.is_set():
                    return

    @staticmethod
    def _hand_over(piece: tuple[float, bytes], waiting: queue.Queue[tuple[float, bytes]]) -> bool:
        try:
            waiting.put(piece, timeout=0.2)
        except queue.Full:
            return False
        return True

    def _write(self, way: str, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        sink = self._ends[way][1]
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                self.is_cut.wait(max(0.0, due - time.monotonic()))
                self._flowing.wait()
                limit = self._cut_at.get(way)
                if not data or (limit is not None and self.bytes[way] + len(data) >= limit):
                    data = data[: (limit or 0) - self.bytes[way]] if data else data
                    sink.sendall(data)
                    self.bytes[way] += len(data)
                    break
                sink.sendall(data)
                self.bytes[way] += len(data)
        self.cut(self._resets)


class Relay:
    """Relays a loopback port to another.

    Args:
        target_port: where everything goes, on `host`.
        rate_bytes_s: of each direction, all links together; None is as fast as it gets.
        down_bytes_s: of the way down where that is another; as a home line has.
        round_trip_s: there and back; half of it each way.
        jitter_s: by so much longer the way there and back takes at most, half of it each way.
        resets: cuts by `plans` reset, so that what waits in the receiver's system is lost.

    Attributes:
        source: from which coming connections to the target are made; another one is that of a machine in another network.
    """

    def __init__(
        self,
        target_port: int,
        host: str = "127.0.0.1",
        *,
        rate_bytes_s: float | None = None,
        down_bytes_s: float | None = None,
        round_trip_s: float = 0.0,
        jitter_s: float = 0.0,
        resets: bool = False,
    ) -> None:
        self._resets = resets
        self.target = (host, target_port)
        rates = {UP: rate_bytes_s, DOWN: down_bytes_s or rate_bytes_s}
        self._ways = {way: Way(rate, round_trip_s / 2, jitter_s / 2) for way, rate in rates.items()}
        self._small_buffers = rate_bytes_s is not None
        self.links: list[Link] = []
        self.accepting, self.source = True, "127.0.0.1"
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
                listener = socket.create_connection(self.target, 10, (self.source, 0))
            except OSError:
                dialler.close()
                continue
            listener.settimeout(None)
            for sock in (dialler, listener):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._small_buffers:  # what the kernel holds would be a queue that no setting speaks of
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            with self._changed:
                plan = self.plans.pop(0) if self.plans else {}
                self.links.append(Link(dialler, listener, plan, self._ways, self._resets))
                self._changed.notify_all()
