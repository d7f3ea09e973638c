"""Who takes part in a run: who holds its state, who is behind, who cannot build it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.sync.own_state import tell_own_state_lost
from guava_nb.sync.replica_set import ReplicaSet, preparation_text
from guava_nb.sync.states_on_disk import StateOnDisk
from guava_nb.sync.whole_replica_set import BACK_S
from guava_nb.training.plan import Snapshot

__all__ = ["Membership"]

#: The others wait so long for newcomers that build the run, which is enough for a small model; after it they train on.
BUILD_S = 1.0


class Membership:
    """The members of one run, and how they get its state.

    Attributes:
        cluster, replica_set: of the run.
        behind: members that missed a step and need the state again.
        building: newcomers that were told to build the run and were not brought in yet.
        formed: the members were given the state, at the start or after the last loss.
    """

    def __init__(self, job: Job, replica_set: ReplicaSet) -> None:
        """Start without members: `give_state` makes them."""
        self.cluster, self.replica_set = job.cluster, replica_set
        self.behind: set[int] = set()
        self.building: set[int] = set()
        self.formed = False
        self._job = job
        self._told: set[int] = set()  # of whose cards it was told
        self._unfit: set[int] = set()  # members that could not build this run, or shall not take part

    @property
    def ready(self) -> set[int]:
        """All workers that are connected."""
        return self._job.ready

    @property
    def fit(self) -> set[int]:
        """Those of them that can take part."""
        return self._job.ready - self._unfit

    def current(self) -> list[int]:
        """Return the members that take part in every step so far, by place: connected or expected back, and not behind."""
        return sorted(filter(self._takes_part, self.replica_set.at), key=self.replica_set.place)

    def _takes_part(self, rank: int) -> bool:
        return (rank in self._job.ready or rank in self._job.suspects) and rank not in self.behind

    def available(self) -> list[int]:
        """Return those of them that are connected."""
        return [rank for rank in self.current() if rank in self._job.ready]

    def newcomers(self) -> list[int]:
        """Return connected members that need the state first; not those that still build the run."""
        fit = {rank for rank in self.fit if rank not in self.building or self.replica_set.has_answered(rank)}
        return self.replica_set.newcomers(set(self.current()), fit)

    def give_state(self, snapshot: Snapshot) -> None:
        """Prepare all who are fit and bring them to the state of a snapshot.

        Raises:
            PreparationError: one cannot build the run.
        """
        self._wait_for_away()
        ranks = self.replica_set.pick(self.fit)
        self.replica_set.require(self._job, ranks)
        self._wait_for_away(ranks)
        self.building = {rank for rank in ranks if not self.replica_set.has_answered(rank)}
        self._tell_emulated_bf16(ranks)
        ranks &= self.replica_set.prepared()
        self.replica_set.give(self._job, ranks, lambda: self._state_of(snapshot), snapshot.step)
        self.formed = True

    def _wait_for_away(self, asked: Set[int] = frozenset()) -> None:
        """In runs of rounds wait a moment for those whose connection broke: one that comes later gets the state over its line.

        Those of `asked` that are back have been told to build the run, and their answers are waited for, too.
        """
        job, answered = self._job, self.replica_set.has_answered
        if self.replica_set.spec.rounds is not None:
            job.pump(lambda: not job.suspects - job.slow.keys() and all(map(answered, asked & job.ready)), BACK_S)

    def _state_of(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the state of a snapshot; where what it should be is lost with its workers, tell."""
        if snapshot.kept.loss:
            self.cluster.notice(snapshot.kept.loss)
            snapshot.kept.settle()
        return snapshot.state

    def _tell_emulated_bf16(self, ranks: Iterable[int]) -> None:
        if self.replica_set.spec.precision != "bf16":
            return
        for rank in sorted(set(ranks) - self._told):
            self._told.add(rank)
            hello = self.cluster.roster.members[rank].hello
            if hello.device.startswith("cuda") and not hello.has_bf16:
                self.cluster.notice(
                    f"{hello.name}: its {hello.device_name} only emulates bf16, in which this run computes, so it is slow and "
                    "the others wait for it: leave it out, or train with --precision fp16 or fp32"
                )

    def prepare_returned(self, on_disk: Iterable[StateOnDisk]) -> None:
        """Have all who are fit prepare the run again: one that was away may hold its state still, or have one on its disk."""
        self.behind.clear()
        self.replica_set.on_disk.look_for(on_disk)
        for rank, answer in self.replica_set.prepare(self._job, self.fit).items():
            self._unfit.add(rank)
            self.cluster.notice(preparation_text(self.cluster.name(rank), answer))

    def spares(self) -> list[int]:
        """Return who would take a lost member's place in a mesh of a fixed size and was not told yet to build the run."""
        if self.replica_set.elastic or not self.formed:
            return []
        known = {*self.current(), *self.newcomers(), *self.replica_set.prepared()} | self.building
        return sorted(self.fit - known)

    def prepare(self, ranks: Iterable[int]) -> None:
        """Have workers build the run, the first time of which costs a process seconds; one that cannot stays out.

        One that takes long does so while the others train on.
        """
        self.replica_set.ask_ahead(self._job, set(ranks) - self.building, BUILD_S)
        self.building.update(ranks)
        answered = {rank for rank in self.building if self.replica_set.has_answered(rank)}
        self.building -= answered
        for rank, answer in self.replica_set.conclude(self._job, answered).items():
            self._unfit.add(rank)
            self.cluster.notice(preparation_text(self.cluster.name(rank), answer))

    def bring_in(self, ranks: Sequence[int]) -> None:
        """Give newcomers the run and the state of the last committed step; one that cannot build the run stays out.

        One that takes long to build it does so while the others train on, and comes in at a later boundary.
        """
        unprepared = {rank for rank in ranks if rank not in self.replica_set.prepared()}
        self.prepare(unprepared)
        kept = {rank for rank in unprepared if self.replica_set.holds(rank)}
        prepared = {r for r in ranks if r in self.replica_set.prepared() and r not in self._unfit and r not in kept}
        fit = self.replica_set.newcomers(set(self.current()), prepared)  # of a mesh: whole replicas
        if fit:
            self._tell_emulated_bf16(fit)
            state = self.fetch()
            # While a larger group forms, no member holds the state, and it is here.
            self.formed = self.replica_set.spec.parallel is None
            self.replica_set.load(self._job, fit, state, self.replica_set.step)
            self.formed = True
            for rank in sorted(self.behind.intersection(fit)):
                tell_own_state_lost(self.cluster, self.replica_set.spec, rank, "got the state of another worker")
            self.behind.difference_update(fit)

    def lose(self, rank: int) -> None:
        """Count a member out that is gone; the others are told what is lost with it."""
        took_part = self.replica_set.at.pop(rank, None) is not None
        self.building.discard(rank)
        if took_part and self._job.ready:
            happened = "is lost" if self.cluster.roster.members[rank].state == "lost" else "left"
            tell_own_state_lost(self.cluster, self.replica_set.spec, rank, happened)

    def tell_absent(self) -> None:
        """At the end of the run: tell what is lost with members that missed steps and are not back."""
        for rank in sorted(self.behind & self._job.suspects):
            tell_own_state_lost(self.cluster, self.replica_set.spec, rank, "was away when the run ended")

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Let members take no part in this run from now on."""
        self._unfit.update(ranks)

    def fetch(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the state of the last committed step; errors as for `ReplicaSet.fetch`."""
        return self.replica_set.fetch(self._job, timeout_s=timeout_s)

    def go_back(self, snapshot: Snapshot) -> None:
        """Take a snapshot for the state of the run: no member has it yet."""
        state = self._state_of(snapshot)
        self.replica_set.go_back(snapshot.step)
        self.replica_set.master.load_state(state)
        self.replica_set.master_step = snapshot.step
        self.behind.clear()

    def check(self) -> None:
        """Unwind when no member holds the state any more.

        Raises:
            NobodyLeft: no member is left.
            GroupLost: the members cannot go on together.
        """
        # Asked after each message: the first that takes part is enough.
        if not (
            any(map(self._takes_part, self.replica_set.at)) if self.formed else self._job.ready or self._job.suspects
        ):
            raise NobodyLeft
        if self.formed:
            self.replica_set.check(self._job)
