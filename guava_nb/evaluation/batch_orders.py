"""What workers are asked about the batches of a pass, and the orders that ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from guava_nb.config.mesh import Mesh
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.sample_text import sample_text
from guava_nb.data.split import RowSplitter
from guava_nb.nested import ARRAYS
from guava_nb.protocol.messages import Evaluate, Generated, Message, Predict, Tree
from guava_nb.row_cache.writer import OutgoingBatch, RowWriter, taken_apart
from guava_nb.sync.group_exchange import micro_batch_marks
from guava_nb.sync.step_in_flight import NO_BATCH

__all__ = ["Answer", "BatchOrders", "Order", "Question", "span_text"]

#: A worker's answer, and the bytes that came with it.
Answer = tuple[Message, memoryview]
#: A record that asks, still without its batch, and the batch.
Order = tuple[Evaluate | Predict, OutgoingBatch]

#: Rows of a stand-in; of a single one `squeeze()` would make another shape.
_STAND_IN_ROWS = 2


class Question(Protocol):
    """What is asked of every batch, and what becomes of the answers."""

    def part(self, batch: Any, wants_whole: bool) -> Any:
        """Return the part of a batch that travels; `wants_whole`: the user's preprocess needs all of it at the worker."""

    def for_stage(self, mesh: Mesh, stage: int, piece: Any, wants_whole: bool) -> Any:
        """Return what a stage of a pipeline needs of it.

        Args:
            mesh: of the group.
            stage: number of the stage, from 0.
            piece: of a batch, as `part` gives it.
            wants_whole: as for `part`.
        """

    def message(self, run_id: str, request: int, rows: int, tree: Tree, grouped: bool) -> Evaluate | Predict:
        """Return the record that asks.

        Args:
            run_id: of the replicas.
            request: number of the question.
            rows: samples that count; 0: a stand-in.
            tree: describes the batch in the payload.
            grouped: all ranks of a group are asked.
        """

    def check(self, answer: Message, payload: memoryview, rows: int) -> None:
        """Check an answer on a batch of so many rows as it arrives.

        Raises:
            RemoteProtocolError: it is none to this question.
        """

    def take(self, batch: LoadedBatch, answers: Sequence[Answer]) -> None:
        """Take the answers on a batch, one per worker that was asked; batches come in the loader's order."""

    def heard(self, message: Generated) -> None:
        """Take tokens of an answer that is still in work."""

    verb: str


@dataclass(frozen=True, slots=True)
class BatchOrders:
    """Makes the orders by which workers are asked about batches.

    Attributes:
        question: what is asked.
        run_id: of the replicas.
        wants_whole: the user's preprocess needs whole batches at the worker.
        writer: knows which rows workers hold.
        splitter: cuts the batches.

    Raises:
        ConfigError: a batch cannot be cut.
    """

    question: Question
    run_id: str
    wants_whole: bool
    writer: RowWriter
    splitter: RowSplitter = field(default_factory=RowSplitter)

    def _record(self, request: int, batch: LoadedBatch, rows: int, grouped: bool) -> Evaluate | Predict:
        record = self.question.message(self.run_id, request, rows, NO_BATCH, grouped)
        return msgspec.structs.replace(record, source=batch.source)

    def whole(self, request: int, batch: LoadedBatch) -> Order:
        """Ask one worker about a batch."""
        part: Any = self.question.part(batch.batch, self.wants_whole)
        if not batch.source:
            part = taken_apart(self.writer, part, batch.rows, self.splitter)
        return self._record(request, batch, batch.rows, False), OutgoingBatch([part], single=True)

    def _marks(self, mesh: Mesh, piece: Any, rows: int) -> tuple[bytes, ...]:
        return micro_batch_marks(mesh, self.splitter, [piece], [rows], self.wants_whole)

    def shared(self, request: int, batch: LoadedBatch, mesh: Mesh) -> list[Order]:
        """Ask a group about what the question takes of a batch, in order of rank.

        Replicas take whole batches in turn, as in plain PyTorch: nothing tells whether a loss or outputs of a part are those of
        the whole. The other replicas get its first rows as a stand-in.

        Args:
            request: number of the question.
            batch: of the loader.
            mesh: of the group.
        """
        (whole,) = (stand_in,) = self.splitter.split(batch.batch, [(0, batch.rows)], batch.rows)
        few = min(_STAND_IN_ROWS, batch.rows)
        if mesh.data > 1 and few < batch.rows:
            stand_in, _ = self.splitter.split(batch.batch, [(0, few), (few, batch.rows)], batch.rows)
        orders: list[Order] = []
        for rank in range(mesh.size):
            in_turn = rank // (mesh.stages * mesh.tensor) == batch.index % mesh.data
            rows, held = (batch.rows, batch.rows) if in_turn else (0, few)
            if rank % mesh.tensor == 0:  # the ranks that share layers share one batch
                piece: Any = self.question.part(whole if in_turn else stand_in, self.wants_whole)
                axes = self._marks(mesh, piece, held) if isinstance(piece, ARRAYS) else ()
                if mesh.stages > 1:
                    piece = self.question.for_stage(mesh, mesh.stage_of(rank), piece, self.wants_whole)
                # Inputs alone have become the first of a pair.
                axes = tuple(b"\0" + marks for marks in axes) or self._marks(mesh, piece, held)
                piece = taken_apart(self.writer, piece, held, self.splitter)
                outgoing = OutgoingBatch([piece], single=True)
            record = self._record(request, batch, rows, True)
            orders.append((msgspec.structs.replace(record, axes=axes), outgoing))
        return orders


def span_text(batch: LoadedBatch) -> str:
    """Return " (samples 32 to 63)", or nothing where ids are not known."""
    return f" ({sample_text(batch.sample_ids)})" if batch.sample_ids else ""
