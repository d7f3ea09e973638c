"""Gradients handed over while backward still runs.

Knows how a complete bucket's gradients get into one flat tensor on the host (`parallel.replicas.bucketing` knows when
it is complete); knows nothing of sums or the network. Hooks stand on parameters only while shards are exchanged: a lone
worker's backward is torch's own.

Memory: a bucket's host tensor, `[numel]` in its wire dtype, pinned on CUDA, belongs to `GradientBuckets`. It is lent to
`on_bucket` until `recycle` and used again for later steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from guava_nb.parallel.replicas.bucketing import CompletionCounter
from guava_nb.protocol.messages import BatchShard, GradientBucket, Message
from guava_nb.replica.buckets import Bucket, BucketLayout, BucketWire, pack_present

__all__ = ["GradientBuckets", "OnBucket", "bucket_sender"]

#: Takes bucket number, presence bits and the flat host tensor, `[numel]` in the wire dtype, which is lent: the callee may
#: read it until the step is over. On CUDA it may be called in autograd's own thread.
OnBucket = Callable[[int, bytes, Tensor], None]
#: A bucket's flat tensor, `[numel]`, and the views of it in its parameters' shapes.
_FlatBucket = tuple[Tensor, list[Tensor]]


class GradientBuckets:
    """Collects one shard's gradients into buckets and hands them over as they fill.

    Args:
        layout: the buckets.
        parameters: by full name, all that `layout` names.
        device: where the gradients are.
    """

    def __init__(self, layout: BucketLayout, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        """Prepare; the parameters get their hooks with the first `begin`."""
        self._buckets = layout.buckets
        named = [[(name, parameters[name]) for name in bucket.names] for bucket in layout.buckets]
        self._parameters = [[parameter for _, parameter in bucket] for bucket in named]
        self._carrier = _carrier(device)
        self._counter = CompletionCounter(named, self._send, self._carrier.note_stream)
        self._free: list[list[_FlatBucket]] = [[] for _ in layout.buckets]
        self._lent: list[list[_FlatBucket]] = [[] for _ in layout.buckets]
        self._on_bucket: OnBucket | None = None
        self._filling: list[_FlatBucket] = []  # of the shard that is handed over now
        self._under_way: deque[tuple[int, bytes, Tensor, torch.cuda.Event]] = deque()

    def begin(self, on_bucket: OnBucket) -> None:
        """Call right before the backward whose gradients complete the shard.

        The first such backward only counts how often each gradient is completed, and everything is handed over by
        `finish`; from the second one on a bucket is handed over as soon as it is complete.
        """
        self._counter.install()
        self._filling = [self._borrow(bucket) for bucket in self._buckets]
        self._on_bucket = on_bucket
        self._counter.begin()

    def finish(self) -> None:
        """Hand over what is left, with parameters that got no gradient marked absent; gradients are dropped."""
        for number in range(len(self._filling)):
            if number not in self._counter.sent:
                self._send(number)
        self._drain(wait=True)
        self._counter.end()
        self._filling = []
        self._on_bucket = None

    def cancel(self) -> None:
        """Stop after an error; what was handed over stays valid until `recycle`."""
        self._counter.cancel()
        self._filling = []
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
        self._counter.remove()

    def _borrow(self, bucket: Bucket) -> _FlatBucket:
        free = self._free[bucket.index]
        if free:
            lent = free.pop()
        else:
            flat = self._carrier.allocate(bucket)
            lent = flat, bucket.views(flat)
        self._lent[bucket.index].append(lent)
        return lent

    def _send(self, number: int) -> None:
        self._counter.sent.add(number)
        parameters = self._parameters[number]
        gradients = [parameter.grad for parameter in parameters]
        present = pack_present([gradient is not None for gradient in gradients])
        flat, _ = host = self._filling[number]
        arrival = self._carrier.copy(self._buckets[number], host, gradients)
        for parameter in parameters:
            parameter.grad = None
        if arrival is not None:
            self._under_way.append((number, present, flat, arrival))
            self._drain(wait=False)
        elif self._on_bucket is not None:
            self._on_bucket(number, present, flat)

    def _drain(self, wait: bool) -> None:
        while self._under_way and (wait or self._under_way[0][-1].query()):  # type: ignore[no-untyped-call]
            number, present, flat, arrival = self._under_way.popleft()
            arrival.synchronize()
            if self._on_bucket is not None:
                self._on_bucket(number, present, flat)


# ------------------------------------------------------------------------------------------------------- to the host


def _fill(views: list[Tensor], gradients: list[Tensor | None]) -> None:
    """Copy gradients to their places on the same device; the place of an absent one becomes zero.

    Args:
        views: a bucket's flat tensor in its parameters' shapes.
        gradients: of the same parameters; sparse ones are filled in.
    """
    targets, sources = [], []
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
            continue
        targets.append(view)
        sources.append(gradient if gradient.layout is torch.strided else gradient.to_dense())
    if targets:
        torch._foreach_copy_(targets, sources)


class _Carrier:
    """Brings gradients into a bucket's host tensor: from the host itself by one copy, with nothing to wait for."""

    #: Called at each gradient where it matters on which stream it was computed.
    note_stream: Callable[[], None] | None = None

    def allocate(self, bucket: Bucket) -> Tensor:
        """Return a new flat host tensor, `[numel]` in the wire dtype."""
        return torch.empty(bucket.numel, dtype=bucket.dtype)

    def copy(self, bucket: Bucket, host: _FlatBucket, gradients: list[Tensor | None]) -> torch.cuda.Event | None:
        """Bring gradients into a bucket's host tensor.

        Args:
            bucket: which one.
            host: its flat host tensor, `[numel]` in the wire dtype, and the views of it.
            gradients: of its parameters, None where there is none; they may be dropped at once.

        Returns:
            None when all is there already, else the event of its end.
        """
        with torch.no_grad():
            _fill(host[1], gradients)
        return None


class _StagedCarrier(_Carrier):
    """Any other device: gathered there, then one copy that waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging: dict[int, _FlatBucket] = {}

    def copy(self, bucket: Bucket, host: _FlatBucket, gradients: list[Tensor | None]) -> torch.cuda.Event | None:
        with torch.no_grad():
            host[0].copy_(self._gather(bucket, gradients))
        return None

    def _gather(self, bucket: Bucket, gradients: list[Tensor | None]) -> Tensor:
        """Return the gradients one after another, `[numel]` in the wire dtype, in the bucket's own memory on the device."""
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

    def copy(self, bucket: Bucket, host: _FlatBucket, gradients: list[Tensor | None]) -> torch.cuda.Event | None:
        self._note_stream()
        for source in self._sources:
            self._stream.wait_stream(source)
        self._sources.clear()
        with torch.no_grad(), torch.cuda.stream(self._stream):
            host[0].copy_(self._gather(bucket, gradients), non_blocking=True)
            arrival: torch.cuda.Event = self._stream.record_event()
        for gradient in gradients:
            if gradient is not None:
                # Its memory must not be given to backward again before this stream has read it.
                gradient.record_stream(self._stream)
        return arrival


def _carrier(device: torch.device) -> _Carrier:
    if device.type == "cpu":
        return _Carrier()
    return _CudaCarrier(device) if device.type == "cuda" else _StagedCarrier(device)


def bucket_sender(
    send: Callable[[Message, Sequence[memoryview]], None], message: BatchShard, wire: BucketWire
) -> OnBucket:
    """Return what queues each bucket of a shard's gradients, flat, `[numel]` in the wire dtype; `wire` encodes them.

    Args:
        send: queues a message with its buffers.
        message: the shard that is computed.
        wire: encodes the buckets.
    """

    def on_bucket(bucket: int, present: bytes, flat: Tensor) -> None:
        tensor, payload = wire.encode(bucket, flat, (message.generation, message.step, message.shard))
        head = GradientBucket(
            run_id=message.run_id, generation=message.generation, step=message.step, shard=message.shard,
            bucket=bucket, present=present, tensor=tensor,
        )  # fmt: skip
        send(head, [payload])

    return on_bucket
