"""A replica whose parameters are a number that tells every step and sample that went into it.

A gradient is a vector with a 1 for each sample of the shard, so a sum tells which samples it has and how often. A step
replaces the number by a hash of it and of the sum. So two replicas are equal only if they have the same steps, of the
same samples, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from guava_nb.outer_methods.outer_methods import sparse_format
from guava_nb.protocol.messages import BatchShard, Commit, RoundSpec
from guava_nb.replica.buckets import Bucket, BucketWire
from guava_nb.replica.optimizer import ApplyFailed
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.local_replica import LocalReplica, _asked
from guava_nb.replica.rounds.round_end import FirstSteps, RoundEnd
from guava_nb.replica.shard import LaunchedShard, ShardResult, ShardWork

__all__ = [
    "FAILURES",
    "OWING",
    "CountingReplica",
    "EarlyReplica",
    "OwingReplica",
    "after_steps",
    "gradient_of",
    "ids_of",
]

#: What a user's code may do in a step: the step raises and is undone; it raises midway; the schedule raises after it; the
#: forward raises; the loss is NaN.
FAILURES = ("undone", "torn", "schedule", "forward", "nan")


#: Rounds whose messages have one element; the rest their sender owes.
OWING = RoundSpec(outer="sparse", density=1 / 64, bits=32, decay=1.0)


def _layout(buckets: int) -> Any:
    return SimpleNamespace(
        numbers=tuple(range(buckets)),
        buffers=None,
        buckets=(),
        digest=lambda: "",
        bucket=lambda number: SimpleNamespace(
            is_mean_of_senders=False,
            present_bytes=1,
            not_finite=lambda tensor: [],
            check_form=lambda tensor, present: None,
        ),
    )


def ids_of(parts: Sequence[Any]) -> list[int]:
    """The samples in a shard's parts."""
    return [int(i) for part in parts if part is not None for i in part]


def gradient_of(ids: Sequence[int], samples: int) -> torch.Tensor:
    """The gradient of these samples, `[samples]`."""
    return _gradient(tuple(ids), samples)


@cache
def _gradient(ids: tuple[int, ...], samples: int) -> torch.Tensor:
    return torch.tensor([float(ids.count(i)) for i in range(samples)], dtype=torch.float64)


def _next(value: int, counts: Sequence[float], factor: float) -> int:
    return hash((value, tuple(counts), factor))


def after_steps(steps: Sequence[Sequence[int]], samples: int) -> list[int]:
    """What the parameters must be after each step of these samples, the first value before the first."""
    values = [0]
    for ids in steps:
        values.append(_next(values[-1], gradient_of(ids, samples).tolist(), 1.0))
    return values


class CountingReplica(Replica):
    """See the module's text.

    Attributes:
        value: the parameters.
        step: last step that is in them.
        pending: a lone worker's or a group's gradient, until the commit.
        before: value and step before the last step, while that can be undone.
        fails: one of `FAILURES`, which happens next.
    """

    # It keeps nothing of a user's beside the number.
    module = None
    optimizer_site = "workers"
    user_code: dict[str, object] = {}
    weights_bytes = model_bytes = 0

    layout: Any

    def __init__(self, samples: int, buckets: int, group: Any = None, undoes: bool = True) -> None:
        self.samples, self._group, self.layout = samples, group, _layout(buckets)
        self.wire = BucketWire(self.layout)
        self.value, self.step = 0, -1
        self.pending: list[float] | None = None
        self.before: tuple[int, int] | None = None
        self.fails, self._undoes = "", undoes

    def _is_due(self, failure: str) -> bool:
        due = self.fails == failure
        self.fails = "" if due else self.fails
        return due

    kind = ""
    learning_rate = None
    optimizer = SimpleNamespace(state={})

    @property
    def can_apply_ahead(self) -> bool:
        """A lone worker's step is given to the device, and its figures are read one step later."""
        return self._group is None

    def launch_shard(self, work: ShardWork, on_bucket: Any = None, gates: bool = False) -> LaunchedShard:
        self._launched = work.step
        if self._is_due("forward"):
            raise ValueError("the forward is cursed")
        if self._group is not None:
            ids = self._group.total(work.step)
            self.pending = gradient_of(ids, self.samples).tolist()
        else:
            gradient = gradient_of(ids_of(work.parts), self.samples)
            if on_bucket is None:
                self.pending = gradient.tolist()
            else:
                for bucket in self.layout.numbers:
                    on_bucket(bucket, b"\1", gradient.clone())
        rows = float(work.rows)
        result = ShardResult(rows, rows, work.rows, not self._is_due("nan"), 0.0, 0.0)
        return LaunchedShard(lambda: result)

    def own_commit(self, result: ShardResult, shard: BatchShard) -> Commit | None:
        refused = not result.finite if self._group is None else self._group.is_refused(self._launched)
        return None if refused else Commit(1.0, skip=False)

    def apply_ahead(self, launched: LaunchedShard) -> None:
        if not launched.read().finite:  # the device leaves the step out; nobody has seen it yet
            self.pending = None
            return
        schedule, self.fails = self.fails == "schedule", "" if self.fails == "schedule" else self.fails
        self.apply(None, Commit(1.0, skip=False))
        self.fails = "schedule" if schedule else self.fails  # it raises when the step is confirmed

    def confirm(self, launched: LaunchedShard) -> ShardResult:
        result = launched.read()
        if not result.finite:
            self.restore()
        elif self._is_due("schedule"):
            raise ApplyFailed(applied=True) from ValueError("the schedule is cursed")
        return result

    def stand_in(self, step: int) -> None:
        """Its forward changes nothing."""

    def apply(self, sums: Mapping[int, tuple[bytes, torch.Tensor]] | None, commit: Commit, step: int = 0) -> None:
        if sums is None:
            counts = self.pending if self.pending is not None else [-1.0]
        else:
            lists = [sums[bucket][1].tolist() for bucket in self.layout.numbers]
            counts = lists[0] if lists[0] == lists[-1] else [-2.0]
        if commit.skip:
            counts = [-3.0]
        self.before, self.pending = (self.value, self.step) if self._undoes else None, None
        if self._is_due("undone"):
            raise ApplyFailed(applied=False) from ValueError("the optimizer is cursed")
        self.value = _next(self.value, counts, commit.scale * commit.clip)
        if self._is_due("torn"):
            self.before = None
            raise ValueError("the optimizer is cursed")
        self.step += 1
        if self._is_due("schedule"):
            raise ApplyFailed(applied=True) from ValueError("the schedule is cursed")

    def undo_step(self) -> bool:
        if self.before is None:
            return False
        (self.value, self.step), self.before, self.pending = self.before, None, None
        return True

    def take_parameters(self, buckets: Mapping[int, tuple[bytes, torch.Tensor]], frozen: object = None) -> None:
        values = {int(buckets[bucket][1][0]) for bucket in self.layout.numbers}
        self.value, self.pending = (values.pop() if len(values) == 1 else -1), None
        self.step += 1

    def buffer_changes(self) -> None:
        """It has no buffers."""

    def parameter_buckets(self) -> Iterator[tuple[int, bytes, torch.Tensor]]:
        for bucket in self.layout.numbers:
            yield bucket, b"\1", torch.tensor([self.value])

    def restore(self) -> None:
        self.pending = None

    def parameter_hash(self) -> str:
        return str(self.value)

    def state(self, model: bool = True, optimizer: bool = True) -> dict[str, Any]:
        return {"value": self.value, "step": self.step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.value, self.step, self.pending, self.before = int(state["value"]), int(state["step"]), None, None

    def tick(self, metric: float | None = None) -> None:
        """No schedule."""

    def close(self) -> None:
        """Nothing to give back."""


class EarlyReplica(CountingReplica, LocalReplica):
    """One whose rounds may be begun early: what it counts then are the samples that it began with, whatever it is asked later."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._early: FirstSteps | None = None
        self._after: RoundEnd | None = None
        self._away: RoundEnd | None = None

    can_apply_ahead = False  # type: ignore[assignment]

    def begin_early(self, work: ShardWork) -> float:
        assert self._after is not None
        self._early = FirstSteps(_asked(work), self._after, list(work.parts), None)
        return 0.0

    def launch_shard(self, work: ShardWork, on_bucket: Any = None, gates: bool = False) -> LaunchedShard:
        if (early := self._taken_early(work)) is not None:
            work = replace(work, parts=early.results)
        launched = super().launch_shard(work, on_bucket, gates)
        self._after = self._after or RoundEnd([], 1, None if on_bucket is None else {}, [])
        return launched

    def apply(self, sums: Any, commit: Commit, step: int = 0) -> None:
        super().apply(sums, commit, step)
        self._away, self._after = self._after, None

    def restore(self) -> None:
        super().restore()
        self._after = self._early = None

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._after = self._early = self._away = None

    def own_key(self) -> tuple[Any, ...]:
        """What is kept of rounds, for the state of the world."""
        if self._early is None:
            return self._after is None, self._away is None
        begun_at = self._early.begun_at
        ids = tuple(ids_of(self._early.results))
        return self._early.asked, ids, begun_at is self._after, begun_at is self._away, self._away is None


class OwingReplica(CountingReplica):
    """One whose messages leave out most of what they should have, by the real wire and its error feedback.

    Attributes:
        total: what all sums came to so far, `[samples]`.
    """

    can_apply_ahead = False  # type: ignore[assignment]

    def __init__(self, samples: int, buckets: int, *more: Any) -> None:
        super().__init__(samples, buckets, *more)
        wire = sparse_format(OWING.density, OWING.bits, False)
        made = [Bucket(number, ("number",), ((samples,),), torch.float64, wire=wire) for number in range(buckets)]
        self.layout.bucket, self.layout.buckets = made.__getitem__, tuple(made)
        self.wire = BucketWire(self.layout, wire)
        self.total = torch.zeros(samples, dtype=torch.float64)

    def launch_shard(self, work: ShardWork, on_bucket: Any = None, gates: bool = False) -> LaunchedShard:
        launched = super().launch_shard(work, on_bucket, gates)
        if on_bucket is None:  # alone: nothing travels, and what was owed is paid
            gradient = gradient_of(ids_of(work.parts), self.samples)
            self.pending = [self.wire.settle(bucket, gradient) for bucket in self.layout.numbers][0].tolist()
        return launched

    def apply(self, sums: Mapping[int, tuple[bytes, torch.Tensor]] | None, commit: Commit, step: int = 0) -> None:
        counts = self.pending if sums is None else sums[0][1].tolist()
        super().apply(sums, commit, step)
        self.total = self.total + torch.tensor(counts, dtype=torch.float64)
        self.wire.commit()

    def restore(self) -> None:
        super().restore()
        self.wire.discard()

    def state(self, model: bool = True, optimizer: bool = True) -> dict[str, Any]:
        return {**super().state(), "total": self.total.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.restore()
        self.wire.reset()
        super().load_state(state)
        self.total = torch.tensor(state["total"], dtype=torch.float64)

    def own_key(self) -> tuple[Any, ...]:
        """What it owes, for the state of the world."""
        feedback = self.wire._feedback
        committed = [(key, tuple(rest.tolist())) for key, rest in sorted(feedback._committed.items())]
        proposed = [
            (key, name, tuple(rest.tolist())) for key, m in sorted(feedback._proposed.items()) for name, rest in m
        ]
        return tuple(committed), tuple(proposed), tuple(sorted(self.wire._void)), tuple(self.total.tolist())
