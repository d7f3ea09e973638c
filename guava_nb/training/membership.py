"""A job with a team: the members that hold the run's state in step.

Newcomers are brought in between two steps; who misses a step falls behind and is brought in again; when nobody holds the
state any more, the run goes back to its last snapshot with whoever comes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft, StopRequested
from guava_nb.errors import WorkerLost
from guava_nb.sync.replica_set import ReplicaSet, preparation_text
from guava_nb.training.plan import Snapshot

__all__ = ["MembershipJob"]


class MembershipJob(Job):
    """Who takes part, who is behind, who cannot.

    Attributes:
        snapshot: the state to go back to.
        behind: members that missed a step and need the state again.
    """

    trains = True

    def __init__(self, cluster: Cluster, replica_set: ReplicaSet, snapshot: Snapshot, rejoin_timeout_s: float) -> None:
        """Start without a team: `give_state` makes it."""
        super().__init__(cluster)
        self.replica_set = replica_set
        self.snapshot = snapshot
        self.behind: set[int] = set()
        self._unfit: set[int] = set()  # members that could not build this run
        self._rejoin_timeout_s = rejoin_timeout_s
        self._formed = False

    def current(self) -> list[int]:
        """Return the members that take part in every step so far: connected or expected back, and not behind."""
        return [r for r in sorted(self.replica_set.at) if r in self.ready | self.suspects and r not in self.behind]

    def available(self) -> list[int]:
        """Return those of them that are connected."""
        return [rank for rank in self.current() if rank in self.ready]

    def newcomers(self) -> list[int]:
        """Return connected members that need the state first."""
        return self.replica_set.newcomers(set(self.current()), self.ready - self._unfit)

    def give_state(self, ranks: set[int]) -> None:
        """Prepare members and bring them to the snapshot's state.

        Raises:
            PreparationError: one cannot build the run.
        """
        ranks = self.replica_set.pick(ranks)
        self.replica_set.require(self, ranks)
        fit = ranks & self.replica_set.prepared()
        self.replica_set.load(self, fit, self.snapshot.state, self.snapshot.step)
        self._formed = True

    def bring_in(self, ranks: Sequence[int]) -> None:
        """Give newcomers the run and the state of the last committed step; who cannot build the run stays out."""
        unprepared = [rank for rank in ranks if rank not in self.replica_set.prepared()]
        for rank, answer in self.replica_set.prepare(self, unprepared).items():
            self._unfit.add(rank)
            self.cluster.notice(preparation_text(self.cluster.name(rank), answer))
        fit = [rank for rank in ranks if rank in self.replica_set.prepared() and rank not in self._unfit]
        if fit:
            self.replica_set.load(self, fit, self.replica_set.fetch(self), self.replica_set.step)
            self.behind.difference_update(fit)

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Members that take no part in this run."""
        self._unfit.update(ranks)

    def check(self) -> None:
        """Unwind when nobody holds the state any more."""
        if not (self.current() if self._formed else self.ready | self.suspects):
            raise NobodyLeft
        if self._formed:
            self.replica_set.check(self)

    def start_over(self, cause: Exception) -> None:
        """Wait for as many workers as are needed and bring them to the snapshot.

        Raises:
            WorkerLost: too few came in time.
        """
        self._formed = False
        deadline = time.monotonic() + self._rejoin_timeout_s
        while len(self.ready - self._unfit) < self.replica_set.least:
            if self.interrupts:
                raise StopRequested
            if time.monotonic() > deadline:
                raise self._all_lost() from cause
            self.take_one(0.25)
        self.go_back()
        self.give_state(self.ready - self._unfit)

    def go_back(self) -> None:
        """Take the snapshot for the state of the run; what came after it is nowhere."""
        self.on_started_over()
        self.replica_set.go_back(self.snapshot.step)
        self.replica_set.master.load_state(self.snapshot.state)
        self.replica_set.master_step = self.snapshot.step
        self.behind.clear()

    def on_started_over(self) -> None:
        """Somebody came and is about to get the snapshot."""

    def _all_lost(self) -> WorkerLost:
        gone = "; ".join(f"{m.name}: {m.detail}" for m in self.cluster.members() if not m.alive)
        few = len(self.ready - self._unfit)
        who = (
            f"{self.replica_set.least} workers are needed, {few} left, and too few"
            if few
            else "all workers are gone and none"
        )
        return WorkerLost(
            f"{who} joined within {self._rejoin_timeout_s:g} s ({gone}). The state of step "
            f"{self.snapshot.step + 1} is here: run %guava_worker with the join code on a machine and train again"
        )
