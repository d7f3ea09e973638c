"""Gradients summed over the replicas, in flat buckets, while backward still runs.

Knows parameters and a process group; knows nothing of losses or optimizers. All ranks of the group hold the same
parameters and send bucket 0, 1, 2, ... in this order, whatever order their backward takes.

A parameter may get a gradient on one replica and none on another. So each bucket ends with one number per parameter,
1 where it got a gradient: added up, it tells who has one, and no message of its own is needed for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.errors import TrainingError

__all__ = ["GradientSum", "sum_gradients"]

_HALF = (torch.float16, torch.bfloat16)
_BUCKET_BYTES = 4 << 20


@dataclass(slots=True)
class _Bucket:
    names: list[str]
    parameters: list[nn.Parameter]
    dtype: torch.dtype
    waiting: set[str] = field(default_factory=set)
    flat: Tensor | None = None
    work: dist.Work | None = None


class GradientSum:
    """Sums the gradients of some parameters over one group, once per optimizer step."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        """Cut the parameters into buckets.

        Args:
            named: parameters, in the same order on every rank; frozen ones are left out.
            group: the replicas.
            bucket_bytes: aimed size of a bucket on the wire, where halves are float32.
        """
        self._group = group
        self._buckets = list(_cut(named, bucket_bytes))
        self._place = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._expected: dict[str, int] = {}
        self._fired: dict[str, int] = {}
        self._next = 0
        self._streaming = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------------- backward

    def begin(self, last: bool) -> None:
        """A backward is about to start; with `last` its gradients may leave as soon as they are complete.

        The first backward counts how often each gradient is completed, because reentrant checkpoints complete some
        several times; so the overlap begins with the second one.
        """
        self._fired = dict.fromkeys(self._place, 0)
        self._streaming = last and bool(self._expected)
        for bucket in self._buckets:
            bucket.waiting = set(bucket.names)

    def end(self) -> None:
        """The backward is over."""
        self._streaming = False
        if not self._expected and any(self._fired.values()):
            self._expected = {name: max(1, count) for name, count in self._fired.items()}

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def fired(parameter: Tensor) -> None:
            self._fired[name] = self._fired.get(name, 0) + 1
            if self._streaming:
                self._complete(name)

        return fired

    def _complete(self, name: str) -> None:
        bucket = self._place[name]
        if bucket.flat is not None:
            raise TrainingError(
                f"gradient of {name!r} was completed {self._fired[name]} times in one backward, before "
                f"{self._expected[name]} times; a part of the model that runs a changing number of times under a "
                "reentrant checkpoint needs use_reentrant=False"
            )
        if self._fired[name] == self._expected[name]:
            bucket.waiting.discard(name)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._send(self._buckets[self._next])

    # --------------------------------------------------------------------------------------------------------- summing

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        self._next += 1
        parts = [
            parameter.new_zeros(parameter.numel(), dtype=bucket.dtype)
            if parameter.grad is None
            else parameter.grad.reshape(-1).to(bucket.dtype)
            for parameter in bucket.parameters
        ]
        present = [float(parameter.grad is not None) for parameter in bucket.parameters]
        bucket.flat = torch.cat([*parts, parts[0].new_tensor(present)])
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left and wait; then every gradient is the sum, None where no replica had one."""
        while self._next < len(self._buckets):
            self._send(self._buckets[self._next])
        for bucket in self._buckets:
            assert bucket.work is not None
            assert bucket.flat is not None
            bucket.work.wait()
            _take(bucket, bucket.flat)
        self.drop()

    def drop(self) -> None:
        """Forget what is under way; sums that peers still wait for fail there with the group."""
        self._next, self._streaming = 0, False
        for bucket in self._buckets:
            bucket.flat = bucket.work = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()


def _cut(named: Mapping[str, nn.Parameter], bucket_bytes: int) -> Iterable[_Bucket]:
    """Parameters in reverse order, because backward reaches the last ones first; one dtype and device a bucket."""
    open_buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    made: list[_Bucket] = []
    for name, parameter in reversed(list(named.items())):
        if not parameter.requires_grad:
            continue
        dtype = torch.float32 if parameter.dtype in _HALF else parameter.dtype
        key = (dtype, parameter.device)
        bucket = open_buckets.get(key)
        nbytes = parameter.numel() * dtype.itemsize
        if bucket is None or sum(p.numel() for p in bucket.parameters) * dtype.itemsize + nbytes > bucket_bytes:
            bucket = open_buckets[key] = _Bucket([], [], dtype)
            made.append(bucket)
        bucket.names.append(name)
        bucket.parameters.append(parameter)
    return made


def _take(bucket: _Bucket, flat: Tensor) -> None:
    sizes = [parameter.numel() for parameter in bucket.parameters]
    *views, present = flat.split([*sizes, len(sizes)])  # type: ignore[no-untyped-call]
    seen = (present.real if present.is_complex() else present).tolist()
    for parameter, view, count in zip(bucket.parameters, views, seen, strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(view.view(parameter.shape))


def sum_gradients(named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, all at once and in one go: where nothing can overlap."""
    summing = GradientSum(named, group)
    try:
        summing.finish()
    finally:
        summing.close()
