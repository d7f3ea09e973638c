"""Gradients handed over while backward still runs.

Knows when a bucket's gradients are whole, and how they get into one flat tensor on the host; knows nothing of sums or
the network. Hooks stand on parameters only while shards are exchanged: a lone worker's backward is torch's own.

When is a gradient whole? Normally a parameter's hook fires once in a backward, however often the forward used it.
Reentrant activation checkpointing runs backwards inside the backward, and then a hook fires several times. So the
first shard hands everything over at its end and counts; later shards wait for as many firings. A gradient that grows
after its bucket is gone would be a silent error: it raises, and from then on nothing is handed over early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from guava_nb.errors import TrainingError
from guava_nb.replica.buckets import Bucket, BucketLayout, pack_present

__all__ = ["GradientBuckets", "OnBucket"]

#: Takes bucket number, presence bits and the flat host tensor. On CUDA it may be called in autograd's own thread.
OnBucket = Callable[[int, bytes, Tensor], None]


class _Arrival(Protocol):
    """A copy to the host under way."""

    def query(self) -> bool:
        """Whether it is there."""

    def synchronize(self) -> None:
        """Wait until it is there."""


class _Filling:
    """One bucket in one shard: its host memory, and how often each gradient came."""

    __slots__ = ("fired", "flat", "missing", "sent", "views")

    def __init__(self, bucket: Bucket, flat: Tensor, views: list[Tensor]) -> None:
        self.flat = flat
        self.views = views
        self.fired = [0] * len(bucket.names)
        self.missing = len(bucket.names)
        self.sent = False


class GradientBuckets:
    """Collects one shard's gradients into buckets and hands them over as they fill."""

    def __init__(self, layout: BucketLayout, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Prepare for the parameters that `layout` names."""
        self._buckets = layout.buckets
        self._parameters = [[parameters[name] for name in bucket.names] for bucket in layout.buckets]
        self._needed = [[1] * len(bucket.names) for bucket in layout.buckets]
        self._early = False  # handed over during backward: not before the first shard has been counted
        self._may_be_early = True
        self._carrier = _carrier(device)
        self._free: list[list[tuple[Tensor, list[Tensor]]]] = [[] for _ in layout.buckets]
        self._lent: list[list[tuple[Tensor, list[Tensor]]]] = [[] for _ in layout.buckets]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._on_bucket: OnBucket | None = None
        self._fillings: list[_Filling] = []
        self._under_way: deque[tuple[int, bytes, Tensor, _Arrival]] = deque()

    def begin(self, on_bucket: OnBucket) -> None:
        """Call right before the backward whose gradients complete the shard."""
        if not self._hooks:
            self._install()
        self._fillings = [_Filling(bucket, *self._borrow(bucket)) for bucket in self._buckets]
        self._on_bucket = on_bucket

    def finish(self) -> None:
        """Hand over what is left, with parameters that got no gradient marked absent; gradients are dropped."""
        for number, filling in enumerate(self._fillings):
            if not filling.sent:
                self._send(number)
        self._drain(wait=True)
        for needed, filling in zip(self._needed, self._fillings, strict=True):
            needed[:] = map(max, needed, filling.fired)
        self._fillings = []
        self._on_bucket = None
        self._early = self._may_be_early

    def cancel(self) -> None:
        """Stop after an error; what was handed over stays valid until `recycle`."""
        self._fillings = []
        self._on_bucket = None
        for *_, arrival in self._under_way:
            arrival.synchronize()
        self._under_way.clear()

    def recycle(self) -> None:
        """Take all flat tensors back: the step is over."""
        for free, lent in zip(self._free, self._lent, strict=True):
            free += lent
            lent.clear()

    def remove_hooks(self) -> None:
        """Leave the parameters as they were found."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _borrow(self, bucket: Bucket) -> tuple[Tensor, list[Tensor]]:
        free = self._free[bucket.index]
        if free:
            lent = free.pop()
        else:
            flat = self._carrier.allocate(bucket)
            lent = flat, bucket.views(flat)
        self._lent[bucket.index].append(lent)
        return lent

    def _install(self) -> None:
        for number, parameters in enumerate(self._parameters):
            for position, parameter in enumerate(parameters):
                if parameter.requires_grad:  # the user may have frozen it since
                    hook = self._hook(number, position)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _hook(self, number: int, position: int) -> Callable[[Tensor], None]:
        # Runs once per parameter and step: a step of a small model has no time for more.
        needed = self._needed[number]
        note_stream = self._carrier.note_stream

        def on_gradient(parameter: Tensor) -> None:
            if not self._fillings:
                return
            filling = self._fillings[number]
            if filling.sent:
                self._too_late(number, position)
            if note_stream is not None:
                note_stream()
            filling.fired[position] += 1
            if filling.fired[position] == needed[position]:
                filling.missing -= 1
                if filling.missing == 0 and self._early:
                    self._send(number)

        return on_gradient

    def _too_late(self, number: int, position: int) -> None:
        self._may_be_early = self._early = False
        name = self._buckets[number].names[position]
        raise TrainingError(
            f"the gradient of {name!r} changed after it had been handed over: the model uses it more often in this "
            "step than in the first one, as reentrant activation checkpointing does when it is switched on later. Do "
            "the step again: from now on gradients are handed over after backward. checkpoint(..., use_reentrant=False)"
            " does not have this limit"
        )

    def _send(self, number: int) -> None:
        filling = self._fillings[number]
        filling.sent = True
        parameters = self._parameters[number]
        gradients = [parameter.grad for parameter in parameters]
        present = pack_present([gradient is not None for gradient in gradients])
        arrival = self._carrier.copy(self._buckets[number], filling, gradients)
        for parameter in parameters:
            parameter.grad = None
        if arrival is not None:
            self._under_way.append((number, present, filling.flat, arrival))
            self._drain(wait=False)
        elif self._on_bucket is not None:
            self._on_bucket(number, present, filling.flat)

    def _drain(self, wait: bool) -> None:
        while self._under_way and (wait or self._under_way[0][-1].query()):
            number, present, flat, arrival = self._under_way.popleft()
            arrival.synchronize()
            if self._on_bucket is not None:
                self._on_bucket(number, present, flat)


# ------------------------------------------------------------------------------------------------------- to the host


def _fill(views: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Copy gradients to their places on the same device; the place of an absent one becomes zero."""
    targets, sources = [], []
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
            continue
        targets.append(view)
        sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
    if targets:
        torch._foreach_copy_(targets, sources)


class _Carrier(Protocol):
    """Brings gradients from a device into a flat host tensor."""

    #: Called at each gradient where it matters on which stream it was computed.
    note_stream: Callable[[], None] | None

    def allocate(self, bucket: Bucket) -> Tensor:
        """Return a new flat host tensor."""

    def copy(self, bucket: Bucket, filling: _Filling, gradients: list[Tensor | None]) -> _Arrival | None:
        """Copy; None when all is there already. The gradients may be dropped at once."""


class _HostCarrier:
    """Gradients are on the host: one copy, nothing to wait for."""

    note_stream: Callable[[], None] | None = None

    def allocate(self, bucket: Bucket) -> Tensor:
        return torch.empty(bucket.numel, dtype=bucket.dtype)

    def copy(self, bucket: Bucket, filling: _Filling, gradients: list[Tensor | None]) -> _Arrival | None:
        with torch.no_grad():
            _fill(filling.views, gradients)
        return None


class _StagedCarrier:
    """Any other device: gathered there, then one copy that waits for it."""

    note_stream: Callable[[], None] | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def allocate(self, bucket: Bucket) -> Tensor:
        return torch.empty(bucket.numel, dtype=bucket.dtype)

    def copy(self, bucket: Bucket, filling: _Filling, gradients: list[Tensor | None]) -> _Arrival | None:
        with torch.no_grad():
            filling.flat.copy_(self._gather(bucket, gradients))
        return None

    def _gather(self, bucket: Bucket, gradients: list[Tensor | None]) -> Tensor:
        if bucket.index not in self._staging:
            flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=self._device)
            self._staging[bucket.index] = flat, bucket.views(flat)
        flat, views = self._staging[bucket.index]
        _fill(views, gradients)
        return flat


class _CudaCarrier(_StagedCarrier):
    """CUDA: gathered and copied to pinned memory on a stream of its own, while backward goes on.

    The staging memory of a bucket is written and read on that one stream only, so that a later shard cannot overwrite
    it early.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sources: set[torch.cuda.Stream] = set()
        # The user's model may compute on streams of its own; each that made a gradient is waited for.
        self.note_stream = self._note_stream

    def allocate(self, bucket: Bucket) -> Tensor:
        return torch.empty(bucket.numel, dtype=bucket.dtype, pin_memory=True)

    def _note_stream(self) -> None:
        self._sources.add(torch.cuda.current_stream(self._device))

    def copy(self, bucket: Bucket, filling: _Filling, gradients: list[Tensor | None]) -> _Arrival | None:
        self._note_stream()
        for source in self._sources:
            self._stream.wait_stream(source)
        self._sources.clear()
        with torch.no_grad(), torch.cuda.stream(self._stream):
            filling.flat.copy_(self._gather(bucket, gradients), non_blocking=True)
            arrival: torch.cuda.Event = self._stream.record_event()
        for gradient in gradients:
            if gradient is not None:
                # Its memory must not be given to backward again before this stream has read it.
                gradient.record_stream(self._stream)
        return arrival


def _carrier(device: torch.device) -> _Carrier:
    if device.type == "cpu":
        return _HostCarrier()
    return _CudaCarrier(device) if device.type == "cuda" else _StagedCarrier(device)
