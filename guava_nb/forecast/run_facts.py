"""What is known of a run before it: its model, its plan and its first batches; and what its messages weigh.

Nothing is started and nothing is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from guava_nb.cluster.traffic import NOTHING, Gauge, Traffic
from guava_nb.config.mesh import Mesh
from guava_nb.data.loader_feed import LoadedBatch, LoaderFeed
from guava_nb.data.rows import NotSeparable, Rows
from guava_nb.data.split import RowSplitter
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Message, ParallelSpec, RunSpec
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.plan import TrainingPlan

__all__ = ["HASH", "STEP", "Exchanged", "RunFacts", "Sizes", "peeked", "rows_of"]

#: A step in the middle of a run: numbers of three bytes.
STEP = 1000
HASH = "0" * 64
#: What stands in a field of a record that nothing is known of, by its name or type.
_USUAL: dict[Any, Any] = {
    **dict.fromkeys(("step", "request_id", "sequence", "number"), STEP), str: "", int: 100, float: 1.5, bool: True,
}  # fmt: skip
#: Loader batches that are looked at.
_PEEKED = 4
_Record = TypeVar("_Record", bound=Message)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the first batches of a loader are like.

    Attributes:
        groups: batches of an optimizer step each; none where the loader can be drawn once only.
        batches, rows: of an epoch; None where the loader cannot tell.
    """

    groups: tuple[tuple[LoadedBatch, ...], ...]
    batches: int | None
    rows: float | None

    @property
    def batch_rows(self) -> float:
        """Samples of a whole loader batch: the largest of those that were looked at."""
        return max((batch.rows for group in self.groups for batch in group), default=0)

    @property
    def first(self) -> LoadedBatch | None:
        """The first batch; None where none was looked at."""
        return self.groups[0][0] if self.groups else None


def peeked(feed: LoaderFeed, accumulation: int, lengths_known: bool = True) -> Sizes:
    """Look at the first batches of a loader, which stays as it is."""
    total = feed.batches_per_epoch if lengths_known else None
    wanted = max(accumulation, _PEEKED // accumulation * accumulation)
    batches = [batch for batch in feed.peek(wanted if total is None else min(wanted, total)) if batch.rows]
    groups = [tuple(batches[at : at + accumulation]) for at in range(0, len(batches), accumulation)]
    whole = [group for group in groups if len(group) == accumulation] or groups
    rows: float | None = feed.samples_per_epoch if lengths_known else None
    if rows is None and total is not None and batches:
        rows = total * sum(batch.rows for batch in batches) / len(batches)
    return Sizes(tuple(whole), total if batches else None, rows)


def rows_of(batch: LoadedBatch, splitter: RowSplitter) -> Rows | None:
    """Return a batch row by row as workers keep it; None where its samples cannot be kept one by one."""
    with contextlib.suppress(NotSeparable, ConfigError):
        return None if batch.source else Rows(batch.batch, batch.rows, splitter)
    return None


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What a run exchanges in its mode, beside batches and states.

    Attributes:
        step: in a step, without its batches.
        joining: before the first step.
        batch, looked: between the ranks of a group, for a batch of training, and of a validation.
        gathering: while the state comes back.
        spread: what one worker holds no other does.
    """

    step: Traffic
    joining: Traffic = NOTHING
    batch: Traffic = NOTHING
    looked: Traffic = NOTHING
    gathering: Traffic = NOTHING
    spread: bool = False


@dataclass(frozen=True)
class RunFacts:
    """A run that is to be forecast.

    Attributes:
        replica_set: of the run, its model as it is here.
        plan, spec: of the run.
        workers: how many take part.
        resolve: returns what a name in the record stands for, here.
        train, val: first batches; `val` is None without a validation.
        held_before: part of the samples that workers hold already.
        trained: the state at the start has an optimizer's.
    """

    replica_set: ReplicaSet
    plan: TrainingPlan
    spec: RunSpec
    workers: int
    resolve: Callable[[str], Any]
    train: Sizes
    val: Sizes | None = None
    held_before: float = 0.0
    trained: bool = False

    def changed(self, **fields: Any) -> RunFacts:
        """The same run with another record, of the same model."""
        return replace(self, spec=msgspec.structs.replace(self.spec, **fields))

    @property
    def model(self) -> nn.Module:
        """As it is here."""
        return self.replica_set.master.model

    @property
    def at_orchestrator(self) -> bool:
        """Whether the orchestrator keeps the optimizer."""
        return self.spec.optimizer_site == "orchestrator"

    @property
    def solo(self) -> bool:
        """Whether one worker commits its steps by itself."""
        return self.workers == 1 and not self.at_orchestrator and self.spec.parallel is None

    @cached_property
    def mesh(self) -> Mesh:
        """How a group's ranks are laid out; whole replicas beside each other where there is none."""
        shape = self.spec.parallel or ParallelSpec()
        return Mesh(self.workers // (shape.pp * shape.tp), shape.pp, shape.tp)

    @cached_property
    def _gauge(self) -> Gauge:
        return Gauge.of(self.spec)

    def typical(self, kind: type[_Record], **known: Any) -> _Record:
        """Return a record as it is in the middle of the run: with every field that the protocol gives it.

        Args:
            kind: type of the record.
            known: fields by name. Others keep their default; one without gets what is usual for its name or type.

        Raises:
            KeyError: nothing is usual for a field.
        """
        usual = {**_USUAL, "run_id": self.replica_set.run_id}
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in known:
                known[field.name] = usual[field.name if field.name in usual else field.type]
        return kind(**known)

    def out(self, kind: type[Message], payload_bytes: int = 0, **known: Any) -> Traffic:
        """A message of this type to a worker; `known` as for `typical`."""
        return self._gauge.out(self.typical(kind, **known), payload_bytes)

    def back(self, kind: type[Message], payload_bytes: int = 0, **known: Any) -> Traffic:
        """A message of this type from a worker; `known` as for `typical`."""
        return self._gauge.back(self.typical(kind, **known), payload_bytes)

    def sent(self, message: Message, payload_bytes: int) -> Traffic:
        """A message to a worker that is made already."""
        return self._gauge.out(message, payload_bytes)

    def acks(self, out: float, back: float) -> Traffic:
        """So many acknowledgements each way."""
        return self._gauge.acks(out, back)

    @property
    def hashes(self) -> Traffic:
        """What hashes of the parameters add to a worker's report on a step."""
        every = min(self.spec.hash_every_steps, 1) if self.spec.rounds else self.spec.hash_every_steps
        return Traffic.coming("control", len(HASH) / every if every else 0.0)

    def moving_elements(self) -> int:
        """Return how many elements of buffers move in every step: the statistics of normalisation layers."""
        norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
        found = {id(buffer): buffer.numel() for norm in norms for buffer in norm.buffers(recurse=False)}
        return sum(found.values())
