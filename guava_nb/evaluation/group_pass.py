"""A pass on a group: every batch is shared among the replicas, all ranks do their part, the reporting ones count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guava_nb.cluster.job import Job
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter
from guava_nb.evaluation.passes import WINDOW, Answer, Asked, Pass
from guava_nb.protocol.messages import Evaluate, Evaluated, Message, Predict, Predicted
from guava_nb.row_cache.writer import OutgoingBatch, taken_apart
from guava_nb.sync.group_exchange import shares_of
from guava_nb.sync.sharded_replica_set import GroupLost, ShardedReplicaSet

__all__ = ["GroupPass"]


class GroupPass(Pass):
    """Batches to all ranks of a group.

    Args:
        form_again: forms another group after one was lost, or raises; None: whoever runs the pass does that.
    """

    def __init__(
        self, job: Job, replica_set: ShardedReplicaSet, form_again: Callable[[GroupLost], None] | None = None
    ) -> None:
        """No rank has anything to do."""
        super().__init__(job, replica_set)
        self._group = replica_set
        self._form_again = form_again
        self._splitter = RowSplitter()
        self._rounds: dict[int, tuple[int, dict[int, Answer]]] = {}  # request: key of what was asked, answers by worker
        self._outgoing: dict[tuple[int, int], tuple[Evaluate | Predict, OutgoingBatch]] = {}  # by request and worker

    def forget(self) -> None:
        """Take no more answers."""
        super().forget()
        self._rounds.clear()
        self._outgoing.clear()

    def _on_answer(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Evaluated | Predicted)
        key, answers = self._rounds.get(message.request_id, (0, {}))
        if message.run_id != self._group.run_id or key not in self._asked:
            return
        answers[rank] = (message, payload)
        self._outgoing.pop((message.request_id, rank), None)
        if len(answers) == len(self._group.team):
            self._rounds.pop(message.request_id)
            self._asked[key].answers = [answers[member] for member in self._group.team]

    def _is(self, number: int, request: int) -> bool:
        return request in self._rounds and self._rounds[request][0] == number

    def _pump(self, until: Callable[[], bool]) -> None:
        def condition() -> bool:
            self.fold()
            self._group.check(self._job)
            return until()

        while True:
            try:
                self._job.pump(condition)
                return
            except GroupLost as lost:
                if self._form_again is None:
                    raise
                self._form_again(lost)
                self._rounds.clear()  # answers of the group that is gone
                self._outgoing.clear()
                for key, asked in self._asked.items():
                    if not asked.answers:
                        self._ask(key, asked.batch)

    def _has_room(self) -> bool:
        return sum(not asked.answers for asked in self._asked.values()) < WINDOW

    def _deal(self, batch: LoadedBatch) -> None:
        key = self._group.next_request()
        assert self._question is not None
        part = self._question.part(batch.batch, self._treated)
        self._asked[key] = Asked(LoadedBatch(batch.index, part, batch.sample_ids, batch.rows))
        self._ask(key, self._asked[key].batch)

    def _ask(self, key: int, batch: LoadedBatch) -> None:
        assert self._question is not None
        group, mesh, request = self._group, self._group.mesh, self._group.next_request()
        self._rounds[request] = (key, {})
        shares = shares_of([batch], mesh, [1.0] * mesh.data, self._splitter)
        for rank, owner in enumerate(group.team):
            share = shares[rank // (mesh.stages * mesh.tensor)]
            if rank % mesh.tensor == 0:  # the ranks that share layers share one batch
                piece: Any = share.pieces[0]
                if mesh.stages > 1:
                    piece = self._question.for_stage(mesh, mesh.stage_of(rank), piece, self._treated)
                piece = taken_apart(group.writer, piece, max(1, sum(share.rows)), self._splitter)
                outgoing = OutgoingBatch([piece], single=True)
            self._outgoing[request, owner] = (self._record(request, batch, sum(share.rows), True), outgoing)
            self._send(request, owner)

    def _send(self, request: int, rank: int) -> None:
        self._job.cluster.send(rank, *self._group.writer.write(rank, *self._outgoing[request, rank]))

    def _on_wanted(self, rank: int, request: int) -> None:
        if (request, rank) in self._outgoing:
            self._send(request, rank)
