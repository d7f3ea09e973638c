"""What travels of a batch to which worker, at the orchestrator: everything, or the rows that the worker does not hold.

`WorkerCaches` say which worker holds what, as long as the session lives; a `RowWriter` serves one run. Its counterpart
at the worker is `guava_nb.row_cache.reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from guava_nb.data.codec import pack
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.loader_wrappers import Unread
from guava_nb.data.rows import KEY_BYTES, NotSeparable, Rows, split_keys
from guava_nb.data.split import RowSplitter
from guava_nb.errors import ConfigError, RemoteProtocolError
from guava_nb.protocol.messages import (
    BatchShard,
    CachedRows,
    CacheHeld,
    Evaluate,
    ListRows,
    Message,
    Predict,
    RowList,
    RowsWanted,
    RunSpec,
    Tree,
)
from guava_nb.row_cache.policy import MAX_ROWS, SENT, CachePolicy, Order, WorkerCaches, cost_function

__all__ = ["OutgoingBatch", "RowSlice", "RowWriter", "taken_apart"]

Buffers = Sequence[memoryview]
_Order = TypeVar("_Order", bound=BatchShard | Evaluate | Predict)
_Record = TypeVar("_Record", bound=Message)


class Seats(Protocol):
    """As much of a roster as a writer needs."""

    def alive(self) -> list[int]:
        """Return the ranks whose seat is held."""


class Workers(Protocol):
    """As much of a cluster as a writer needs."""

    @property
    def roster(self) -> Seats:
        """All workers of the session."""

    def name(self, rank: int) -> str:
        """Return a worker's name."""

    def send(self, rank: int, message: Message, buffers: Buffers = ()) -> bool:
        """Queue a message for a worker."""


class Waiting(Protocol):
    """As much of a job as a writer needs."""

    ready: set[int]
    suspects: set[int]

    @property
    def cluster(self) -> Workers:
        """The workers whose messages the job gets."""

    def on(self, record: type[_Record], handler: Callable[[int, _Record, memoryview], None]) -> None:
        """Handle messages of this type."""

    def pump(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Handle events until the condition holds."""


#: Bytes of a row in a `RowList`: its key and its size.
_ROW_BYTES = KEY_BYTES + 4
#: Different reasons for which rows were wanted again that a person is told.
_MOST_TOLD = 32
#: Samples seen again after which it is judged whether they change between epochs.
_JUDGED = 32


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Some rows of a batch that was taken apart."""

    rows: Rows
    indices: Sequence[int]


class _KnownRows(Rows):
    """Rows of a batch that was not loaded, because each of them is held by a worker."""

    def __init__(self, unread: Unread, known: Sequence[tuple[bytes, int]], form: _Form, splitter: RowSplitter) -> None:
        self.count = len(unread.ids)
        self.keys, self.sizes = [key for key, _ in known], [size for _, size in known]
        self.marks, self.slots = form.marks, form.slots
        self._unread, self._form, self._splitter = unread, form, splitter

    @cached_property
    def _loaded(self) -> Rows:
        rows = Rows(self._unread.read(), self.count, self._splitter)
        for sample, before, now in zip(self._unread.ids, self.keys, rows.keys, strict=True):
            if before != now:
                raise ConfigError(
                    f"sample {sample} is not what it was in an earlier epoch, and cache_static=True said that samples do not "
                    "change: leave it out, then samples that changed are found and sent anew"
                )
        return rows

    def only(self, indices: Sequence[int]) -> Any:
        return self._loaded.only(indices) if indices else self._form.empty


@dataclass(frozen=True, slots=True)
class _Form:
    """A batch without its rows; where all batches are alike in this, one need not be loaded to know it."""

    marks: bytes
    slots: tuple[int, ...]
    empty: Any
    packed: tuple[Tree, bytes]

    @classmethod
    def of(cls, rows: Rows) -> _Form:
        empty = rows.only([])
        tree, buffers = pack(empty)
        return cls(rows.marks, rows.slots, empty, (tree, b"".join(buffers)))

    def is_like(self, other: _Form) -> bool:
        return (self.marks, self.slots, self.packed) == (other.marks, other.slots, other.packed)


class OutgoingBatch:
    """What one worker is to get: loader batches, parts of them, or `RowSlice`s; kept until it is sure that it was used.

    Args:
        parts: a shard's list of parts, or the one batch of a validation.
        single: the record holds the batch itself and not a list.
    """

    def __init__(self, parts: Sequence[Any], single: bool = False) -> None:
        """Keep the parts; nothing is copied."""
        self.parts, self.single = parts, single

    @cached_property
    def packed(self) -> tuple[Tree, Buffers]:
        """All of it, packed once for all receivers."""
        return pack(self.parts[0] if self.single else self.parts)

    @property
    def nbytes(self) -> int:
        """About what the batches take at the worker, whether they travel or are put together there."""
        if self.is_whole:
            return sum(buffer.nbytes for buffer in self.packed[1])
        pieces = [part for part in self.parts if isinstance(part, RowSlice)]
        return sum(piece.rows.sizes[i] for piece in pieces for i in piece.indices)

    @property
    def is_whole(self) -> bool:
        """Whether no part of it was taken apart."""
        return not any(isinstance(part, RowSlice) for part in self.parts)


class RowWriter:
    """Writes batches for workers.

    Args:
        spec: of the run.
        caches: what each worker of the session holds; kept up to date.
        notice: tells a person what a run has to say.

    Attributes:
        on_shard_wanted: called with (rank, step, shard) when a worker misses rows of a shard.
        on_batch_wanted: called with (rank, request_id) when one misses rows of a validation batch.
    """

    _workers: Workers  # known from `attach` on

    def __init__(self, spec: RunSpec, caches: WorkerCaches, notice: Callable[[str], None]) -> None:
        """Write for the workers of a session."""
        self._spec, self._caches, self._notice = spec, caches, notice
        self._listed: set[int] = set()
        self._run_id = ""
        self._told: set[str] = set()
        self._seen: dict[int, tuple[bytes, int]] = {}
        self._contents: set[bytes] = set()  # of all that was seen
        self._form: _Form | None = None
        self._forms_differ = False
        self._static = False
        self._again = self._changed = 0
        self.on_shard_wanted: Callable[[int, int, int], None] = lambda rank, step, shard: None
        self.on_batch_wanted: Callable[[int, int], None] = lambda rank, request: None

    # ------------------------------------------------------------------------------------------------ who holds what

    def attach(self, job: Waiting, run_id: str) -> None:
        """Handle the workers' messages about rows in that job."""
        self._run_id, self._workers = run_id, job.cluster
        job.on(CacheHeld, self._on_held)
        job.on(RowList, self._on_list)
        job.on(RowsWanted, self._on_wanted)
        self.next_pass()

    def expect(self, ranks: Iterable[int]) -> None:
        """Note that these workers are told to build the run, and will say what they hold."""
        self._listed.difference_update(ranks)

    def settle(self, job: Waiting, ranks: Iterable[int]) -> None:
        """Wait until it is known what these workers hold; one that is away meanwhile counts as holding nothing."""
        for gone in self._caches.keys() - set(job.cluster.roster.alive()):
            del self._caches[gone]
        if self._spec.cache is not None:
            asked = set(ranks)
            job.pump(lambda: all(r in self._listed for r in asked & job.ready))

    def _on_held(self, rank: int, message: CacheHeld, payload: memoryview) -> None:
        if message.run_id != self._run_id or self._spec.cache is None or rank in self._listed:
            return  # it was not asked, or has answered
        if message.count < 0 or len(message.digest) != KEY_BYTES:
            raise RemoteProtocolError(f"it tells of {message.count} rows with a digest of {len(message.digest)} bytes")
        known = self._caches.get(rank)
        if message.problem:
            self._caches.pop(rank, None)
            self._listed.add(rank)
            self._notice(f"{self._workers.name(rank)} keeps no samples: {message.problem}")
            return
        if known is None or (len(known), known.digest()) != (message.count, message.digest):
            known = self._caches[rank] = CachePolicy(message.budget_bytes, cost_function(self._spec.cache.mode))
            if message.count:
                self._workers.send(rank, ListRows(message.run_id))
                return
        known.budget_bytes = message.budget_bytes
        self._listed.add(rank)

    def _on_list(self, rank: int, message: RowList, payload: memoryview) -> None:
        if message.run_id != self._run_id or rank not in self._caches or rank in self._listed:
            return
        if len(payload) % _ROW_BYTES or len(payload) > MAX_ROWS * _ROW_BYTES:
            raise RemoteProtocolError(f"it has {len(payload)} bytes, which are no list of at most {MAX_ROWS} rows")
        listed = np.frombuffer(payload, np.dtype([("key", f"V{KEY_BYTES}"), ("size", "<u4")]))
        sizes = {bytes(key): int(size) for key, size in zip(listed["key"], listed["size"], strict=True)}
        self._caches[rank].replace(sizes)
        self._listed.add(rank)

    def _on_wanted(self, rank: int, message: RowsWanted, payload: memoryview) -> None:
        if (held := self._caches.get(rank)) is not None:
            held.forget(split_keys(message.keys))
        if message.run_id != self._run_id:
            return
        if message.reason and len(self._told) < _MOST_TOLD:
            self._tell(message.reason, f"{self._workers.name(rank)}: ")
        if message.shard >= 0:
            self.on_shard_wanted(rank, message.step, message.shard)
        elif message.request_id:
            self.on_batch_wanted(rank, message.request_id)

    def next_pass(self) -> None:
        """Begin another pass over the data: rows that two passes have not used may make room."""
        for held in self._caches.values():
            held.next_pass()

    # ------------------------------------------------------------------------------------------------------- batches

    def apart(self, batch: Any, rows: int, splitter: RowSplitter, ids: Sequence[int] = ()) -> Any:
        """Take a batch apart where workers keep rows; returns `Rows`, or the batch itself if it has to travel whole.

        Args:
            ids: of the samples, one per row, where it is to be found out whether they change between epochs.
        """
        if self._spec.cache is None or not rows:
            return batch
        if isinstance(batch, Unread):
            if self._form is not None and not self._forms_differ:
                return _KnownRows(batch, [self._seen[sample] for sample in batch.ids], self._form, splitter)
            batch = batch.read()
        try:
            made = Rows(batch, rows, splitter)
        except NotSeparable as reason:
            self._tell(f"batches are sent whole and nothing of them is kept by the workers: {reason}")
            return batch
        if len(ids) == rows:
            self._watch(ids, made)
        return made

    def leave_unread(self, feed: LoaderFeed) -> None:
        """Leave batches of this feed unread of which every row is held: its user said that samples do not change.

        Raises:
            ConfigError: its loader has no indices.
        """
        feed.leave_out(self._is_held)
        self._static = True

    def _is_held(self, ids: Sequence[int]) -> bool:
        """Whether a batch of a data set that does not change need not be loaded; asked on the loader's thread."""
        if self._form is None or self._forms_differ:
            return False
        held = list(self._caches.values())
        return all((known := self._seen.get(i)) is not None and any(known[0] in of for of in held) for i in ids)

    def _tell(self, sentence: str, who: str = "") -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._notice(who + sentence)

    def _watch(self, ids: Sequence[int], rows: Rows) -> None:
        if self._static:
            form = _Form.of(rows)
            self._form = self._form or form
            self._forms_differ |= not self._form.is_like(form)
        for sample, key, size in zip(ids, rows.keys, rows.sizes, strict=True):
            before = self._seen.get(sample)
            if before is not None:
                self._again += 1
                self._changed += key not in self._contents  # those of an iterable come under other numbers
            if before is not None or len(self._seen) < MAX_ROWS:
                self._seen[sample] = (key, size)
                self._contents.add(key)
        if self._again >= _JUDGED and 2 * self._changed > self._again:
            self._tell(
                "the samples change between epochs (is there augmentation in the data set?): those that changed are sent anew, "
                "nothing old is used. So the cache saves nothing: switch it off, or augment on the GPU side with augment="
            )

    def holders(self, rows: Rows, team: Sequence[int]) -> list[list[int]]:
        """Return for each row the places in the team of the workers that hold it."""
        held = [self._caches.get(rank) for rank in team]
        return [[place for place, of in enumerate(held) if of is not None and key in of] for key in rows.keys]

    def write(self, rank: int, message: _Order, outgoing: OutgoingBatch) -> tuple[_Order, Buffers]:
        """Complete a record for a worker, and note what it holds once it has it.

        Returns:
            The record with its tree, and the buffers of its payload.
        """
        if outgoing.is_whole:
            tree, buffers = outgoing.packed
            return msgspec.structs.replace(message, batch=tree), buffers
        written = [self._write_part(rank, part) for part in outgoing.parts]
        parts = [part for part, _ in written]
        tree, buffers = pack(parts[0] if outgoing.single else parts)
        return msgspec.structs.replace(message, batch=tree, cached=tuple(rows for _, rows in written)), buffers

    def _write_part(self, rank: int, part: Any) -> tuple[Any, CachedRows]:
        if not isinstance(part, RowSlice):
            return part, CachedRows()
        rows, indices = part.rows, part.indices
        keys = [rows.keys[i] for i in indices]
        held = self._caches.get(rank)
        order = (
            Order(bytes([SENT]) * len(keys), ()) if held is None else held.order(keys, [rows.sizes[i] for i in indices])
        )
        sent = rows.only([indices[place] for place in order.to_send()])
        return sent, CachedRows(b"".join(keys), order.states, rows.marks, rows.slots, b"".join(order.drop))


def taken_apart(writer: RowWriter, part: Any, rows: int, splitter: RowSplitter) -> Any:
    """Return a part as a `RowSlice` of all its rows where its worker keeps rows, else the part itself.

    Args:
        writer: of the run.
        part: of a batch.
        rows: samples in it.
        splitter: knows along which axes it may be cut.
    """
    apart = writer.apart(part, rows, splitter)
    return RowSlice(apart, range(rows)) if isinstance(apart, Rows) else apart
