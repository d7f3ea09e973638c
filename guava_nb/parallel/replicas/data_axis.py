"""What the replicas do together: sum gradients, keep buffers equal, and with ZeRO hold shares instead of copies."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.replicas.batch_norm import SyncedNorms
from guava_nb.parallel.replicas.buffer_sync import BufferSync
from guava_nb.parallel.replicas.gradient_sum import GradientSum, sum_gradients
from guava_nb.parallel.replicas.zero23_fsdp import Sharded, shard_over_data

__all__ = ["DataAxis", "make_data_axis", "sum_over_data"]


@dataclass(slots=True)
class DataAxis:
    """The data axis of one module; nothing is sent where there is one replica.

    Attributes:
        summing: sums gradients of whole parameters.
        buffers: makes buffers equal.
        sharded: FSDP2's part, with ZeRO 2 and 3.
        norms: batch norms that share their statistics.
    """

    summing: GradientSum | None = None
    buffers: BufferSync | None = None
    sharded: Sharded | None = None
    norms: SyncedNorms | None = None

    @property
    def runs_stand_ins(self) -> bool:
        """Whether a replica without rows must run a forward and a backward, because peers wait for it in them."""
        return self.sharded is not None or bool(self.norms)

    @property
    def factor(self) -> float:
        """What a loss must be multiplied with."""
        return self.sharded.factor if self.sharded else 1.0

    def begin(self, last: bool) -> None:
        """A backward is about to start."""
        if self.summing:
            self.summing.begin(last)

    def end(self) -> None:
        """A backward is over."""
        if self.summing:
            self.summing.end()

    def finish(self, named: Mapping[str, nn.Parameter], rows: int) -> Collection[str]:
        """Complete all sums of the step, of which this replica had `rows` samples; returns `BufferSync.unlike`."""
        if self.summing:
            self.summing.finish()
        if self.sharded:
            self.sharded.drop_unused(named)
        if self.buffers is None:
            return ()
        self.buffers.finish(rows)
        return self.buffers.unlike

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """What runs in the block uses no parameters and counts nothing: it only keeps peers from waiting."""
        with contextlib.ExitStack() as stack:
            if self.sharded:
                self.sharded.touch.counting = False
                stack.callback(setattr, self.sharded.touch, "counting", True)
            if self.norms:
                stack.enter_context(self.norms.standing_in())
            yield

    def drop(self) -> None:
        """Forget what the step gathered so far."""
        if self.summing:
            self.summing.drop()
        if self.sharded:
            self.sharded.touch.clear()
        self.release()

    def release(self) -> None:
        """Free gathered parameters; the next forward gathers them anew."""
        if self.sharded:
            self.sharded.release()

    def recover(self) -> None:
        """A forward or backward raised in the middle: get ready for another one."""
        self.end()
        if self.sharded:
            self.sharded.recover()

    def loaded(self) -> None:
        """Parameters and buffers were replaced, alike on every replica."""
        if self.buffers:
            self.buffers.mark()


def make_data_axis(
    model: nn.Module,
    zero_stage: int,
    axes: MeshAxes,
    full_names: Mapping[str, str],
    sync_batchnorm: bool = False,
    buffers: str = "auto",
) -> DataAxis:
    """Spread a module, whole or already split along other axes, over the replicas; `model` is changed in place.

    Args:
        buffers: the run's option of this name.

    Raises:
        ConfigError: batch norms shall share statistics, and one of them cannot.
    """
    if axes.sizes.data == 1:
        return DataAxis()
    norms = SyncedNorms(model, axes.group("dp")) if sync_batchnorm else None
    sharded = shard_over_data(model, zero_stage, axes.axis("dp"), full_names) if zero_stage >= 2 else None
    named = {full_names[name]: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    summing = GradientSum(named, axes.group("dp")) if named else None
    return DataAxis(summing, BufferSync(model, axes.group("dp"), full_names, buffers), sharded, norms)


def sum_over_data(named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum all gradients over the replicas at once, where nothing can overlap; sharded ones are sums already."""
    if dist.get_world_size(group) > 1:
        sum_gradients({name: p for name, p in named.items() if not isinstance(p, DTensor)}, group)
