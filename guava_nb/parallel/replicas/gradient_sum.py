"""Gradients summed over the replicas, in flat buckets, while backward still runs.

Knows parameters and a process group; knows nothing of losses or optimizers. All ranks of the group hold the same
parameters and send bucket 0, 1, 2, ... in this order, whatever order their backward takes.

A parameter may get a gradient on one replica and none on another. So each bucket ends with one number per parameter,
1 where it got a gradient: added up, it tells who has one, and no message of its own is needed for that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.parallel.replicas.bucketing import CompletionCounter, NamedParameters, plan_buckets, wire_dtype

__all__ = ["GradientSum", "sum_gradients"]

#: Aimed size of a bucket on the wire, where halves are float32.
_BUCKET_BYTES = 4 << 20


class GradientSum:
    """Sums the gradients of some parameters over one group, once per optimizer step.

    A bucket is summed in a new flat tensor on the parameters' device, `[elements + parameters]` in the wire dtype: the
    gradients one after another, then one number per parameter. It lives until `finish` or `drop`.

    Args:
        named: parameters, in the same order on every rank; frozen ones are left out.
        group: the replicas.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        """Cut the parameters into buckets; they get their hooks with the first `begin`."""
        self._group = group
        self._buckets = plan_buckets(named.items(), _BUCKET_BYTES)
        self._under_way: list[tuple[Tensor, dist.Work]] = []  # of the first buckets, in order
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
        present = [float(parameter.grad is not None) for parameter in parameters]
        flat = torch.cat([*parts, parts[0].new_tensor(present)])
        self._under_way.append((flat, dist.all_reduce(flat, group=self._group, async_op=True)))

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left and wait; then every gradient is the sum, None where no replica had one."""
        while len(self._under_way) < len(self._buckets):
            self._send_next()
        for bucket, (flat, work) in zip(self._buckets, self._under_way, strict=True):
            work.wait()
            _take(bucket, flat)
        self.drop()

    def drop(self) -> None:
        """Forget what is under way; sums that peers still wait for fail there with the group."""
        self._counter.cancel()
        self._under_way.clear()


def _take(bucket: NamedParameters, flat: Tensor) -> None:
    """Copy a bucket's sums, `[elements + parameters]`, into the gradients; the flat tensor is not kept."""
    *views, present = flat.split([*(parameter.numel() for _, parameter in bucket), len(bucket)])  # type: ignore[no-untyped-call]
    seen = (present.real if present.is_complex() else present).tolist()
    for (_, parameter), view, count in zip(bucket, views, seen, strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(view.view(parameter.shape))


def sum_gradients(named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, all at once and in one go: where nothing can overlap."""
    GradientSum(named, group).finish()
