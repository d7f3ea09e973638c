"""States of a run that lie on its workers' disks, and who has read which one of them; pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from guava_nb.protocol.messages import Prepared

__all__ = ["StateOnDisk", "StatesOnDisk"]


class StateOnDisk(NamedTuple):
    """One state.

    Attributes:
        number: by which it was asked for; drawn by chance, so that it means nothing in another process.
        step: the last one that was applied.
        ticks: that its schedule has had.
        digest: of its file, as its worker told; "" where it was asked for and no answer has come.
    """

    number: int
    step: int
    ticks: int
    digest: str = ""


class StatesOnDisk:
    """Which states workers that prepare a run may read from their disks, and which they have read.

    Attributes:
        wanted: the best first; () while none shall be read.
    """

    def __init__(self) -> None:
        """None is wanted."""
        self.wanted: tuple[StateOnDisk, ...] = ()
        self._read: dict[int, StateOnDisk] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Those of the wanted ones."""
        return tuple(state.number for state in self.wanted)

    def look_for(self, states: Iterable[StateOnDisk]) -> None:
        """Have workers that prepare the run from now on read one of these."""
        self.wanted, self._read = tuple(states), {}

    def note(self, rank: int, answer: Prepared) -> None:
        """Note what a worker has read; what was not wanted, or is another one than was written, is no news."""
        self._read.pop(rank, None)
        if answer.ok and answer.saved:
            for state in self.wanted:
                same = (state.number, state.step, state.ticks) == (answer.saved, answer.step, answer.ticks)
                if same and state.digest in ("", answer.digest):
                    self._read[rank] = state

    def best(self, ready: Iterable[int]) -> tuple[StateOnDisk, list[int]] | None:
        """Return the best state that one of these workers has read, and all of them that have it; None: none has."""
        here = set(ready)
        for state in self.wanted:
            if ranks := sorted(rank for rank, read in self._read.items() if read == state and rank in here):
                return state, ranks
        return None
