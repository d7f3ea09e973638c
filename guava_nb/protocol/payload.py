"""Memory for payloads, used again once nothing refers to it.

Knows sizes and references; knows nothing of frames. Receiving 64 MiB into fresh memory takes a third longer than into
memory that was touched before, because the system hands it out page by page.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PayloadMemory"]

# Below this the C library gives the same memory again by itself.
_MIN_KEPT_BYTES = 1 << 20


class PayloadMemory:
    """Allocates flat byte views, for one decoder, or with a lock for any number of decoders and their threads.

    A buffer counts as free when no view, array or tensor made from it is left. That is read from its reference count,
    so owners of a payload need not give anything back, and can keep it as long as they like.
    """

    __slots__ = ("_buffers", "_free_count", "_kept_bytes", "_lock", "_max_kept_bytes")

    def __init__(
        self, max_kept_bytes: int = 256 << 20, lock: contextlib.AbstractContextManager[Any] | None = None
    ) -> None:
        """Start with nothing.

        Args:
            max_kept_bytes: most bytes kept for later; 0 keeps nothing.
            lock: held while a buffer is chosen; a buffer without references is given out again.
        """
        self._lock = lock or contextlib.nullcontext()
        self._max_kept_bytes = max_kept_bytes
        self._kept_bytes = 0
        self._buffers: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)]
        # What the interpreter counts for a buffer that only this list holds; it differs between versions of Python.
        self._free_count = self._references(0)
        self._buffers.clear()

    def __call__(self, nbytes: int) -> memoryview:
        """Give a writable flat view of `nbytes` bytes with any content.

        Raises:
            MemoryError: the system has no such memory.
        """
        if nbytes < _MIN_KEPT_BYTES or nbytes > self._max_kept_bytes:
            return np.empty(nbytes, np.uint8).data
        with self._lock:
            for index in range(len(self._buffers)):
                size = self._buffers[index].nbytes
                # Not more than twice the need, or a few small payloads would pin all that is kept.
                if nbytes <= size <= 2 * nbytes and self._references(index) == self._free_count:
                    return self._give(index, nbytes)
            return self._add(nbytes)

    def _references(self, index: int) -> int:
        return sys.getrefcount(self._buffers[index])

    def _give(self, index: int, nbytes: int) -> memoryview:
        buffer = self._buffers.pop(index)
        self._buffers.append(buffer)  # the front is what was not used for longest
        return buffer.data[:nbytes]

    def _add(self, nbytes: int) -> memoryview:
        buffer = np.empty(nbytes, np.uint8)
        self._kept_bytes += nbytes
        self._buffers.append(buffer)
        while self._kept_bytes > self._max_kept_bytes:
            self._kept_bytes -= self._buffers.pop(0).nbytes
        return buffer.data
