"""One pass over a loader without training: batches dealt to the workers, answers taken in the loader's order.

Validation and prediction are two `Question`s; what differs is what travels and what is done with the answers. Whoever is
lost, each batch counts once: an answer is taken the first time it comes, and a batch without one is asked again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from guava_nb.cluster.job import Job
from guava_nb.cluster.job_events import Wake
from guava_nb.config.mesh import Mesh
from guava_nb.data.loader_feed import Feed, LoadedBatch
from guava_nb.data.rows import Rows
from guava_nb.data.split import RowSplitter
from guava_nb.errors import WorkerLost
from guava_nb.protocol.messages import Evaluate, Evaluated, Message, Predict, Predicted, Tree
from guava_nb.row_cache.writer import OutgoingBatch, RowSlice
from guava_nb.sync.batch_feeder import Feeder
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.step_in_flight import NO_BATCH

__all__ = ["WINDOW", "Answer", "Asked", "Pass", "Progress", "Question", "StarPass", "span_text"]

#: Batches that a worker holds at once: one in work, one waiting, so that the wire and the device overlap.
WINDOW = 2
#: Batches per worker that may be answered while an earlier one is not: what a slow worker makes the hub keep.
AHEAD = 4
#: Seconds between two reports of progress.
PROGRESS_S = 0.25

#: A worker's answer, and the bytes that came with it.
Answer = tuple[Message, memoryview]
#: Takes samples done, and how many there are (None: nobody knows).
Progress = Callable[[int, int | None], None]


class Question(Protocol):
    """What is asked of every batch, and what becomes of the answers."""

    def part(self, batch: Any, treated: bool) -> Any:
        """Return what of a batch travels; `treated`: a function of the user's shall see all of it at the worker."""

    def for_stage(self, mesh: Mesh, stage: int, piece: Any, treated: bool) -> Any:
        """Return what a stage of a pipeline needs of it."""

    def message(self, run_id: str, request: int, rows: int, tree: Tree, grouped: bool) -> Evaluate | Predict:
        """Return the record that asks."""

    def take(self, batch: LoadedBatch, answers: Sequence[Answer]) -> None:
        """Take the answers on a batch, one per share, in the order of its rows; batches come in the loader's order."""

    verb: str


@dataclass(slots=True)
class Asked:
    """One batch that was asked about; the batch itself is kept while it may have to be asked again."""

    batch: LoadedBatch
    answers: Sequence[Answer] = ()


class Pass(ABC):
    """What passes over replicas and over groups have in common.

    Args:
        job: attached, or about to be.
        replica_set: stands at the last committed state when `run` is called.

    Attributes:
        before_batch: called with each batch before it is sent; may raise, and the pass is given up.
    """

    def __init__(self, job: Job, replica_set: ReplicaSet) -> None:
        """Register for the workers' answers."""
        self._job, self._replica_set = job, replica_set
        self._asked: dict[int, Asked] = {}  # in the loader's order
        self._question: Question | None = None
        self._progress: Progress = lambda done, total: None
        self._done, self._shown = 0, 0.0
        self._total: int | None = None
        self.before_batch: Callable[[LoadedBatch], None] = lambda batch: None
        job.on(Evaluated, self._on_answer)
        job.on(Predicted, self._on_answer)
        job.about_request = self._about
        replica_set.writer.on_batch_wanted = self._on_wanted

    def run(self, feed: Feed, question: Question, *, skip_batches: int = 0, progress: Progress | None = None) -> None:
        """Ask about every batch of the loader's next epoch, each answered once.

        Args:
            skip_batches: of the loader, that were done before.
            progress: called a few times a second, with the samples of this call.

        Raises:
            NobodyLeft: the last worker is gone.
            GroupLost: a member of a group is gone.
            RemoteError: the user's code raised on a worker.
            ConfigError: a batch or an output has no form that this can take.
        """
        self._question, self._progress = question, progress or self._progress
        self._done, self._total = 0, feed.samples_per_epoch
        self._asked.clear()
        feeder = Feeder(feed.epoch(skip_batches), 1, WINDOW, lambda: self._job.post(Wake()))
        try:
            while True:
                self._pump(feeder.available)
                group = feeder.take()
                if group is None:
                    break
                if group[0].rows:
                    self._pump(self._has_room)
                    self.before_batch(group[0])
                    self._deal(group[0])
            self._pump(lambda: not self._asked)
            self._progress(self._done, self._total)  # whatever was shown last
        finally:
            feeder.close()

    @property
    def outstanding(self) -> bool:
        """Whether workers still have something of this pass to do."""
        return any(not asked.answers for asked in self._asked.values())

    def forget(self) -> None:
        """Take no more answers."""
        self._asked.clear()

    def fold(self) -> None:
        """Take what is answered, as far as everything before it is."""
        assert self._question is not None
        while self._asked:
            request, asked = next(iter(self._asked.items()))
            if not asked.answers:
                break
            del self._asked[request]
            self._question.take(asked.batch, asked.answers)
            self._done += asked.batch.rows
        now = time.monotonic()
        if now >= self._shown + PROGRESS_S:
            self._shown = now
            self._progress(self._done, self._total)

    def _about(self, request: int) -> str | None:
        """Say what a request was about; None: it is none of this pass."""
        for number, asked in self._asked.items():
            if self._is(number, request):
                assert self._question is not None
                return f"while {self._question.verb} batch {asked.batch.index} of the loader{span_text(asked.batch)}"
        return None

    def _is(self, number: int, request: int) -> bool:
        return number == request

    @property
    def _treated(self) -> bool:
        return self._replica_set.spec.preprocess is not None

    def _record(self, request: int, batch: LoadedBatch, rows: int, grouped: bool = False) -> Evaluate | Predict:
        """The record that asks, still without its batch."""
        assert self._question is not None
        record = self._question.message(self._replica_set.run_id, request, rows, NO_BATCH, grouped)
        return msgspec.structs.replace(record, source=batch.source)

    @abstractmethod
    def _on_wanted(self, rank: int, request: int) -> None:
        """Send a worker a batch again: it lacks rows that it was thought to hold."""

    @abstractmethod
    def _on_answer(self, rank: int, message: Message, payload: memoryview) -> None:
        """Take an answer, if it is one to this pass and the first."""

    @abstractmethod
    def _has_room(self) -> bool:
        """Whether another batch may be dealt."""

    @abstractmethod
    def _deal(self, batch: LoadedBatch) -> None:
        """Send a batch to whoever does it."""

    @abstractmethod
    def _pump(self, until: Callable[[], bool]) -> None:
        """Wait; meanwhile take answers, and deal again what was lost."""


def span_text(batch: LoadedBatch) -> str:
    """Return " (samples 32 to 63)", or nothing where ids are not known."""
    ids = batch.sample_ids
    return f" (samples {ids[0]} to {ids[-1]})" if len(ids) > 1 else f" (sample {ids[0]})" if ids else ""


class StarPass(Pass):
    """Whole batches to whole replicas, each to the worker that has least to do."""

    def __init__(self, job: Job, replica_set: ReplicaSet) -> None:
        """Nobody has anything to do."""
        super().__init__(job, replica_set)
        self._kept: dict[int, tuple[Evaluate | Predict, OutgoingBatch]] = {}  # until it is answered
        self._splitter = RowSplitter()
        self._holder: dict[int, int] = {}

    def forget(self) -> None:
        """Take no more answers."""
        super().forget()
        self._kept.clear()
        self._holder.clear()

    def run(self, feed: Feed, question: Question, *, skip_batches: int = 0, progress: Progress | None = None) -> None:
        """Ask about every batch, see `Pass.run`."""
        self._kept.clear()
        self._holder.clear()
        try:
            super().run(feed, question, skip_batches=skip_batches, progress=progress)
        finally:
            self.forget()

    def _on_answer(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Evaluated | Predicted)
        # Answers come once or, after a loss, twice with the same content: the first one counts.
        if message.run_id == self._replica_set.run_id and self._kept.pop(message.request_id, None) is not None:
            self._asked[message.request_id].answers = [(message, payload)]
            self._holder.pop(message.request_id, None)

    def _pump(self, until: Callable[[], bool]) -> None:
        def condition() -> bool:
            self.fold()
            self._deal_again()
            self._check()
            return until()

        self._job.pump(condition)

    def _check(self) -> None:
        """Nobody would ever answer if those that are here had all dropped the run."""
        self._job.check()
        at, step = self._replica_set.at, self._replica_set.step
        if not any(at.get(rank) == step for rank in self._job.ready | self._job.suspects):
            raise WorkerLost("the workers that are here have dropped the model after an error; %guava_log tells which")

    def _has_room(self) -> bool:
        here = self._replica_set.in_step(self._job)
        return len(self._asked) < AHEAD * len(here) and bool(self._free())

    def _free(self) -> list[int]:
        """Ranks that can take a batch, those with least to do first."""
        load = dict.fromkeys(self._replica_set.in_step(self._job), 0)
        for rank in self._holder.values():
            if rank in load:
                load[rank] += 1
        return sorted((rank for rank in load if load[rank] < WINDOW), key=lambda rank: (load[rank], rank))

    def _deal(self, batch: LoadedBatch) -> None:
        assert self._question is not None
        request = self._replica_set.next_request()
        part, free = self._question.part(batch.batch, self._treated), self._free()
        apart = part if batch.source else self._replica_set.writer.apart(part, batch.rows, self._splitter)
        if isinstance(apart, Rows):
            free = self._by_rows(apart, free)
            part = RowSlice(apart, range(apart.count))
        self._kept[request] = (self._record(request, batch, batch.rows), OutgoingBatch([part], single=True))
        self._asked[request] = Asked(LoadedBatch(batch.index, None, batch.sample_ids, batch.rows))
        self._send(request, free[0])

    def _by_rows(self, rows: Rows, free: list[int]) -> list[int]:
        """Who holds most of a batch comes first; who holds all of it takes it whether or not it has more to do."""
        ranks, load = self._replica_set.in_step(self._job), Counter(self._holder.values())
        held = Counter(ranks[place] for places in self._replica_set.writer.holders(rows, ranks) for place in places)
        whole = [rank for rank in ranks if held[rank] == rows.count]
        return sorted(whole or free, key=lambda rank: (-held[rank], load[rank], rank))

    def _send(self, request: int, rank: int) -> None:
        self._holder[request] = rank
        self._job.cluster.send(rank, *self._replica_set.writer.write(rank, *self._kept[request]))

    def _on_wanted(self, rank: int, request: int) -> None:
        if self._holder.get(request) == rank:
            self._send(request, rank)

    def _deal_again(self) -> None:
        here = self._replica_set.in_step(self._job)
        for request in [r for r, rank in self._holder.items() if rank not in here]:
            free = self._free()
            if free:
                self._send(request, free[0])
