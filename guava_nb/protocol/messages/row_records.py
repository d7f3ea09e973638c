"""Rows that a worker keeps, and data sets that lie at the workers."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from guava_nb.protocol.messages.run_records import Cell, DataSpec
from guava_nb.protocol.messages.wire_types import Channel, FlatTensor, Message

__all__ = ["AskData", "CacheHeld", "CachedRows", "DataFacts", "ListRows", "RowList", "RowsWanted"]


class CachedRows(msgspec.Struct, frozen=True, array_like=True):
    """How the rows of one part are put together from what came and what the worker holds.

    What came is the part with the rows that were sent, and all that is not per row.

    Attributes:
        keys: 16 bytes per row, BLAKE2b of the row's entry (`guava_nb.data.rows`); empty: the part came whole.
        states: a byte per row: 0 held by the worker, or the same as an earlier row; 1 sent; 2 sent, and to be kept.
        marks: a byte per tensor, array, list or tuple of the part, depth first: 1 if it has one entry per row.
        slots: for each of those marked 1 which leaf of an entry it is; a tensor that occurs twice is one leaf.
        drop: keys of rows to be dropped first, 16 bytes each.
    """

    keys: bytes = b""
    states: bytes = b""
    marks: bytes = b""
    slots: tuple[int, ...] = ()
    drop: bytes = b""


class CacheHeld(Message, frozen=True):
    """Worker to orchestrator, after `Prepare` of a run with a cache: what I hold, in short.

    Attributes:
        count: rows.
        digest: exclusive or of their keys, 16 bytes.
        budget_bytes: what I will keep at most; less than asked where there is no room.
        problem: why nothing can be kept here, in a sentence; empty if all is well.
    """

    NUMBER: ClassVar[int] = 92

    run_id: str
    count: int
    digest: bytes
    budget_bytes: int
    problem: str = ""


class ListRows(Message, frozen=True):
    """Orchestrator to worker: I believe otherwise; list the rows that you hold."""

    NUMBER: ClassVar[int] = 93

    run_id: str


class RowList(Message, frozen=True):
    """Worker to orchestrator: 20 bytes per row in the payload: its key, and the bytes of its entry as uint32."""

    NUMBER: ClassVar[int] = 94
    CHANNEL: ClassVar[Channel] = Channel.CHECKPOINT

    run_id: str
    tensor: FlatTensor


class RowsWanted(Message, frozen=True, kw_only=True):
    """Worker to orchestrator: I do not hold these rows (any more).

    Attributes:
        keys: 16 bytes each.
        step, shard: the shard that waits for them, to be sent again; -1: none.
        request_id: the `Evaluate` that waits for them; 0: none.
        reason: why, where it is worth a sentence to a person.
    """

    NUMBER: ClassVar[int] = 95

    run_id: str
    keys: bytes
    step: int = -1
    shard: int = -1
    request_id: int = 0
    reason: str = ""


class AskData(Message, frozen=True):
    """Orchestrator to worker: build these data sets of these cells, and say what they are like."""

    NUMBER: ClassVar[int] = 96

    request_id: int
    cells: tuple[Cell, ...]
    data: tuple[DataSpec, ...]


class DataFacts(Message, frozen=True):
    """Worker to orchestrator: the answer to `AskData`: the same records with length and probe, or why not."""

    NUMBER: ClassVar[int] = 97

    request_id: int
    data: tuple[DataSpec, ...]
    missing_module: str = ""
    problem: str = ""
    traceback: str = ""
