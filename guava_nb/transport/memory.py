"""Two streams joined in memory: for tests, and for peers that share a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from guava_nb.errors import LinkBroken, LinkClosed, LinkTimeout
from guava_nb.transport.stream import Buffer, Stream, flatten

__all__ = ["MemoryStream", "memory_pair"]

_DEFAULT_CAPACITY_BYTES = 1 << 20
#: A sender is told "now" only with this much room: what `Stream.can_send_now` promises.
_ROOM_BYTES = 16 << 10


class _Pipe:
    """One direction: bytes up to a capacity, then an end."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes = bytearray()
        self.ended = False
        self.changed = threading.Condition()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class MemoryStream(Stream):
    """One end of a `memory_pair`."""

    def __init__(self, inward: _Pipe, outward: _Pipe, name: str, peer: str) -> None:
        self.local, self.peer = name, peer
        self._in, self._out = inward, outward
        self._recv_s: float | None = None
        self._closed = False

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Copy the bytes into the pipe, waiting for room."""
        for view in flatten(buffers):
            sent = 0
            while sent < view.nbytes:
                sent += self._put(view[sent:])

    def _put(self, view: memoryview) -> int:
        pipe = self._out
        with pipe.changed:
            pipe.changed.wait_for(lambda: pipe.ended or self._closed or len(pipe.bytes) < pipe.capacity_bytes)
            self._check_open()
            if pipe.ended:
                raise LinkBroken(f"{self.peer} closed the connection while {self.local} was sending")
            taken = min(view.nbytes, pipe.capacity_bytes - len(pipe.bytes))
            pipe.bytes += view[:taken]
            pipe.changed.notify_all()
            return taken

    def recv_into(self, view: memoryview) -> int:
        """Move bytes out of the pipe."""
        pipe = self._in
        with pipe.changed:
            if not _wait(pipe.changed, lambda: pipe.bytes or pipe.ended or self._closed, self._recv_s):
                raise LinkTimeout(f"nothing came from {self.peer} for {self._recv_s:g} s")
            self._check_open()
            count = min(len(view), len(pipe.bytes))
            view[:count] = pipe.bytes[:count]
            del pipe.bytes[:count]
            pipe.changed.notify_all()
            return count

    def can_send_now(self) -> bool:
        """Whether the pipe has room for a small message, or has ended."""
        pipe = self._out
        with pipe.changed:
            room = min(_ROOM_BYTES, pipe.capacity_bytes)
            return pipe.ended or self._closed or pipe.capacity_bytes - len(pipe.bytes) >= room

    def set_deadline(self, recv_s: float | None) -> None:
        """Let each later wait of `recv_into` last at most `recv_s` seconds."""
        self._recv_s = recv_s

    def shutdown(self) -> None:
        """End both pipes."""
        self._closed = True
        self._in.end()
        self._out.end()

    def close(self) -> None:
        """End both pipes; memory needs nothing more."""
        self.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed(f"{self.local} closed this stream")


def _wait(changed: threading.Condition, ready: Callable[[], object], timeout_s: float | None) -> bool:
    """Wait for `ready` under the condition; the whole wait has one deadline."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not ready():
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return False
        changed.wait(left_s)
    return True


def memory_pair(capacity_bytes: int = _DEFAULT_CAPACITY_BYTES) -> tuple[MemoryStream, MemoryStream]:
    """Join two streams in memory.

    Args:
        capacity_bytes: bytes that each direction holds before a sender waits.
    """
    there, back = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return (
        MemoryStream(back, there, "memory:left", "memory:right"),
        MemoryStream(there, back, "memory:right", "memory:left"),
    )
