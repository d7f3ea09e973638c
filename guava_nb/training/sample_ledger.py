"""Which samples were drawn and which were committed, so that "exactly once" is counted and not believed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

__all__ = ["SampleLedger"]


class SampleLedger:
    """Two lists of sample ids per epoch: drawn from the loader, and committed by a step.

    A sampler may draw an id several times on purpose; so the two are compared as multisets, id by id.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._drawn: dict[int, array[int]] = {}
        self._committed: dict[int, array[int]] = {}

    def draw(self, epoch: int, ids: Iterable[int]) -> None:
        """Note ids that the loader gave for a step that will be issued."""
        self._drawn.setdefault(epoch, array("q")).extend(ids)

    def commit(self, epoch: int, ids: Iterable[int]) -> None:
        """Note ids whose gradient is part of an applied step."""
        self._committed.setdefault(epoch, array("q")).extend(ids)

    def withdraw_uncommitted(self) -> None:
        """A run that is stopped drew samples ahead: what was never committed was not lost but not reached."""
        for epoch in list(self._drawn):
            self._drawn[epoch] = array("q", self._committed.get(epoch, array("q")))

    def truncate(self, epoch: int, committed: int) -> None:
        """Go back to a state in which `epoch` had this many committed samples and no later epoch had begun."""
        for later in [e for e in self._drawn if e > epoch]:
            del self._drawn[later]
        for later in [e for e in self._committed if e > epoch]:
            del self._committed[later]
        kept = self._committed.get(epoch, array("q"))[:committed]
        self._committed[epoch] = kept
        self._drawn[epoch] = array("q", kept)

    def committed_in(self, epoch: int) -> int:
        """Samples committed in one epoch."""
        return len(self._committed.get(epoch, ()))

    def balance(self) -> tuple[int, int]:
        """Return (lost, duplicated): draws without a commit, and commits without a draw."""
        lost = duplicated = 0
        for epoch in sorted(set(self._drawn) | set(self._committed)):
            drawn, committed = (
                np.array(d.get(epoch, array("q")), dtype=np.int64) for d in (self._drawn, self._committed)
            )
            ids, inverse = np.unique(np.concatenate([drawn, committed]), return_inverse=True)
            difference = np.bincount(inverse[: len(drawn)], minlength=len(ids)) - np.bincount(
                inverse[len(drawn) :], minlength=len(ids)
            )
            lost += int(difference[difference > 0].sum())
            duplicated += int(-difference[difference < 0].sum())
        return lost, duplicated
