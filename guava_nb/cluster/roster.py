"""Who takes part, as a pure machine: no sessions, no clocks.

A member has a seat (its rank) from its join until it is lost or leaves. A suspect member's connections are broken; it keeps
the seat while its session may still come back. One that was lost and comes back all the same gets its seat again. The
generation grows with every change of who is active, with every abort, and whenever a process group is formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import asdict, replace

from guava_nb.protocol.messages import Hello
from guava_nb.protocol.shown_text import shown_text
from guava_nb.telemetry.waits import Waits

__all__ = ["MOST_CHARS", "MOST_GONE", "Member", "Roster", "shortened", "version_notes"]

#: Differences of these versions change what a worker can run or compute; a person should see them at the join.
_COMPARED = ("guava_nb", "python", "torch")
#: Weight of the newest shard in a worker's smoothed pace.
_PACE_WEIGHT = 0.3
#: What a worker says of itself in one text is kept up to here; and so many entries of a list.
MOST_CHARS, _MOST_ENTRIES = 500, 32
#: Seats that are kept of workers that are gone.
MOST_GONE = 256
_NAME_CHARS = 100


@dataclass(slots=True)
class Member:
    """One seat. `state` is "ready", "suspect", "lost" or "left"; figures are those of the present or the last run."""

    rank: int
    name: str
    hello: Hello
    state: str = "ready"
    detail: str = ""
    samples: int = 0
    tokens: float | None = None
    owed: float | None = None  # how much its messages left out so far, in rounds of local steps
    bytes_before: tuple[int, int] = (0, 0)  # sent to it and received from it before that run
    share: float | None = None
    step_s: float | None = None
    sample_s: float | None = None  # seconds that it computes for a sample, smoothed over its shards
    shards: int = 0  # that this is known from
    wait_s: float | None = None
    waits: Waits = field(default_factory=Waits)
    line: tuple[float | None, float | None] = (None, None)  # bytes a second to it and from it, when it was asked

    @property
    def alive(self) -> bool:
        """Whether the seat is held: connected, or expected back."""
        return self.state in ("ready", "suspect")

    def note_pace(self, samples: int, seconds: float) -> None:
        """Take how long it computed a shard; the first one of a run warms up, and counts only until the second one."""
        if samples > 0 and seconds > 0:
            self.shards += 1
            now = seconds / samples
            known = now if self.sample_s is None or self.shards <= 2 else self.sample_s
            self.sample_s = known + _PACE_WEIGHT * (now - known)


class _Seats(dict[int, Member]):
    """The members by rank; one that was forgotten is gone, whatever comes late from it."""

    def __missing__(self, rank: int) -> Member:
        name = f"the worker of seat {rank}"
        hello = Hello(
            name=name, program="", versions={}, hostname="", device="", device_name="", device_uuid=""
        )  # fmt: skip
        return Member(rank, name, hello, "lost", "it left long ago")


@dataclass(slots=True)
class Roster:
    """All seats of a session, so that a report can name them: those that are held, and the newest that are gone."""

    members: dict[int, Member] = field(default_factory=_Seats)
    generation: int = 0
    seats: int = 0  # that were ever taken

    def join(self, hello: Hello) -> Member:
        """Seat a newcomer under a name that no other member has."""
        rank = self.seats
        self.seats += 1
        member = Member(rank, self._free_name(hello.name or f"worker-{rank}"), hello)
        self.members[rank] = member
        self.generation += 1
        return member

    def prune(self) -> list[int]:
        """Forget the oldest seats of those that are gone, those that did no samples first; returns their ranks.

        One who has the join code may join a million times.
        """
        gone = sorted((m for m in self if not m.alive), key=lambda m: (m.samples > 0, m.rank))
        forgotten = [member.rank for member in gone[:-MOST_GONE]]
        for rank in forgotten:
            del self.members[rank]
        return forgotten

    def rejoin(self, rank: int, hello: Hello) -> Member:
        """Give a worker that was lost its seat again."""
        member = self.members[rank]
        member.hello, member.state, member.detail = hello, "ready", ""
        self.generation += 1
        return member

    def _free_name(self, wanted: str) -> str:
        taken = {m.name for m in self if m.alive}
        if wanted not in taken:
            return wanted
        return next(name for k in range(2, len(taken) + 3) if (name := f"{wanted}-{k}") not in taken)

    def suspect(self, rank: int, detail: str) -> bool:
        """Its connections broke. Returns whether this is news."""
        return self._move(rank, ("ready",), "suspect", detail)

    def resume(self, rank: int) -> bool:
        """Its session came back. Returns whether this is news."""
        return self._move(rank, ("suspect",), "ready", "")

    def lose(self, rank: int, detail: str) -> bool:
        """It will not come back. Returns whether this is news."""
        return self._move(rank, ("ready", "suspect"), "lost", detail)

    def leave(self, rank: int, detail: str) -> bool:
        """It said goodbye. Returns whether this is news."""
        return self._move(rank, ("ready", "suspect"), "left", detail)

    def _move(self, rank: int, sources: tuple[str, ...], target: str, detail: str) -> bool:
        member = self.members[rank]
        if member.state not in sources:
            return False
        member.state, member.detail = target, detail
        self.generation += 1
        return True

    def ready(self) -> list[int]:
        """Ranks that are connected, in order."""
        return [m.rank for m in self if m.state == "ready"]

    def alive(self) -> list[int]:
        """Ranks whose seat is held, in order."""
        return [m.rank for m in self if m.alive]

    def __iter__(self) -> Iterator[Member]:
        """Iterate over all seats of this moment, oldest first: other threads may look while the dispatcher seats one."""
        return iter(self.members.copy().values())


def shortened(hello: Hello) -> Hello:
    """Return a hello whose texts and lists have no more than is shown of them, however long they came."""
    texts = {name: _name(value, MOST_CHARS) for name, value in asdict(hello).items() if isinstance(value, str)}
    versions = {_name(key): _name(text) for key, text in islice(hello.versions.items(), _MOST_ENTRIES)}
    own = tuple(name[:_NAME_CHARS] for name in hello.own[:_MOST_ENTRIES])
    return replace(hello, **texts | {"name": _name(hello.name)}, versions=versions, own=own)


def _name(text: str, most: int = _NAME_CHARS) -> str:
    """Return a text of a hello on one line, and no longer than this."""
    return " ".join(shown_text(text[:most]).split()) if not text.isprintable() else text[:most]


def version_notes(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """One sentence for each difference of versions that matters."""
    return tuple(
        f"{key} differs: {theirs.get(key, 'unknown')} on the worker, {ours.get(key, 'unknown')} on the orchestrator"
        for key in _COMPARED
        if ours.get(key) != theirs.get(key)
    )
