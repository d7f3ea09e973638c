"""What the replicas do together: sum gradients, keep buffers equal, and with ZeRO hold shares instead of copies."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.replicas.batch_norm import SyncedNorms
from guava_nb.parallel.replicas.buffer_sync import BufferSync
from guava_nb.parallel.replicas.call_order import Habit
from guava_nb.parallel.replicas.gather_batch import end_gathers, gather_over, gathering, refusing
from guava_nb.parallel.replicas.gradient_sum import GradientSum, sum_gradients
from guava_nb.parallel.replicas.zero23_fsdp import Sharded, shard_over_data

__all__ = ["DataAxis", "make_data_axis", "sum_over_data"]

_UNSEEN = (
    "this run did not know of it before, because it looks for that name in the shared cells and in the modules of model, loss "
    "and step. Import it in a shared cell: from guava_nb import gather_batch"
)


@dataclass(slots=True)
class DataAxis:
    """The data axis of one module; nothing is sent where there is one replica.

    Attributes:
        summing: sums gradients of whole parameters.
        buffers: makes buffers equal.
        sharded: FSDP2's part, with ZeRO 2 and 3.
        norms: batch norms that share their statistics.
        group: the replicas; None where there is one.
        gathers: the loss gathers over them.
        apart: as `GradientSum.finish` returned it in the step.
    """

    summing: GradientSum | None = None
    buffers: BufferSync | None = None
    sharded: Sharded | None = None
    norms: SyncedNorms | None = None
    group: dist.ProcessGroup | None = None
    gathers: bool = False
    apart: Tensor | None = None

    @property
    def runs_stand_ins(self) -> bool:
        """Whether a replica without rows must run a forward and a backward, because peers wait for it in them."""
        return self.sharded is not None or bool(self.norms) or self.gathers

    @property
    def factor(self) -> float:
        """What a loss must be multiplied with."""
        return self.sharded.factor if self.sharded else 1.0

    def begin_forward(self) -> None:
        """A forward of training is about to start."""
        self.end_step()
        if self.sharded:
            self.sharded.units.begin("training")

    def end_forward(self, loss: Tensor) -> Tensor:
        """A forward of training is over; returns the loss, a scalar, to go backward from."""
        self.end_gathers(loss.device)
        return self.sharded.units.end_forward(loss) if self.sharded else loss

    def end_gathers(self, device: torch.device) -> None:
        """No `gather_batch` follows in this forward.

        Raises:
            TrainingError: another replica calls it once more.
        """
        if self.gathers and self.group is not None:
            end_gathers(self.group, device)

    @contextmanager
    def forward_only(self, kind: str) -> Iterator[None]:
        """A forward without a backward runs in the block; `kind` tells apart those that do different things."""
        if self.sharded is None:
            yield
            return
        self.sharded.end_step()
        self.sharded.units.begin(kind)
        yield
        self.sharded.units.end_evaluation()
        self.sharded.release()  # what FSDP2 gathered for this forward would be stale after the next load

    def gathering(self, stand_in: bool) -> contextlib.AbstractContextManager[None]:
        """Let `gather_batch` see all replicas inside."""
        if self.group is None:
            return gathering(None)
        if not self.gathers:  # a replica without rows would be waited for
            return gathering(refusing(_UNSEEN))
        return gathering(gather_over(self.group, stand_in))

    def begin(self, last: bool) -> None:
        """A backward is about to start; with `last` sums may leave during it."""
        if self.summing:
            # Where backward has collectives of its own, sums wait for its end: how far a replica's sums are between two of
            # these depends on which parameters its samples use, and peers would send in another order.
            self.summing.begin(last and not self.runs_stand_ins)

    def end(self) -> None:
        """A backward is over."""
        if self.summing:
            self.summing.end()

    def finish(
        self, named: Mapping[str, nn.Parameter], rows: int, forwards: int, policies: str = ""
    ) -> Collection[str]:
        """Complete all sums of the step, of which this replica had `rows` samples in so many forwards.

        `policies` are as of `BufferSync.finish`.

        Returns `BufferSync.unlike`. Then `apart` tells on the device whether `settle` has something to do.
        """
        self.apart = self.summing.finish() if self.summing else None
        if self.sharded:
            self.sharded.drop_unused(named)
        if self.buffers is None:
            return ()
        self.buffers.finish(rows, forwards, policies)
        return self.buffers.unlike

    def end_step(self) -> None:
        """Read what `finish` left on the device for the next forward, at a time when nothing must be waited for."""
        if self.sharded:
            self.sharded.end_step()

    def settle(self) -> None:
        """Complete gradients that this replica had none of; waits for the device."""
        if self.summing:
            self.summing.settle()
        self.apart = None

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """What runs in the block uses no parameters and counts nothing: it only keeps peers from waiting."""
        with contextlib.ExitStack() as stack:
            if self.sharded:
                self.sharded.units.counting = False
                stack.callback(setattr, self.sharded.units, "counting", True)
            if self.norms:
                stack.enter_context(self.norms.standing_in())
            yield

    def drop(self) -> None:
        """Forget what the step gathered so far."""
        self.apart = None
        if self.summing:
            self.summing.drop()
        if self.sharded:
            self.sharded.units.used.clear()
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
    habit: Habit | None = None,
    gathers: bool = False,
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
    sharded = None
    if zero_stage >= 2:
        sharded = shard_over_data(model, zero_stage, axes.axis("dp"), full_names, habit or Habit())
    named = {full_names[name]: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    summing = GradientSum(named, axes.group("dp")) if named else None
    synced = BufferSync(model, axes.group("dp"), full_names, buffers)
    return DataAxis(summing, synced, sharded, norms, axes.group("dp"), gathers)


def sum_over_data(named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum all gradients over the replicas at once, where nothing can overlap; sharded ones are sums already."""
    if dist.get_world_size(group) > 1:
        sum_gradients({name: p for name, p in named.items() if not isinstance(p, DTensor)}, group)
