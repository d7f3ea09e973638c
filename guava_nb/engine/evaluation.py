"""Validation: batches dealt to the workers, sums put together in batch order, each sample once whoever is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from guava_nb.data.feed import Feed, LoadedBatch
from guava_nb.data.rows import Rows
from guava_nb.data.split import RowSplitter
from guava_nb.engine.ensemble import Ensemble
from guava_nb.engine.events import Wake
from guava_nb.engine.feeder import Feeder
from guava_nb.engine.flight import NO_BATCH
from guava_nb.engine.job import Job
from guava_nb.engine.row_writer import Parcel, Piece
from guava_nb.protocol.messages import Evaluate, Evaluated, Message

__all__ = ["WINDOW", "Evaluation", "EvaluationResult", "total"]

#: Batches that a worker holds at once: one in work, one waiting, so that the wire and the device overlap.
WINDOW = 2


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Mean loss, accuracy (None where it has no meaning) and number of samples."""

    loss: float
    accuracy: float | None
    samples: int

    def record(self) -> dict[str, float | int | None]:
        """Return it as plain data."""
        return {"loss": self.loss, "accuracy": self.accuracy, "samples": self.samples}


class Evaluation:
    """One pass over a loader. Call `run` inside an attached job whose ensemble holds the last committed state."""

    def __init__(self, job: Job, ensemble: Ensemble) -> None:
        """Register for the workers' answers."""
        self._job = job
        self._ensemble = ensemble
        self._asked: dict[int, tuple[Evaluate, Parcel]] = {}
        self._splitter = RowSplitter()
        self._holder: dict[int, int] = {}
        self._answers: dict[int, Evaluated] = {}
        job.on(Evaluated, self._on_evaluated)
        ensemble.writer.on_batch_wanted = self._on_wanted

    def _on_wanted(self, rank: int, request: int) -> None:
        """A worker lacks rows of a batch that it was thought to hold."""
        if self._holder.get(request) == rank:
            self._send(request, rank)

    def _on_evaluated(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Evaluated)
        if message.run_id == self._ensemble.run_id and message.request_id in self._asked:
            # Answers come once or, after a loss, twice with the same value: the first one counts.
            self._answers.setdefault(message.request_id, message)
            self._asked.pop(message.request_id)
            self._holder.pop(message.request_id, None)

    def run(self, feed: Feed) -> EvaluationResult:
        """Evaluate every batch of the loader once.

        Raises:
            NobodyLeft: the last worker is gone.
        """
        feeder = Feeder(feed.epoch(), 1, WINDOW, lambda: self._job.post(Wake()))
        requests: list[int] = []
        try:
            while True:
                self._pump(feeder.available)
                group = feeder.take()
                if group is None:
                    break
                if not group[0].rows:
                    continue
                self._pump(lambda: bool(self._free()))
                requests.append(self._ensemble.next_request())
                self._deal(requests[-1], group[0])
            self._pump(lambda: not self._asked)
        finally:
            feeder.close()
        return total([self._answers.pop(request) for request in requests])

    def _pump(self, until: Callable[[], bool]) -> None:
        def condition() -> bool:
            self._deal_again()
            return until()

        self._job.pump(condition)

    def _free(self) -> list[int]:
        """Ranks that can take a batch, those with least to do first."""
        load = dict.fromkeys(self._ensemble.in_step(self._job), 0)
        for rank in self._holder.values():
            if rank in load:
                load[rank] += 1
        return sorted((rank for rank in load if load[rank] < WINDOW), key=lambda rank: (load[rank], rank))

    def _deal(self, request: int, batch: LoadedBatch) -> None:
        part = self._ensemble.writer.apart(batch.batch, batch.rows, self._splitter)
        free = self._free()
        if isinstance(part, Rows):
            free = self._by_rows(part, free)
            part = Piece(part, range(part.count))
        message = Evaluate(self._ensemble.run_id, request, batch.rows, NO_BATCH, source=batch.source)
        self._asked[request] = (message, Parcel([part], single=True))
        self._send(request, free[0])

    def _by_rows(self, rows: Rows, free: list[int]) -> list[int]:
        """Who holds most of a batch comes first; who holds all of it takes it whether or not it has more to do."""
        ranks = self._ensemble.in_step(self._job)
        held = Counter(ranks[place] for places in self._ensemble.writer.holders(rows, ranks) for place in places)
        whole = [rank for rank in ranks if held[rank] == rows.count]
        return sorted(whole or free, key=lambda rank: (-held[rank], self._load(rank), rank))

    def _load(self, rank: int) -> int:
        return sum(holder == rank for holder in self._holder.values())

    def _send(self, request: int, rank: int) -> None:
        self._holder[request] = rank
        self._job.cluster.send(rank, *self._ensemble.writer.write(rank, *self._asked[request]))

    def _deal_again(self) -> None:
        for request in [r for r, rank in self._holder.items() if rank not in self._job.ready]:
            free = self._free()
            if free:
                self._send(request, free[0])


def total(answers: Sequence[Evaluated]) -> EvaluationResult:
    """Add up the sums of all batches, in the order given."""
    count = sum(answer.count for answer in answers)
    rows = sum(answer.rows for answer in answers)
    correct = [answer.correct for answer in answers]
    known = [c for c in correct if c is not None]
    return EvaluationResult(
        loss=sum(answer.loss_sum for answer in answers) / count if count else float("nan"),
        accuracy=sum(known) / rows if rows and len(known) == len(correct) else None,
        samples=rows,
    )
