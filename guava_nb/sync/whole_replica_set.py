"""Whole replicas that meet at the orchestrator: every worker has all of the model, so any of them can feed the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from guava_nb.cluster.group_path import Route
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.errors import WorkerLost
from guava_nb.protocol.messages import Cell, RunSpec, SaveState
from guava_nb.replica.buckets import BucketWire, message_format
from guava_nb.replica.replica import Replica
from guava_nb.sync.own_state import OwnParts, deal_parts, tell_not_kept, tell_parts_missing
from guava_nb.sync.replica_set import Given, ReplicaSet
from guava_nb.sync.star_exchange import StarExchange
from guava_nb.sync.state_at_workers import StateLate
from guava_nb.sync.state_copy import COMING_BYTES

__all__ = ["BACK_S", "WholeReplicaSet"]

#: Seconds in which a worker is waited for whose connection broke: a redial, its longest pause included.
BACK_S = 5.0
#: A worker writes its own part in this time; the steps wait for it.
_OWN_S = 60.0


class WholeReplicaSet(ReplicaSet):
    """All replicas of one run, each of them whole.

    Attributes:
        sums: how sums travel, with what they left out so far.
    """

    exchange = StarExchange

    def __init__(self, run_id: str, spec: RunSpec, cells: Sequence[Cell], master: Replica) -> None:
        """Start with no worker prepared.

        Args:
            run_id, spec, cells: of the run.
            master: the orchestrator's own copy of the model.
        """
        route = Route("relay", "star", "whole replicas meet at the orchestrator")
        super().__init__(run_id, spec, cells, master, route)
        self.sums = BucketWire(master.layout, message_format(spec)[0])
        self._sent_before: dict[int, int] = {}  # bytes that had gone to those who get the state

    def pick(self, ranks: Iterable[int]) -> set[int]:
        """Choose all that are there."""
        return set(ranks)

    def connected(self, available: Sequence[int]) -> bool:
        """Whether a step can be issued: a worker is connected."""
        return bool(available)

    def newcomers(self, holders: set[int], fit: set[int]) -> list[int]:
        """Return who is there and does not hold the state."""
        return sorted(fit - holders)

    def give(self, job: Job, ranks: Collection[int], state: Callable[[], Mapping[str, Any]], step: int) -> None:
        """Bring workers that have just prepared the run to a state, from a worker that holds it where there is one.

        Args:
            job: through which messages are sent and answers awaited.
            ranks: of these workers.
            state: gives it, where no worker holds it.
            step: after which it is.
        """
        held = {rank for rank in ranks if self.holds(rank)}
        lacking = set(ranks) - held
        if lacking:
            self.load(job, lacking, self.fetch(job) if held else state, step)

    def load(self, job: Job, ranks: Iterable[int], state: Given, step: int) -> None:
        """Bring workers to a state.

        Args:
            job: through which messages are sent and answers awaited.
            ranks: of these workers.
            state: what they are sent, or what gives it.
            step: after which it is.

        Raises:
            TrainingError: workers of the same kind hold different parameters after loading.
        """
        asked, roster = set(ranks), job.cluster.roster
        roster.generation += 1  # tells this state's answers from those to an earlier one
        self._sent_before = {rank: job.cluster.seats.total_bytes(rank)[0] for rank in asked}
        self._deal_own(asked, step)
        sending = self._sending_state(job, asked, roster.generation, state, step)
        with sending, job.waiting_for(lambda: self._taking_state(asked)):
            job.pump(lambda: not self._waited_for(job, asked) - self._loaded.keys())
            while self._comes_back(job, asked - self._loaded.keys()):
                job.pump(lambda: not self._waited_for(job, asked) - self._loaded.keys())
        self._compare_loaded(job, [r for r in asked if r in self._loaded])
        if (own := self.own_of(step)) is not None:
            without = {rank for rank in asked if rank in self._loaded and not self._loaded[rank].own}
            found = sum(rank in self._loaded and self._loaded[rank].own for rank in asked)
            tell_parts_missing(job.cluster, own.count, without, found)

    def keep_own(self, job: Job) -> None:
        """As in the base class; a worker that keeps nothing is told."""
        ranks = sorted(self.in_step(job), key=self.place)
        if self.unit != "round" or len(ranks) < 2 or self.own_of(self.step) is not None:
            return
        self.own = own = OwnParts.new(self.step, len(ranks), self.sums.rests())
        orders = {rank: SaveState(n, step=self.step, own=True) for rank, n in zip(ranks, own.numbers, strict=True)}
        try:
            answers = self._answers(job, ranks, _OWN_S, whole=False, orders=orders)
        except StateLate:
            answers = [(None, None)] * len(ranks)
        tell_not_kept(job.cluster, {rank: saved for rank, (_, saved) in zip(ranks, answers, strict=True)})

    def go_on_with(self, own: OwnParts) -> None:
        """Begin with what workers kept for a checkpoint of the state that the run begins with."""
        super().go_on_with(own)
        self.sums.take_rests(own.sums)

    def _new(self, run_id: str, master: Replica) -> ReplicaSet:
        made = super()._new(run_id, master)
        assert isinstance(made, WholeReplicaSet)
        made.sums = self.sums  # workers keep what their messages left out, too
        return made

    def _deal_own(self, ranks: Collection[int], step: int) -> None:
        """Say which own part each worker reads beside the state after this step; its place in the team is that of the part."""
        self._dealt = {}
        if (own := self.own_of(step)) is not None:
            self._dealt = deal_parts(own.numbers, {rank: self._prepared[rank].own for rank in ranks})
            self._places = {rank: number - own.number for rank, number in self._dealt.items()}

    def _comes_back(self, job: Job, away: set[int]) -> bool:
        """Wait a moment for those whose connection broke while a part of the state was on its way; whether one is back.

        It goes on with that state. Without the wait it would be sent another one, from the beginning, at each break.
        """
        away = {rank for rank in away & job.suspects - job.slow.keys() if self._has_got_more(job, rank)}
        return bool(away) and job.pump(lambda: bool(away & job.ready) or not away & job.suspects, BACK_S)

    def _has_got_more(self, job: Job, rank: int) -> bool:
        """Whether something went to a worker since it was looked at last."""
        sent_bytes, before = job.cluster.seats.total_bytes(rank)[0], self._sent_before.get(rank, 0)
        self._sent_before[rank] = sent_bytes
        return sent_bytes >= before + COMING_BYTES

    def _taking_state(self, asked: Iterable[int]) -> Iterator[OwedAnswer]:
        for rank in asked:
            if rank not in self._loaded:
                yield OwedAnswer(rank, "loading", self._loading.get(rank, (0, 0))[0], "it takes the state")

    def bring_up(self, job: Job) -> None:
        """Give the run and its state to connected workers that do not hold it."""
        missing = sorted(job.ready - set(self.in_step(job)))
        if missing:
            state = self.fetch(job)
            self.require(job, missing)
            self.load(job, missing, state, self.step)

    def rescue(self, job: Job) -> bool:
        """Take the state of the last committed step from any worker that is left; returns whether it is here."""
        try:
            self.fetch(job)
        except (NobodyLeft, WorkerLost):
            return False
        return True

    def _take_in(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        self.master.load_state(parts[0])
        return dict(parts[0])
