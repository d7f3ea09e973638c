"""Batches at a worker: whole ones as they came, others put together of rows that came and rows that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from guava_nb.data.codec import Resolve, unpack
from guava_nb.data.rows import Received, split_keys
from guava_nb.errors import RemoteProtocolError
from guava_nb.protocol.messages import (
    BatchShard,
    CachedRows,
    CacheHeld,
    CacheSpec,
    Evaluate,
    FlatTensor,
    Message,
    Predict,
    RowList,
    RowsWanted,
)
from guava_nb.row_cache.policy import HELD, KEEP, digest_of
from guava_nb.row_cache.store import RowStore, open_store

__all__ = ["Load", "RowReader"]

Send = Callable[[Message, Sequence[memoryview]], None]
#: Gives the batch, or the list of parts of a shard; raises what is wrong with it.
Load = Callable[[], Any]

_DAMAGED = "rows that were kept on disk are missing or damaged (another program, or a full or failing disk); they are sent again"


class RowReader:
    """One worker's rows, over all its runs, and the batches made with them."""

    def __init__(self, send: Send) -> None:
        """Hold nothing."""
        self._send = send
        self._spec: CacheSpec | None = None
        self._store: RowStore | None = None

    def open(self, run_id: str, spec: CacheSpec | None) -> None:
        """Open the store that a run asks for, and report what it holds. Without a cache the store stays for later runs."""
        if spec is None:
            return
        problem = ""
        if self._store is None or self._spec != spec:
            self.close()
            try:
                self._store, self._spec = open_store(spec.mode, spec.budget_bytes, spec.directory), spec
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        keys = list(self._store.sizes()) if self._store is not None else []
        budget = self._store.budget_bytes if self._store is not None else 0
        self._send(CacheHeld(run_id, len(keys), digest_of(keys), budget, problem), ())

    def close(self) -> None:
        """Let go of the store; what is on disk stays there."""
        if self._store is not None:
            self._store.close()
        self._store = self._spec = None

    def list_rows(self, run_id: str) -> None:
        """Report every row that is held."""
        sizes = self._store.sizes() if self._store is not None else {}
        listed = np.empty(len(sizes), np.dtype([("key", "V16"), ("size", "<u4")]))
        listed["key"] = np.frombuffer(b"".join(sizes), "V16")
        listed["size"] = list(sizes.values())
        raw = memoryview(listed.tobytes())
        self._send(RowList(run_id, FlatTensor("uint8", raw.nbytes)), [raw] if raw.nbytes else [])

    def read(self, message: BatchShard | Evaluate | Predict, payload: memoryview, resolve: Resolve) -> Load | None:
        """Take a batch in, at the moment it comes: orders about rows hold in the order in which they were given.

        Returns:
            What gives the batch. None: rows are lacking; the batch will come again.
        """
        if not message.cached:
            return lambda: unpack(message.batch, payload, resolve)
        lacking: list[bytes] = []
        try:
            batch = self._put_together(message, payload, resolve, lacking)
        except Exception as error:  # a class that is unknown here, say: it is told where the batch is used
            return _raises(error)
        if lacking:
            self._ask(message, lacking)
            return None
        return lambda: batch

    def _ask(self, message: BatchShard | Evaluate | Predict, keys: Sequence[bytes]) -> None:
        joined = b"".join(keys)
        on_disk = self._spec is not None and self._spec.mode == "disk"
        reason = _DAMAGED if on_disk else ""
        if isinstance(message, BatchShard):
            self._send(
                RowsWanted(run_id=message.run_id, keys=joined, step=message.step, shard=message.shard, reason=reason),
                (),
            )
        else:
            self._send(RowsWanted(run_id=message.run_id, keys=joined, request_id=message.request_id, reason=reason), ())

    def _put_together(
        self, message: BatchShard | Evaluate | Predict, payload: memoryview, resolve: Resolve, lacking: list[bytes]
    ) -> Any:
        """Return the batch, or the parts of a shard; keys of rows that are not here are added to `lacking`."""
        came = unpack(message.batch, payload, resolve)
        parts = came if isinstance(message, BatchShard) else [came]
        if len(parts) != len(message.cached):
            raise RemoteProtocolError(f"{len(parts)} parts came with orders for {len(message.cached)}")
        made = [
            self._part(part, rows, message.run_id, resolve, lacking) if rows.keys else part
            for part, rows in zip(parts, message.cached, strict=True)
        ]
        return made if isinstance(message, BatchShard) else made[0]

    def _part(self, came: Any, rows: CachedRows, run_id: str, resolve: Resolve, lacking: list[bytes]) -> Any:
        keys = split_keys(rows.keys)
        if len(keys) != len(rows.states):
            raise RemoteProtocolError(f"{len(keys)} rows came with {len(rows.states)} states")
        arrived = [key for key, state in zip(keys, rows.states, strict=True) if state != HELD]
        received = Received(came, len(arrived), rows.marks, rows.slots)
        entries = dict(zip(arrived, received.entries(), strict=True))
        missing = self._fill(entries, keys)
        self._keep(rows, {k: entries[k] for k, s in zip(keys, rows.states, strict=True) if s == KEEP}, run_id)
        lacking.extend(missing)
        if missing:
            return None
        if len(arrived) == len(keys):
            return received.as_came(resolve)
        return received.whole([entries[key] for key in keys], resolve)

    def _fill(self, entries: dict[bytes, bytes], keys: Sequence[bytes]) -> list[bytes]:
        """Add what is held; returns the keys of what is not."""
        lacking = []
        for key in keys:
            if key not in entries:
                entry = None if self._store is None else self._store.get(key)
                if entry is None:
                    lacking.append(key)
                else:
                    entries[key] = entry
        return lacking

    def _keep(self, rows: CachedRows, fresh: dict[bytes, bytes], run_id: str) -> None:
        if self._store is None:
            refused = list(fresh)
        else:
            self._store.drop(split_keys(rows.drop))
            refused = self._store.put(fresh)
        if refused:
            self._send(RowsWanted(run_id=run_id, keys=b"".join(refused)), ())


def _raises(error: Exception) -> Load:
    def load() -> Any:
        raise error

    return load
