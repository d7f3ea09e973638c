"""Memory for payloads, used again once nobody looks at it any more.

Fresh memory costs a page fault every 4 KiB, about as much as receiving into it. A buffer is handed out again only when
nothing refers to it but the pool: its reference count tells. So a payload stays valid as long as anyone holds the view,
a slice of it, or a tensor over it, however long after `done()`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

__all__ = ["PayloadPool"]

_SMALLEST_BYTES = 256 << 10

Slab = np.ndarray[Any, np.dtype[np.uint8]]


def _references(slabs: list[Slab], index: int) -> int:
    return sys.getrefcount(slabs[index])


def _counts_references() -> bool:
    enabled = getattr(sys, "_is_gil_enabled", None)  # without the GIL counts are split between threads
    return sys.implementation.name == "cpython" and (enabled is None or bool(enabled()))


_UNUSED = _references([np.empty(1, np.uint8)], 0)


class PayloadPool:
    """Allocates payload buffers and reuses those that nobody refers to. Thread-safe.

    Args:
        keep_bytes: most bytes of unused buffers that are kept; the rest goes back to the system.
    """

    def __init__(self, keep_bytes: int = 192 << 20) -> None:
        self._keep_bytes = keep_bytes if _counts_references() else 0
        self._slabs: list[Slab] = []  # least recently handed out first
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> memoryview:
        """Give a writable, flat byte view of this length; its content is whatever was there."""
        if nbytes < _SMALLEST_BYTES or not self._keep_bytes:
            return np.empty(nbytes, np.uint8).data
        size = _size_class(nbytes)
        with self._lock:
            slab = self._unused(size)
            if slab is None:
                slab = np.empty(size, np.uint8)
                self._trim(size)
            if size <= self._keep_bytes:
                self._slabs.append(slab)
            return slab.data[:nbytes]

    @property
    def kept_bytes(self) -> int:
        """Bytes of all buffers the pool knows, in use or not."""
        with self._lock:
            return sum(slab.nbytes for slab in self._slabs)

    def _unused(self, size: int) -> Slab | None:
        for index in range(len(self._slabs)):  # a loop variable would be one more reference
            if self._slabs[index].nbytes == size and _references(self._slabs, index) <= _UNUSED:
                return self._slabs.pop(index)
        return None

    def _trim(self, incoming: int) -> None:
        """Forget buffers, oldest first, until the new one fits. A used one lives on with whoever uses it."""
        total = incoming + sum(slab.nbytes for slab in self._slabs)
        while total > self._keep_bytes and self._slabs:
            total -= self._slabs.pop(0).nbytes


def _size_class(nbytes: int) -> int:
    """Round up so that payloads of nearly one size share buffers; at most a quarter is wasted, in untouched pages."""
    step = 1 << (nbytes.bit_length() - 3)  # four steps per doubling
    return -(-nbytes // step) * step
