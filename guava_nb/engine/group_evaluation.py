"""Validation on a group: every batch is shared among the replicas, all ranks do their part, the reporting ones count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from guava_nb.data.feed import Feed, LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.engine.evaluation import WINDOW, EvaluationResult, total
from guava_nb.engine.events import Wake
from guava_nb.engine.feeder import Feeder
from guava_nb.engine.flight import NO_BATCH
from guava_nb.engine.group_ensemble import GroupEnsemble
from guava_nb.engine.group_exchange import parts_for, shares_of
from guava_nb.engine.job import Job
from guava_nb.engine.row_writer import Parcel, taken_apart
from guava_nb.protocol.messages import Evaluate, Evaluated, Message

__all__ = ["GroupEvaluation"]


@dataclass(slots=True)
class _Round:
    """One batch on its way: answers by rank, and what each rank got until it answers."""

    answers: dict[int, Evaluated] = field(default_factory=dict)
    parcels: dict[int, tuple[Evaluate, Parcel]] = field(default_factory=dict)


class GroupEvaluation:
    """One pass over a loader. Call `run` inside an attached job whose ensemble stands at the last committed state."""

    def __init__(self, job: Job, ensemble: GroupEnsemble) -> None:
        """Register for the workers' answers."""
        self._job, self._ensemble = job, ensemble
        self._rounds: dict[int, _Round] = {}
        self._splitter = RowSplitter()
        job.on(Evaluated, self._on_evaluated)
        ensemble.writer.on_batch_wanted = self._send

    def _on_evaluated(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Evaluated)
        if message.run_id == self._ensemble.run_id and message.request_id in self._rounds:
            self._rounds[message.request_id].answers[rank] = message
            self._rounds[message.request_id].parcels.pop(rank, None)

    def run(self, feed: Feed) -> EvaluationResult:
        """Evaluate every batch of the loader once.

        Raises:
            GroupLost: a member is gone.
            ConfigError: a batch has no form that the mode can take.
        """
        self._rounds.clear()
        feeder = Feeder(feed.epoch(), 1, WINDOW, lambda: self._job.post(Wake()))
        try:
            while True:
                self._pump(feeder.available)
                group = feeder.take()
                if group is None:
                    break
                if group[0].rows:
                    self._pump(lambda: sum(not self._is_done(r) for r in self._rounds.values()) < WINDOW)
                    self._deal(group)
            self._pump(lambda: all(map(self._is_done, self._rounds.values())))
        finally:
            feeder.close()
        rounds, self._rounds = self._rounds, {}
        return total([round_.answers[rank] for round_ in rounds.values() for rank in self._ensemble.team])

    def _is_done(self, round_: _Round) -> bool:
        return len(round_.answers) == len(self._ensemble.team)

    def _pump(self, until: Callable[[], bool]) -> None:
        def condition() -> bool:
            self._ensemble.check(self._job)
            return until()

        self._job.pump(condition)

    def _deal(self, group: Sequence[LoadedBatch]) -> None:
        ensemble, mesh = self._ensemble, self._ensemble.mesh
        request = ensemble.next_request()
        self._rounds[request] = _Round()
        shares = shares_of(group, mesh, [1.0] * mesh.data, self._splitter)
        for rank, owner in enumerate(ensemble.team):
            share = shares[rank // (mesh.stages * mesh.tensor)]
            if rank % mesh.tensor == 0:  # the ranks that share layers share one batch
                treated = ensemble.spec.preprocess is not None
                part = parts_for(mesh, mesh.stage_of(rank), share.pieces, treated)[0]
                parcel = Parcel(
                    [taken_apart(ensemble.writer, part, max(1, sum(share.rows)), self._splitter)], single=True
                )
            message = Evaluate(ensemble.run_id, request, sum(share.rows), NO_BATCH, True)
            self._rounds[request].parcels[owner] = (message, parcel)
            self._send(owner, request)

    def _send(self, rank: int, request: int) -> None:
        """Send a rank its part; again, if it lacks rows that it was thought to hold."""
        round_ = self._rounds.get(request)
        if round_ is not None and rank in round_.parcels:
            self._job.cluster.send(rank, *self._ensemble.writer.write(rank, *round_.parcels[rank]))
