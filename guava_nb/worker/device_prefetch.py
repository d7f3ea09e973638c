"""The next shard on its way to the device while the present one computes.

On CUDA a thread of its own copies the tensors into pinned memory and from there to the device, on a stream of its own; who
takes the shard lets its stream wait for that copy, so nothing waits that need not. On other devices nothing is done ahead,
and on the CPU nothing is copied at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from guava_nb.nested import map_leaves

__all__ = ["DevicePrefetch", "Copier", "copier_for"]

log = logging.getLogger(__name__)


class Copier(Protocol):
    """Brings a batch to the device without waiting for it."""

    def copy(self, parts: Any) -> Any:
        """Begin to copy; called on the helper's thread. Returns what `arrived` needs."""

    def arrived(self, copied: Any) -> Any:
        """Return the batch, good for use on the caller's stream."""


class CudaCopier:
    """Through pinned memory, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        """Make the stream on that device."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, parts: Any) -> tuple[Any, torch.cuda.Event]:
        """Begin to copy."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            placed = map_leaves(parts, self._to_device, (Tensor, PackedSequence))
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return placed, event

    def _to_device(self, value: Tensor | PackedSequence) -> Tensor | PackedSequence:
        if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return value  # it is moved in its own turn
        # From memory that is not pinned the copy would wait for the device, on this thread and under the driver's lock.
        return value.pin_memory().to(self._device, non_blocking=True)

    def arrived(self, copied: tuple[Any, torch.cuda.Event]) -> Any:
        """Return the batch."""
        placed, event = copied
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)

        def used_here(value: Tensor) -> Tensor:
            if value.device.type == "cuda":
                value.record_stream(stream)  # else its memory may be given away while this stream still reads it
            return value

        return map_leaves(placed, used_here)


def copier_for(device: torch.device) -> Copier | None:
    """Return what copies ahead to a device; None where that gains nothing."""
    return CudaCopier(device) if device.type == "cuda" else None


class DevicePrefetch:
    """At most one shard ahead of the one in work.

    Args:
        copier: None does nothing ahead.
    """

    def __init__(self, copier: Copier | None) -> None:
        """Start with nothing under way."""
        self._copier = copier
        self._pool: ThreadPoolExecutor | None = None
        self._begun: tuple[Hashable, Any, Future[Any]] | None = None

    def begin(self, key: Hashable, load: Callable[[], Any]) -> None:
        """Begin to bring a shard; `load` gives its batch and is called here. Whatever fails is tried again in its turn."""
        if self._copier is None or (self._begun is not None and self._begun[0] == key):
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "guava-ahead")
        try:
            parts = load()
        except Exception:  # it is told when it is this shard's turn: this one may never come
            self._begun = None
            return
        self._begun = (key, parts, self._pool.submit(self._copier.copy, parts))

    def take(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """Return a shard's batch: brought ahead, or as `load` gives it."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != key:
            return load()
        _, parts, copying = begun
        assert self._copier is not None
        try:
            return self._copier.arrived(copying.result())
        except (RuntimeError, TypeError) as error:  # no memory for one more, say; it is copied in its own turn
            log.info("a shard could not be copied ahead: %s", error)
            return parts

    def close(self) -> None:
        """Forget what is under way, and end the thread."""
        self._begun = None
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
