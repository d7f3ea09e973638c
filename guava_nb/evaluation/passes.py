"""One pass over a loader without training: batches dealt to the workers, answers taken in the loader's order.

Validation and prediction are two `Question`s; what differs is what travels and what is done with the answers. Whichever
worker is lost, each batch counts once: an answer is taken the first time it comes, and a batch without one is asked again.
`pass_over` chooses how batches are dealt: to whole replicas, or each to all ranks of a group. No batch is shared out.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from guava_nb.cluster.job import Job, NobodyLeft, StopRequested
from guava_nb.cluster.job_events import Wake
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.data.loader_feed import LoadedBatch, LoaderFeed
from guava_nb.data.rows import Rows
from guava_nb.data.split import RowSplitter, SplitFunction
from guava_nb.errors import WorkerLost
from guava_nb.evaluation.batch_orders import Answer, BatchOrders, Order, Question, span_text
from guava_nb.protocol.messages import Evaluated, Generated, GivenUp, Predict, Predicted
from guava_nb.row_cache.writer import RowSlice
from guava_nb.sync.batch_feeder import BatchFeeder
from guava_nb.sync.group_replica_set import GroupReplicaSet
from guava_nb.sync.replica_set import GroupLost, ReplicaSet

__all__ = ["Pass", "Progress", "pass_over"]

log = logging.getLogger(__name__)

#: Batches that a worker holds at once: one in work, one waiting, so that the wire and the device overlap.
WINDOW = 2
#: Batches per worker that may be answered while an earlier one is not: what a slow worker makes the hub keep.
AHEAD = 4
#: Seconds between two reports of progress.
PROGRESS_S = 0.25

#: Takes samples done, and how many there are (None: not known).
Progress = Callable[[int, int | None], None]


@dataclass(slots=True)
class Asked:
    """One batch that was asked about.

    Attributes:
        batch: kept while it may have to be asked again.
        request: number of the question.
        orders: what workers were sent and have not answered, by rank.
        ranks: all that were sent it.
        came: answers of some members of the group that was sent the batch, by rank.
        answers: all of them, in order of rank; empty until they are here.
    """

    batch: LoadedBatch
    request: int
    orders: dict[int, Order]
    ranks: set[int] = field(default_factory=set)
    came: dict[int, Answer] = field(default_factory=dict)
    answers: Sequence[Answer] = ()


class Pass(ABC):
    """What passes over replicas and over groups have in common.

    Args:
        job: attached, or about to be.
        replica_set: stands at the last committed state when `run` is called.
        split_fn: the user's function that cuts batches; None cuts them as they are read.

    Attributes:
        before_batch: called with each batch before it is sent; may raise, and the pass is given up.
    """

    _question: Question
    _orders: BatchOrders
    _cuts = False  # whether batches are shared out

    def __init__(self, job: Job, replica_set: ReplicaSet, split_fn: SplitFunction | None = None) -> None:
        """Register for the workers' answers."""
        self._job, self._replica_set = job, replica_set
        self._asked: list[Asked] = []  # in the loader's order
        self._split_fn = split_fn
        self._progress: Progress = lambda done, total: None
        self._done, self._shown = 0, 0.0
        self._total: int | None = None
        self.before_batch: Callable[[LoadedBatch], None] = lambda batch: None
        job.on(Evaluated, self._on_answer)
        job.on(Predicted, self._on_answer)
        job.on(Generated, self._on_generated)
        job.about_request = self._about
        replica_set.writer.on_batch_wanted = self._on_wanted

    def run(
        self, feed: LoaderFeed, question: Question, *, skip_batches: int = 0, progress: Progress | None = None
    ) -> None:
        """Ask about every batch of the loader's next epoch, each answered once.

        Args:
            feed: the loader.
            question: what is asked, and what takes the answers.
            skip_batches: of the loader, that were done before.
            progress: called a few times a second, with the samples of this call.

        Raises:
            NobodyLeft: the last worker is gone.
            GroupLost: a member of a group is gone.
            RemoteError: the user's code raised on a worker.
            ConfigError: a batch or an output has no form that this can take.
        """
        self._question, self._progress = question, progress or self._progress
        replicas = self._replica_set
        wants_whole = replicas.spec.preprocess is not None
        splitter = RowSplitter(self._split_fn, feed.reading)
        self._orders = BatchOrders(question, replicas.run_id, wants_whole, replicas.writer, splitter)
        self._done, self._total = 0, feed.samples_per_epoch
        self._asked.clear()
        feeder = BatchFeeder(feed.epoch(skip_batches), 1, WINDOW, lambda: self._job.post(Wake()))
        try:
            while True:
                self._pump(feeder.available)
                group = feeder.take()
                if group is None:
                    break
                if group[0].rows:
                    if self._cuts and feed.reading.seen < 2:  # a second batch shows what belongs to one batch alone
                        self._pump(feeder.available)
                    self._pump(self._has_room)
                    self.before_batch(group[0])
                    self._deal(group[0])
            self._pump(lambda: not self._asked)
            self._progress(self._done, self._total)  # the last report may have come earlier
        finally:
            feeder.close()

    def leave(self, grace_s: float) -> None:  # noqa: B027 - whole replicas go on by themselves
        """End a pass that raised: no worker may be left waiting for another.

        Args:
            grace_s: how long the batches in work may take; 0 gives them up at once.
        """

    def _give_up(self) -> None:
        """Have workers end what no one waits for: a prompt may have minutes to go."""
        for asked in self._asked:
            for rank, (message, _) in asked.orders.items():
                if isinstance(message, Predict):
                    self._job.cluster.send(rank, GivenUp(self._replica_set.run_id, asked.request))

    def _fold(self) -> None:
        """Take what is answered, as far as everything before it is."""
        while self._asked and self._asked[0].answers:
            asked = self._asked.pop(0)
            self._question.take(asked.batch, asked.answers)
            self._done += asked.batch.rows
        now = time.monotonic()
        if now >= self._shown + PROGRESS_S:
            self._shown = now
            self._progress(self._done, self._total)

    def _find(self, request: int) -> Asked | None:
        return next((asked for asked in self._asked if asked.request == request), None)

    def _about(self, request: int) -> str | None:
        """Say what a request was about; None: it is none of this pass."""
        asked = self._find(request)
        if asked is None:
            return None
        return f"while {self._question.verb} batch {asked.batch.index} of the loader{span_text(asked.batch)}"

    def _send(self, asked: Asked, ranks: Iterable[int]) -> None:
        for rank in ranks:
            asked.ranks.add(rank)
            self._job.cluster.send(rank, *self._replica_set.writer.write(rank, *asked.orders[rank]))

    def _on_wanted(self, rank: int, request: int) -> None:
        """Send a batch again to a worker that lacks rows that it was thought to hold."""
        asked = self._find(request)
        if asked is not None and rank in asked.orders:
            self._send(asked, [rank])

    def _on_answer(self, rank: int, message: Evaluated | Predicted, payload: memoryview) -> None:
        asked = self._find(message.request_id)
        if message.run_id != self._replica_set.run_id or asked is None or asked.answers:
            return
        if rank in asked.ranks:
            self._question.check(message, payload, asked.batch.rows)
            self._take(asked, rank, (message, payload))

    def _on_generated(self, rank: int, message: Generated, payload: memoryview) -> None:
        asked = self._find(message.request_id)
        if message.run_id == self._replica_set.run_id and asked is not None and rank in asked.orders:
            self._question.heard(message)

    @abstractmethod
    def _take(self, asked: Asked, rank: int, answer: Answer) -> None:
        """Take an answer on a batch that is not answered yet."""

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether another batch may be dealt."""

    @abstractmethod
    def _deal(self, batch: LoadedBatch) -> None:
        """Send a batch to the workers that do it."""

    @abstractmethod
    def _mend(self) -> None:
        """Deal again what was lost; raise where no answer can come any more."""

    def _pump(self, until: Callable[[], bool]) -> None:
        """Wait; meanwhile take answers, and deal again what was lost."""

        def condition() -> bool:
            self._fold()
            self._mend()
            return until()

        with self._job.waiting_for(self._owed):
            self._job.pump(condition)

    def _owed(self) -> Iterator[OwedAnswer]:
        """The first batch that each worker has not answered."""
        told = set[int]()
        for asked in self._asked:
            for rank in asked.orders.keys() - told:
                told.add(rank)
                yield OwedAnswer(
                    rank, self._question.verb, asked.request, f"{self._question.verb} batch {asked.batch.index}"
                )


class StarPass(Pass):
    """Whole batches to whole replicas, each to the worker that has least to do."""

    def run(
        self, feed: LoaderFeed, question: Question, *, skip_batches: int = 0, progress: Progress | None = None
    ) -> None:
        """Ask about every batch, see `Pass.run`; answers that come later are dropped."""
        try:
            super().run(feed, question, skip_batches=skip_batches, progress=progress)
        finally:
            self._give_up()
            self._asked.clear()

    def _take(self, asked: Asked, rank: int, answer: Answer) -> None:
        # Answers come once or, after a loss, twice with the same content, from two workers: the first one counts.
        asked.answers, asked.orders = [answer], {}

    def _mend(self) -> None:
        self._deal_again()
        self._job.check()
        # Where all workers that are here have dropped the run no answer would ever come.
        at, step = self._replica_set.at, self._replica_set.step
        if not any(at.get(rank) == step for rank in self._job.ready | self._job.suspects):
            raise WorkerLost("the workers that are here have dropped the model after an error; %guava_log tells which")

    def _has_room(self) -> bool:
        here = self._replica_set.in_step(self._job)
        return len(self._asked) < AHEAD * len(here) and bool(self._free())

    def _load(self) -> Counter[int]:
        """How many batches each worker has not answered."""
        return Counter(rank for asked in self._asked for rank in asked.orders)

    def _free(self) -> list[int]:
        """Ranks that can take a batch, those with least to do first."""
        load, here = self._load(), self._replica_set.in_step(self._job)
        return sorted((rank for rank in here if load[rank] < WINDOW), key=lambda rank: (load[rank], rank))

    def _deal(self, batch: LoadedBatch) -> None:
        request = self._replica_set.next_request()
        order, free = self._orders.whole(request, batch), self._free()
        part = order[1].parts[0]
        if isinstance(part, RowSlice):
            free = self._by_rows(part.rows, free)
        asked = Asked(replace(batch, batch=None), request, {free[0]: order})
        self._asked.append(asked)
        self._send(asked, asked.orders)

    def _by_rows(self, rows: Rows, free: list[int]) -> list[int]:
        """Order ranks by how much of a batch they hold; one that holds all of it takes it however much it has to do."""
        ranks, load = self._replica_set.in_step(self._job), self._load()
        held = Counter(ranks[place] for places in self._replica_set.writer.holders(rows, ranks) for place in places)
        whole = [rank for rank in ranks if held[rank] == rows.count]
        return sorted(whole or free, key=lambda rank: (-held[rank], load[rank], rank))

    def _deal_again(self) -> None:
        here = self._replica_set.in_step(self._job)
        for asked in self._asked:
            for rank in asked.orders.keys() - set(here):
                free = self._free()
                if free:
                    asked.orders = {free[0]: asked.orders[rank]}
                    self._send(asked, asked.orders)


class GroupPass(Pass):
    """Whole batches to the replicas of a group, in turn; all ranks are sent each, and those that report are counted.

    Args:
        job: attached, or about to be.
        replica_set: parts of one model.
        form_again: forms another group after one was lost, or raises; None: `run` raises that one was lost.
        split_fn: as for `Pass`.
    """

    _cuts = True

    def __init__(
        self,
        job: Job,
        replica_set: GroupReplicaSet,
        form_again: Callable[[GroupLost], None] | None = None,
        split_fn: SplitFunction | None = None,
    ) -> None:
        """Register for the workers' answers."""
        super().__init__(job, replica_set, split_fn)
        self._group = replica_set
        self._form_again = form_again

    @property
    def _open(self) -> list[Asked]:
        """Batches that are not answered."""
        return [asked for asked in self._asked if not asked.answers]

    def leave(self, grace_s: float) -> None:
        """Wait for the batches in work, or wake the ranks; see `Pass.leave`."""
        if not self._group.team:
            return
        self._job.interrupts = 0
        try:
            if grace_s and self._group.complete(self._job) and self._job.pump(lambda: not self._open, grace_s):
                return
        except (StopRequested, NobodyLeft) as hurry:  # a second interrupt, or no worker to wait for
            log.info("the batch in work is not waited for: %s", type(hurry).__name__)
        self._give_up()
        self._group.abort(self._job, list(self._group.at), "the pass over the data was given up")
        self._group.retire()

    def _take(self, asked: Asked, rank: int, answer: Answer) -> None:
        asked.came[rank] = answer
        asked.orders.pop(rank, None)
        if len(asked.came) == len(self._group.team):
            asked.answers = [asked.came[member] for member in self._group.team]

    def _mend(self) -> None:
        self._group.check(self._job)

    def _pump(self, until: Callable[[], bool]) -> None:
        while True:
            try:
                return super()._pump(until)
            except GroupLost as lost:
                if self._form_again is None:
                    raise
                self._form_again(lost)
                for asked in self._open:
                    self._ask(asked)

    def _has_room(self) -> bool:
        # A batch goes another way than the commit, and may overtake it: each rank must have said that it applied the last step.
        mesh = self._group.mesh
        return len(self._open) < max(WINDOW, mesh.stages) * mesh.data and self._group.complete(self._job)

    def _deal(self, batch: LoadedBatch) -> None:
        self._asked.append(Asked(batch, 0, {}))
        self._ask(self._asked[-1])

    def _ask(self, asked: Asked) -> None:
        """Ask the group that stands about a batch; answers of one that is gone are for another request."""
        asked.request, asked.ranks, asked.came = self._group.next_request(), set(), {}
        orders = self._orders.shared(asked.request, asked.batch, self._group.mesh)
        asked.orders = dict(zip(self._group.team, orders, strict=True))
        self._send(asked, self._group.team)


def pass_over(
    job: Job,
    replicas: ReplicaSet,
    form_again: Callable[[GroupLost], None] | None = None,
    split_fn: SplitFunction | None = None,
) -> Pass:
    """Return what walks a loader on these replicas; `form_again` and `split_fn` as for `GroupPass`."""
    if isinstance(replicas, GroupReplicaSet):
        return GroupPass(job, replicas, form_again, split_fn)
    return StarPass(job, replicas)
