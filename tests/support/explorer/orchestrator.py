"""The orchestrator: the real cluster and the real training job, without threads.

What is replaced: the thread that loads batches, the clock, the file of a checkpoint, and where the job's mailbox gets its
next event from.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job
from guava_nb.cluster.job_events import FromWorker, JobEvent, Wake
from guava_nb.cluster.worker_output import OutputLog
from guava_nb.data.loader_feed import LoadedBatch, LoaderFeed
from guava_nb.protocol.messages import Factory, ParallelSpec, RunSpec
from guava_nb.sync.group_replica_set import GroupReplicaSet
from guava_nb.sync.handover import _Fetching
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import Position, TrainingPlan
from tests.support.explorer.replica import CountingReplica

__all__ = [
    "CLOCK",
    "Checkpoint",
    "Explored",
    "ExploredFetch",
    "ExploredJob",
    "QuietCluster",
    "replica_set_for",
    "spec_for",
    "without_threads",
]

#: Modules that ask for the time.
TIMED = (
    "cluster.job", "sync.exchange", "sync.group_replica_set", "training.job", "training.recovery", "training.run",
    "training.step_window", "worker.loop", "worker.steps",
)  # fmt: skip


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def time(self) -> float:
        """When a run began, for people only."""
        return self.monotonic()


class _NoThread:
    """A thread that never runs: what it would do is done in turn."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **more: Any) -> None:
        self._target, self._args = target, args

    def start(self) -> None:
        if self._args:  # the one that closes a session; the dispatcher has no arguments
            self._target(*self._args)

    def join(self, timeout_s: float | None = None) -> None:
        """It has ended."""


class _Feeder:
    """Loads a batch when it is asked for one."""

    def __init__(
        self,
        batches: Iterator[LoadedBatch],
        group: int,
        depth: int,
        wake: Callable[[], None],
        budget_bytes: int,
        pauses: object = None,
    ) -> None:
        self._batches = batches
        self._next = next(batches, None)

    def available(self) -> bool:
        return True

    def is_at_rest(self) -> bool:
        return True

    def next_bytes(self) -> int | None:
        return None if self._next is None else 1

    def take(self) -> list[LoadedBatch] | None:
        if self._next is None:
            return None
        taken, self._next = self._next, next(self._batches, None)
        return [taken]

    def held(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self._batches.close()  # type: ignore[attr-defined]

    def key(self) -> int:
        """The batch that comes next."""
        return -1 if self._next is None else self._next.index


#: The time of the run that is walked at present.
CLOCK = Clock()


class _NoRandomness:
    """The loader is a list: it draws nothing."""

    @classmethod
    def take(cls, streams: object) -> _NoRandomness:
        return cls()

    @classmethod
    def from_plain(cls, plain: object) -> _NoRandomness:
        return cls()

    def put(self, streams: object) -> None:
        """Nothing to restore."""

    def is_same(self, other: object) -> bool:
        return True

    def to_plain(self) -> dict[str, object]:
        return {"generators": {}}


@contextmanager
def without_threads() -> Iterator[None]:
    """Have what is built in the block use no thread, no randomness and `CLOCK`; groups hold no sockets to be collected."""
    quiet = SimpleNamespace(Thread=_NoThread, Condition=threading.Condition, current_thread=threading.current_thread)
    patches = [mock.patch(f"guava_nb.{module}.time", CLOCK) for module in TIMED]
    patches.append(mock.patch("guava_nb.cluster.cluster.threading", quiet))
    patches.append(mock.patch("guava_nb.worker.loop.gc", SimpleNamespace(collect=lambda: 0)))
    patches.append(mock.patch("guava_nb.training.step_window.BatchFeeder", _Feeder))
    patches.append(mock.patch("guava_nb.data.loader_feed.RandomState", _NoRandomness))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


class QuietCluster(Cluster):
    """The cluster, whose dispatcher works when it is called."""

    def __init__(self) -> None:
        super().__init__(OutputLog(None), lambda sentence: None)

    def dispatch(self) -> None:
        """Handle all events of sessions."""
        while not self._events.empty():
            event = self._events.get()
            assert event is not None
            self._handle(event)


class Checkpoint(SimpleNamespace):
    """What a file would hold: state, step, position."""


class Explored(Job):
    """A job whose mailbox the explorer fills.

    Attributes:
        events: changes of the membership that it has not looked at.
        came: a worker's message that it has not looked at.
    """

    def expect(self, next_event: Callable[[], None]) -> None:
        """Have `next_event` called where the job waits."""
        self.events: deque[JobEvent] = deque()
        self.came: FromWorker | None = None
        self._next_event = next_event

    def post(self, event: JobEvent) -> None:
        """Take an event."""
        if isinstance(event, FromWorker):
            self.came = event
        elif not isinstance(event, Wake):
            self.events.append(event)

    def take_one(self, timeout_s: float) -> None:
        """Let everything else go on until there is an event for this job."""
        self._next_event()


class ExploredFetch(Explored, _Fetching):
    """Fetches the state between two runs."""


class ExploredJob(Explored, TrainingJob):
    """The training job.

    Attributes:
        saved: the newest checkpoint.
    """

    def __init__(
        self, replica_set: ReplicaSet, plan: TrainingPlan, cluster: Cluster, next_event: Callable[[], None]
    ) -> None:
        self.expect(next_event)
        self.saved: Checkpoint | None = None
        self.log: Callable[[], list[Any]] = list
        super().__init__(replica_set, plan, cluster, lambda: replica_set.master.model)
        self._boundary.save = self.save_at_once

    def save_at_once(self, kind: str) -> None:
        """Keep a checkpoint."""
        replica_set = self.replica_set
        at = replica_set.step
        self.saved = Checkpoint(state=replica_set.master.state(), step=at, position=self.where(), log=self.log())

    def go(self) -> str:
        """Run to the end, as `_main` does; returns the state in which it ended."""
        state = "failed"
        try:
            with self.attached():
                state, _ = self._execute()
        finally:
            if state != "done":
                self.replica_set.retire()
            self.accounting.close(state == "done")
        return state


class _WholeSet(WholeReplicaSet):
    """Whole replicas."""


class _PartsSet(GroupReplicaSet):
    """Parts that are all alike, so that the whole is any of them."""

    def _take_in(self, parts: Any) -> dict[str, Any]:
        assert len({(part["value"], part["step"]) for part in parts}) == 1, "the parts are of different steps"
        self.master.load_state(parts[0])
        return self.master.state()


class _VotingSet(_PartsSet):
    """Whole replicas that reach each other."""

    votes = True  # type: ignore[assignment]


def spec_for(exchange: str, site: str, members: int) -> RunSpec:
    """The record of a run: exchange "star", "group" (whole replicas on their own paths), "voting" (which decide) or "parts"."""
    parallel = None
    if exchange in ("group", "voting"):
        parallel = ParallelSpec(mode="data", dp=members, path="relay")
    elif exchange == "parts":
        parallel = ParallelSpec(mode="zero", dp=members, zero_stage=3, path="relay")
    return RunSpec(
        model=Factory("m"), criterion=Factory("c"), step=None, optimizer=Factory("SGD"), scheduler=None,
        optimizer_site=site, hash_every_steps=1, parallel=parallel,
    )  # fmt: skip


def replica_set_for(
    spec: RunSpec,
    samples: int,
    buckets: int,
    saved: Checkpoint | None,
    run_id: str = "run",
    votes: bool = False,
    replica: type[CountingReplica] = CountingReplica,
) -> ReplicaSet:
    """The replicas of a run that begins, or goes on from a checkpoint."""
    kind: Any = _WholeSet if spec.parallel is None else _PartsSet
    kind = _VotingSet if votes else kind
    made = kind(run_id, spec, (), replica(samples, buckets))
    if saved is not None:
        made.master.load_state(saved.state)
        made.step = made.master_step = saved.step
    return made


@cache
def _tensor(ids: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(ids)


def plan_for(batches: list[list[int]], epochs: int, saved: Checkpoint | None, **changes: Any) -> TrainingPlan:
    """The plan of a run over these batches of sample ids."""
    feed = LoaderFeed([_tensor(tuple(ids)) for ids in batches])
    plan = TrainingPlan(feed, None, epochs, prefetch_bytes=0, check="off", **changes)
    if saved is not None:
        plan.start = Position(**{name: getattr(saved.position, name) for name in Position.__slots__})
        plan.start.rewind(feed, None)
    return plan
