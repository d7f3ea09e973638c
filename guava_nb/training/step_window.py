"""The steps of a run that are issued and not yet committed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from guava_nb.cluster.job import Job
from guava_nb.cluster.job_events import Wake
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.errors import GuavaError
from guava_nb.sync.batch_feeder import BatchFeeder
from guava_nb.sync.exchange import StepExchange
from guava_nb.sync.send_credit import SendCredit
from guava_nb.sync.whole_replica_set import BACK_S
from guava_nb.telemetry.waits import Feeding
from guava_nb.training.membership import Membership
from guava_nb.training.plan import TrainingPlan

__all__ = ["StepWindow"]

log = logging.getLogger(__name__)

#: Loader batches held ready before they are sent, at most; bytes bound them too.
_LOADED_BATCHES = 32


class StepWindow:
    """Sends steps ahead of need as far as the credit allows, drains them, aborts them.

    Attributes:
        exchange: carries the steps out.
    """

    def __init__(
        self, job: Job, membership: Membership, plan: TrainingPlan, exchange: StepExchange[Any], credit: SendCredit
    ) -> None:
        """No step is issued."""
        self.exchange = exchange
        self._job, self._membership, self._plan, self._credit = job, membership, plan, credit
        self._splitter = RowSplitter(plan.split_fn, plan.feed.reading)
        self._has_read = self._told_alone = False
        self._alone: int | None = None  # the worker that did every batch of the run so far; None: they were shared out
        self._issued = False
        self._feeder: BatchFeeder | None = None
        exchange.deals = plan.shares == "measured"
        self._blocking, self._was_full = tuple[int, ...](), False
        self._away: dict[int, float] = {}  # members that a round waits for, and since when
        self._waits_since: float | None = None  # when the next round began to wait for any of them

    # -------------------------------------------------------------------------------------------------------- send ahead

    def load_epoch(self, done: int) -> BatchFeeder:
        """Begin to load the data's next epoch, or the rest of one; the caller closes what is returned.

        Args:
            done: optimizer steps before it.
        """
        every, pauses = self._plan.batches_per_exchange, self._pauses(done)
        self._feeder = BatchFeeder(
            self._plan.feed.epoch(),
            every,
            max(1, _LOADED_BATCHES // every),
            lambda: self._job.post(Wake()),
            self._plan.prefetch_bytes // 4,
            pauses,
        )
        return self._feeder

    def _pauses(self, done: int) -> Callable[[int], bool]:
        """Before which groups loading waits for a validation, which draws from the streams that a data set draws from too."""
        plan = self._plan
        interval, each, every = plan.val_interval, plan.feed.batches_per_epoch, plan.sync_every
        if plan.val_feed is None or not interval or not plan.feed.loads_here:
            return lambda group: False
        left = math.inf if each is None else each - plan.feed.next_batch

        def pauses(group: int) -> bool:
            steps = done + group * every
            return group * plan.batches_per_exchange < left and steps // interval > (steps - every) // interval

        return lambda group: group > 0 and pauses(group)

    def wait_for_batches(self, feeder: BatchFeeder, at_pause: Callable[[], None]) -> None:
        """Wait until batches for the next step are there, or the epoch's end; `at_pause` is called where loading has paused."""
        self._job.pump(feeder.is_at_rest)
        while not feeder.available():
            at_pause()
            feeder.go_on()
            self._job.pump(feeder.is_at_rest)

    def feeding(self) -> Feeding:
        """Return what is loaded and what is on its way; from any thread."""
        loaded = (0, 0) if self._feeder is None else self._feeder.held()
        ranks = [member.rank for member in self._membership.cluster.members()]
        return Feeding(loaded, {r: (self._credit.held_shards(r), self._credit.held_bytes(r)) for r in ranks})

    def wait_for_room(self, coming: int) -> None:
        """Wait until the next step, of so many bytes, may be sent, and note for whom it waited."""
        started = time.monotonic()
        self._blocking, self._was_full = tuple[int, ...](), False
        self._job.pump(partial(self._has_room, coming))
        for rank in self._blocking or (self._membership.available() if self._was_full else ()):
            self._membership.cluster.roster.members[rank].waits.held(time.monotonic() - started)

    def _has_room(self, coming: int) -> bool:
        if self._credit.is_full(
            len(self.exchange.in_flight)
        ):  # asked after each message, of which a step brings three a worker
            self._was_full = True
            return False
        team = self._membership.available()
        if not self._membership.replica_set.connected(team) or self._waits_for_away():
            return False
        parts = self.exchange.parts(self._measured(team))
        bytes_for = {rank: int(coming * part) for rank, part in zip(team, parts, strict=True)}
        away = len(team) < len(self._membership.current())
        busy = self._credit.must_work(len(self.exchange.in_flight), bytes_for, cautious=away)
        self._blocking = busy or self._blocking
        return not busy

    def _waits_for_away(self) -> bool:
        """Whether a round waits for members whose connection broke, so that they miss none: no longer than their state takes.

        One that missed a round gets the state anew, and what only it had is lost. A round waits once: one that goes away while it
        waits makes it wait no longer than one that was away at the beginning, else many whose lines break now and then would
        hold up all rounds for ever.
        """
        members = self._membership
        if members.replica_set.spec.rounds is None or not self._job.suspects:
            self._away.clear()
            return False
        now, away = time.monotonic(), set(members.current()) & self._job.suspects - self._job.slow.keys()
        self._away = {rank: self._away.get(rank, now) for rank in away}
        if away and self._waits_since is None:
            self._waits_since = now
        latest = now if self._waits_since is None else self._waits_since
        waited = tuple(r for r, since in self._away.items() if now < min(since, latest) + self._worth_s(r))
        self._blocking = waited or self._blocking
        return bool(waited)

    def _worth_s(self, rank: int) -> float:
        """Return for how long a member that is away is worth waiting for."""
        rate = self._membership.cluster.rates(rank)[0]
        state_s = 3 * self._membership.replica_set.master.weights_bytes / rate if rate else 0.0
        return max(BACK_S, state_s)

    def read_ahead(self, feeder: BatchFeeder) -> None:
        """Before the first step wait until a second one is loaded: it shows what belongs to one batch alone; and tell.

        What has to be cut and cannot be is refused by the exchange, before anything is sent.
        """
        for note in self._plan.feed.take_notes():
            self._membership.cluster.notice(note)
        if not self._has_read:
            self._has_read = True
            self._job.pump(feeder.is_at_rest)
            if not self._plan.feed.reading.is_plain and not self._plan.split_fn and not self._plan.feed.gives_ids:
                self._membership.cluster.notice(f"how batches are read: {self._plan.reading_text}")

    def _measured(self, team: Sequence[int]) -> list[float]:
        """What part of a step each member gets: by the plan, or by its pace where that is to count and all are known."""
        members = self._membership.cluster.roster.members
        seconds = [members[rank].sample_s for rank in team]
        if not self.exchange.deals or not all(seconds):
            return self._plan.weights(team)
        return [1 / one for one in seconds if one]

    def _weights(self, team: tuple[int, ...]) -> list[float]:
        """What part of a step each member gets.

        Nothing was refused while one worker did every batch whole. So it goes on like that when others join it.
        """
        weights = self._measured(team)
        busy = [rank for rank, weight in zip(team, weights, strict=True) if weight > 0]
        if len(busy) == 1:
            self._alone = busy[0] if self._alone is not None or not self._issued else None
        elif self._alone is None or not self._splitter.problem:
            self._alone = None
        else:
            if not self._told_alone:
                self._told_alone = True
                self._membership.cluster.notice(f"further workers get no share, because {self._splitter.problem}")
            self._alone = self._alone if self._alone in busy else busy[0]
            return [float(rank == self._alone) for rank in team]
        return weights

    def issue(self, epoch: int, batches: Sequence[LoadedBatch], team: tuple[int, ...]) -> int:
        """Send a step to these members; returns its number.

        Args:
            epoch: of the step.
            batches: of the loader.
            team: ranks that take part.
        """
        weights, self._issued, self._waits_since = self._weights(team), True, None
        parallel = self._membership.replica_set.spec.parallel
        cuts = (
            parallel is None or parallel.pp * parallel.tp == 1
        )  # else ranks that see the same samples would have "shares"
        for rank, weight in zip(team, weights, strict=True):
            self._membership.cluster.roster.members[rank].share = weight / sum(weights) if cuts else None
        return self.exchange.issue(epoch, batches, team, weights, self._splitter).machine.step

    def issued_steps(self, committed: int) -> int:
        """Return how many optimizer steps are committed or in flight, where so many are committed."""
        return committed + sum(step.machine.num_steps for step in self.exchange.in_flight.values())

    def most_batches(self, committed: int) -> int | None:
        """Return how many loader batches may follow up to the last step of the run; None: the data ends it."""
        if self._plan.max_steps is None:
            return None
        return (self._plan.max_steps - self.issued_steps(committed)) * self._plan.accumulation_steps

    # ------------------------------------------------------------------------------------------------------ what is there

    def adopt(self) -> None:
        """Give the shards of members that are not connected to those that are."""
        self.exchange.adopt(self._membership.available())

    def drain(self) -> None:
        """Wait until no step is in flight and every connected member has applied the last one."""
        self._job.pump(lambda: not self.exchange.in_flight)
        self._credit.pause()
        with self._job.waiting_for(self._applying):
            self._job.pump(lambda: next(self._applying(), None) is None)

    def _applying(self) -> Iterator[OwedAnswer]:
        replica_set = self._membership.replica_set
        for rank in self._membership.available():
            if replica_set.at[rank] != replica_set.step:
                yield OwedAnswer(rank, "applying", replica_set.step, f"it applies {replica_set.nth(replica_set.step)}")

    def abort(self, reason: str, hear_all: bool = False, last: int | None = None) -> None:
        """Have all members forget what is not committed, and hear how far they are.

        Who is heard: a lone worker, and ranks that vote, which apply by themselves and may be ahead of what is known here;
        after a failure all, since others may have failed in the same way and their reports must not reach a later job. `last`
        as in `ReplicaSet.abort`. A lone worker that is away is not waited for: its steps stay in flight, and count as soon as
        it is heard, or as far as the state goes that is fetched from it. Of ranks the one that has come furthest counts.
        """
        replica_set = self._membership.replica_set
        replica_set.abort(self._job, list(replica_set.at), reason, last)
        in_flight = [f.machine for f in self.exchange.in_flight.values() if f.machine.is_applied_first]
        ahead, voted = (
            {t.owner for machine in in_flight for t in machine.tasks},
            any(machine.voted for machine in in_flight),
        )
        # No member would apply another one that were committed while others are heard.
        self.exchange.give_up(but_applied_first=True)
        self._hear(set(replica_set.at) if hear_all else ahead)
        if voted:
            replica_set.adopt_highest(self._job)
        self.exchange.give_up(but_applied_first=not all(map(replica_set.has_settled, ahead)))

    def _hear(self, ranks: set[int]) -> None:
        deadline, job = time.monotonic() + self._plan.interrupt_grace_s, self._job
        has_settled = self._membership.replica_set.has_settled
        while not all(has_settled(r, r in job.failed) for r in (ranks & job.ready) - self._membership.behind):
            if job.interrupts > 1 or time.monotonic() > deadline:
                return
            try:
                job.take_one(0.1)
            except GuavaError as error:
                log.debug("while giving up steps: %s", error)
