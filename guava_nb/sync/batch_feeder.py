"""Loads batches ahead of need on a thread of its own, bounded in steps and in bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.sizes import size_of

__all__ = ["BatchFeeder"]

#: Bytes held ready by default.
_BUDGET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A group of batches and its bytes; without batches the end of the epoch, or the error that ended it."""

    batches: list[LoadedBatch] | None = None
    nbytes: int = 0
    error: BaseException | None = None


class BatchFeeder:
    """Groups of `group` batches (an optimizer step with accumulation), the last group possibly smaller.

    The next group is loaded only when it has room, reckoned by the size of the one before: so what is held is at most
    `depth` groups and `budget_bytes`, or one group that is larger, and the one that is being loaded.

    Args:
        batches: the epoch's batches; iterated on the feeder's thread.
        group: loader batches per optimizer step.
        depth: most groups held ready.
        wake: called after each change, so that a waiting job looks again.
        budget_bytes: most bytes held ready.
        pauses: whether loading pauses before the group of this number, from 0, until `go_on`.
    """

    def __init__(
        self,
        batches: Iterator[LoadedBatch],
        group: int,
        depth: int,
        wake: Callable[[], None],
        budget_bytes: int = _BUDGET_BYTES,
        pauses: Callable[[int], bool] = lambda group: False,
    ) -> None:
        """Start loading."""
        self._items: deque[_Loaded] = deque()
        self._changed = threading.Condition()
        self._depth, self._budget, self._loaded_bytes = max(1, depth), budget_bytes, 0
        self._wake, self._pauses = wake, pauses
        self._stopped = self._has_paused = False
        self._batches = batches
        self._group = group
        self._thread = threading.Thread(target=self._load, name="guava-feeder", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- on the feeder's thread

    def _load(self) -> None:
        try:
            last = number = 0
            while self._wait_to_go_on(number) and self._wait_for_room(last):
                group, number = self._next_group(), number + 1
                if group:
                    last = sum(size_of(batch.batch) for batch in group)
                    self._put(_Loaded(group, last))
                if len(group) < self._group:
                    self._put(_Loaded())
                    return
        except BaseException as error:  # what the user's data set raises is shown in the user's cell
            self._put(_Loaded(error=error))
        finally:
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()

    def _next_group(self) -> list[LoadedBatch]:
        group: list[LoadedBatch] = []
        while len(group) < self._group and not self._stopped and (batch := next(self._batches, None)) is not None:
            group.append(batch)
        return group

    def _wait_to_go_on(self, number: int) -> bool:
        """Pause before this group, if that is wanted; False when the feeder was closed."""
        if self._pauses(number):
            with self._changed:
                self._has_paused = True
            self._wake()
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or not self._has_paused)
        return not self._stopped

    def _wait_for_room(self, coming: int) -> bool:
        """Wait until a group of about this size has room; False when the feeder was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._has_room(coming))
            return not self._stopped

    def _has_room(self, coming: int) -> bool:
        return not self._items or (len(self._items) < self._depth and self._loaded_bytes + coming <= self._budget)

    def _put(self, item: _Loaded) -> None:
        with self._changed:
            if self._stopped:
                return
            self._items.append(item)
            self._loaded_bytes += item.nbytes
        self._wake()

    # -------------------------------------------------------------------------------------------------- for its owner

    def available(self) -> bool:
        """Whether `take` would return at once."""
        return bool(self._items)

    def has_paused(self) -> bool:
        """Whether loading waits for `go_on`."""
        return self._has_paused

    def is_at_rest(self) -> bool:
        """Whether a group is there, or none comes before `go_on`."""
        return self.available() or self._has_paused

    def go_on(self) -> None:
        """Let loading go on after a pause."""
        with self._changed:
            self._has_paused = False
            self._changed.notify()

    def next_bytes(self) -> int | None:
        """About how many bytes the next group has; None when there is no further one, or loading it failed."""
        item = self._items[0]
        return None if item.batches is None else item.nbytes

    def take(self) -> list[LoadedBatch] | None:
        """Return the next group, or None at the end of the epoch; raises what the loader raised."""
        with self._changed:
            item = self._items.popleft()
            self._loaded_bytes -= item.nbytes
            self._changed.notify()
        if item.error is not None:
            raise item.error
        return item.batches

    def held(self) -> tuple[int, int]:
        """Return how many groups wait here, and their bytes."""
        with self._changed:
            return sum(item.batches is not None for item in self._items), self._loaded_bytes

    def close(self) -> None:
        """Stop loading; returns when the thread has ended or after five seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(5.0)
