"""Which worker holds which rows: what it keeps, what it drops to make room, and which worker gets which row of a batch.

Pure: keys and sizes in, orders out. The orchestrator alone decides, and its orders travel with the rows, in order; so what
stands here is what the worker does. Only a worker that finds a row damaged knows better, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice

__all__ = [
    "WorkerCaches",
    "HELD",
    "KEEP",
    "MAX_ROWS",
    "SENT",
    "CachePolicy",
    "Order",
    "cost_function",
    "deal",
    "digest_of",
]

#: States of a row in a `CachedRows`.
HELD, SENT, KEEP = 0, 1, 2
#: What keeping a row takes beside its entry, in a worker's dictionary or database.
_OVERHEAD_BYTES = 160
#: A database puts large entries into pages of their own.
_PAGE_BYTES = 4096
#: Rows per worker: what is remembered of each here takes some 200 bytes.
MAX_ROWS = 1 << 20


def _memory_cost(size: int) -> int:
    return size + _OVERHEAD_BYTES


def _disk_cost(size: int) -> int:
    return _OVERHEAD_BYTES + (size if size < _PAGE_BYTES // 4 else -(-size // _PAGE_BYTES) * _PAGE_BYTES)


def cost_function(mode: str) -> Callable[[int], int]:
    """How many bytes of the budget an entry of so many bytes takes, with a cache in "memory" or on "disk"."""
    return _disk_cost if mode == "disk" else _memory_cost


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is told about the rows of a part: a state for each, and keys of rows to drop first."""

    states: bytes
    drop: tuple[bytes, ...]

    def to_send(self) -> list[int]:
        """Places of the rows that travel."""
        return [place for place, state in enumerate(self.states) if state != HELD]


class CachePolicy:
    """What one worker holds.

    Rows age by passes over the data. Room is made by dropping rows that the last pass did not use, oldest first. Where all
    of them were used, a new one is sent and not kept: dropping the least recently used of a data set that is larger than
    the budget would drop each row just before it is used again.

    Args:
        budget_bytes: what all entries may take, overhead included.
        cost: bytes that an entry of so many bytes takes.
    """

    def __init__(self, budget_bytes: int, cost: Callable[[int], int] = _memory_cost) -> None:
        """Start empty."""
        self.budget_bytes = budget_bytes
        self._cost = cost
        self.used_bytes = 0
        self._now: dict[bytes, int] = {}  # used in this pass; the value is what it costs
        self._before: dict[bytes, int] = {}  # last used in the pass before
        self._stale: dict[bytes, int] = {}  # not used since

    def __len__(self) -> int:
        """Rows that are held."""
        return len(self._now) + len(self._before) + len(self._stale)

    def __contains__(self, key: bytes) -> bool:
        """Whether the row is held."""
        return key in self._now or key in self._before or key in self._stale

    def keys(self) -> set[bytes]:
        """Return all keys."""
        return {*self._now, *self._before, *self._stale}

    def next_pass(self) -> None:
        """Begin another pass over the data."""
        self._stale.update(self._before)
        self._before, self._now = self._now, {}

    def order(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Order:
        """Decide about the rows of a part that the worker is about to get, and note what it will hold then."""
        for key in keys:
            self._touch(key)
        states = bytearray(len(keys))
        drop: list[bytes] = []
        known: set[bytes] = set()
        for place, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            if key in known or key in self:
                continue
            known.add(key)
            states[place] = KEEP if self._admit(key, self._cost(size), drop) else SENT
        return Order(bytes(states), tuple(drop))

    def _touch(self, key: bytes) -> None:
        for older in (self._before, self._stale):
            if key in older:
                self._now[key] = older.pop(key)

    def _admit(self, key: bytes, cost: int, drop: list[bytes]) -> bool:
        if cost > self.budget_bytes:
            return False
        while self.used_bytes + cost > self.budget_bytes or len(self) >= MAX_ROWS:
            if not self._stale:
                return False
            # The first that became stale; a dictionary finds it at once while few are dropped at a time.
            oldest = next(iter(self._stale))
            self.used_bytes -= self._stale.pop(oldest)
            drop.append(oldest)
        self._now[key] = cost
        self.used_bytes += cost
        return True

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the worker does not hold these rows any more."""
        for key in keys:
            for part in (self._now, self._before, self._stale):
                self.used_bytes -= part.pop(key, 0)

    def replace(self, sizes: Mapping[bytes, int]) -> None:
        """Take what the worker says it holds: entries' bytes by key. They count as used in the pass before."""
        self._now, self._stale = {}, {}
        self._before = {key: self._cost(size) for key, size in sizes.items()}
        self.used_bytes = sum(self._before.values())

    def digest(self) -> bytes:
        """Return the digest of all keys."""
        return digest_of(self.keys())


def digest_of(keys: Iterable[bytes]) -> bytes:
    """Exclusive or of keys of 16 bytes: equal sets have equal digests, whatever their order."""
    return reduce(lambda total, key: total ^ int.from_bytes(key, "little"), keys, 0).to_bytes(16, "little")


def deal(holders: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    """Deal the rows of a batch so that most go to workers that hold them.

    Args:
        holders: for each row the places of the workers that hold it.
        counts: how many rows each worker gets; they add up to the number of rows.

    Returns:
        For each worker its rows in ascending order. Where no worker holds a row the shares are contiguous.
    """
    room = list(counts)
    dealt: list[list[int]] = [[] for _ in counts]
    left: list[int] = []
    # Rows that few hold choose first, since the others have other places to go to.
    for row in sorted(range(len(holders)), key=lambda row: (len(holders[row]), row)):
        places = [place for place in holders[row] if room[place]]
        if not places:
            left.append(row)
            continue
        place = max(places, key=lambda place: room[place])
        room[place] -= 1
        dealt[place].append(row)
    rest = iter(sorted(left))
    for place, count in enumerate(room):
        dealt[place].extend(islice(rest, count))
    return [sorted(rows) for rows in dealt]


#: What each worker of a session holds, by rank.
WorkerCaches = dict[int, CachePolicy]
