"""Gradients summed over the replicas, in flat buckets, while backward still runs.

Knows parameters and a process group; knows nothing of losses or optimizers. All ranks of the group hold the same
parameters and send bucket 0, 1, 2, ... in this order, whatever order their backward takes.

A parameter may get a gradient on one replica and none on another. So each bucket ends with one number per parameter,
1 where it got a gradient: added up, it tells who has one. No rank waits for these numbers during the step: each rank goes on
as if all had gradients where it has, the device compares, and `settle` corrects what was otherwise once that is known.

Shapes: a bucket on the wire is flat, [E + P]: E elements of the gradients of its P parameters, then P marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.parallel.replicas.bucketing import CompletionCounter, NamedParameters, plan_buckets, wire_dtype

__all__ = ["GradientSum", "sum_gradients"]

#: Aimed size of a bucket on the wire, where halves are float32: small ones overlap sooner, large ones cost fewer calls.
_BUCKET_BYTES = {"nccl": 25 << 20}
_BUCKET_BYTES_ELSEWHERE = 4 << 20


class GradientSum:
    """Sums the gradients of some parameters over one group, once per optimizer step.

    A bucket is summed in a new flat tensor on the parameters' device, `[elements + parameters]` in the wire dtype: the
    gradients one after another, then one number per parameter. Afterwards gradients of its dtype are views of it.

    Args:
        named: parameters, in the same order on every rank; frozen ones are left out.
        group: the replicas.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        """Cut the parameters into buckets; they get their hooks with the first `begin`."""
        self._group, self._ranks = group, dist.get_world_size(group)
        size = _BUCKET_BYTES.get(dist.get_backend(group), _BUCKET_BYTES_ELSEWHERE)
        self._buckets = plan_buckets(named.items(), size)
        self._under_way: list[tuple[Tensor, dist.Work]] = []  # of the first buckets, in order
        self._summed: list[tuple[int, Tensor]] = []  # what `settle` looks at: a bucket's number and its flat tensor
        self._marks: dict[tuple[int, tuple[bool, ...]], Tensor] = {}
        self._counter = CompletionCounter(self._buckets, self._send_complete)

    # ------------------------------------------------------------------------------------------------------- backward

    def begin(self, last: bool) -> None:
        """A backward is about to start; with `last` its gradients may leave as soon as they are complete.

        The first backward counts how often each gradient is completed; so the overlap begins with the second one.
        """
        self._counter.install()
        self._counter.begin(early=last)

    def end(self) -> None:
        """The backward is over."""
        self._counter.end()

    def _send_complete(self, number: int) -> None:
        while len(self._under_way) < len(self._buckets) and not self._counter.missing[len(self._under_way)]:
            self._send_next()

    # --------------------------------------------------------------------------------------------------------- summing

    @torch.no_grad()
    def _send_next(self) -> None:
        number = len(self._under_way)
        self._counter.sent.add(number)
        parameters = [parameter for _, parameter in self._buckets[number]]
        dtype = wire_dtype(parameters[0].dtype)
        parts = [
            parameter.new_zeros(parameter.numel(), dtype=dtype)
            if parameter.grad is None
            else parameter.grad.reshape(-1).to(dtype)
            for parameter in parameters
        ]
        flat = torch.cat([*parts, self._mark(number, parts[0])])
        self._under_way.append((flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    def _mark(self, number: int, like: Tensor) -> Tensor:
        """Return who has a gradient here, `[P]`: on the device already where that is as in an earlier step."""
        present = tuple(parameter.grad is not None for _, parameter in self._buckets[number])
        if (number, present) not in self._marks:
            if len(self._marks) > 4 * len(self._buckets):  # it changes all the time
                self._marks.clear()
            self._marks[number, present] = like.new_tensor([float(one) for one in present])
        return self._marks[number, present]

    @torch.no_grad()
    def finish(self) -> Tensor | None:
        """Send what is left; then gradients are the sums, and `settle` completes those that this rank had none of.

        Returns:
            A float64 scalar, `[]`, on the device: above 0 where another rank has a gradient that this one lacks, or lacks
            one that this one has. None where there are no buckets.
        """
        while len(self._under_way) < len(self._buckets):
            self._send_next()
        told, here = [], []
        for number, (flat, work) in enumerate(self._under_way):
            work.wait()
            bucket = self._buckets[number]
            told.append(flat[-len(bucket) :])
            here.append(self._mark(number, flat))
            _take(bucket, flat, [parameter.grad is not None for _, parameter in bucket])
            self._summed.append((number, flat))
        self._counter.cancel()
        self._under_way.clear()
        return (torch.cat(told) - torch.cat(here) * self._ranks).abs().sum().double() if told else None

    @torch.no_grad()
    def settle(self) -> None:
        """Give a parameter its sum wherever any rank had a gradient; waits for the device. Call it where `finish` says so."""
        for number, flat in self._summed:
            bucket = self._buckets[number]
            counts = flat[-len(bucket) :]
            seen = (counts.real if counts.is_complex() else counts).tolist()
            lacking = [parameter.grad is None and count > 0 for (_, parameter), count in zip(bucket, seen, strict=True)]
            _take(bucket, flat, lacking)
        self._summed.clear()

    def drop(self) -> None:
        """Forget what is under way; sums that peers still wait for fail there with the group."""
        self._counter.cancel()
        self._under_way.clear()
        self._summed.clear()


def _take(bucket: NamedParameters, flat: Tensor, chosen: Sequence[bool]) -> None:
    """Make the chosen gradients of a bucket what its sums, `[E + P]`, say: views where dtype and strides fit."""
    views = flat[: -len(bucket)].split([parameter.numel() for _, parameter in bucket])  # type: ignore[no-untyped-call]
    for (_, parameter), view, is_chosen in zip(bucket, views, chosen, strict=True):
        if not is_chosen:
            continue
        view = view.view(parameter.shape)
        if view.dtype == parameter.dtype and view.stride() == parameter.stride():
            parameter.grad = view
        else:
            parameter.grad = torch.empty_like(parameter).copy_(view)


def sum_gradients(named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, all at once and in one go: where nothing can overlap."""
    summing = GradientSum(named, group)
    apart = summing.finish()
    if apart is not None and bool(apart > 0):
        summing.settle()
