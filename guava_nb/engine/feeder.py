"""Loads batches ahead of need on a thread of its own, a bounded number of steps deep."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from guava_nb.data.feed import LoadedBatch

__all__ = ["Feeder"]


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class Feeder:
    """Groups of `group` batches (an optimizer step with accumulation), the last group possibly smaller.

    Args:
        batches: the epoch's batches; iterated on the feeder's thread.
        group: loader batches per optimizer step.
        depth: groups held ready.
        wake: called after each change, so that a waiting job looks again.
    """

    def __init__(self, batches: Iterator[LoadedBatch], group: int, depth: int, wake: Callable[[], None]) -> None:
        """Start loading."""
        self._items: queue.Queue[list[LoadedBatch] | _Failed | None] = queue.Queue(max(1, depth))
        self._wake = wake
        self._stop = threading.Event()
        self._batches = batches
        self._group = group
        self._thread = threading.Thread(target=self._load, name="guava-feeder", daemon=True)
        self._thread.start()

    def _load(self) -> None:
        try:
            group: list[LoadedBatch] = []
            for batch in self._batches:
                group.append(batch)
                if len(group) == self._group:
                    self._put(group)
                    group = []
                if self._stop.is_set():
                    break
            if group:
                self._put(group)
            self._put(None)
        except BaseException as error:  # whatever the user's data set raises belongs into the user's cell
            self._put(_Failed(error))
        finally:
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()

    def _put(self, item: list[LoadedBatch] | _Failed | None) -> None:
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=0.1)
            except queue.Full:
                continue
            self._wake()
            return

    def available(self) -> bool:
        """Whether `take` would return at once."""
        return not self._items.empty()

    def take(self) -> list[LoadedBatch] | None:
        """Return the next group, or None at the end of the epoch; raises what the loader raised."""
        item = self._items.get_nowait()
        if isinstance(item, _Failed):
            raise item.error
        return item

    def close(self) -> None:
        """Stop loading; returns when the thread has ended or after five seconds."""
        self._stop.set()
        self._thread.join(5.0)
