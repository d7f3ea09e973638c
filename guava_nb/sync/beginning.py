"""The state that a run goes back to: taken from where it lies when it is needed, and copied before that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from guava_nb.replica.replica import Replica
from guava_nb.sync.state_copy import StateCopy

__all__ = ["Beginning"]


class Beginning:
    """A state that the master holds, or that is on its way from workers.

    Args:
        name: says which state it is, such as "the state after step 5 of run-1".
        master: holds it; None where it is given.
        saved: the state itself, where it is given.
    """

    def __init__(self, name: str, master: Replica | None, saved: dict[str, Any] | None = None) -> None:
        """Copy nothing yet."""
        self._name, self._master, self._saved = name, master, saved
        self._copy: Callable[[], StateCopy | None] = lambda: None
        self._join: Callable[[list[dict[str, Any]]], Mapping[str, Any]] = lambda parts: parts[0]
        self._instead: Beginning | None = None

    @classmethod
    def at_workers(
        cls,
        name: str,
        master: Replica,
        copy: Callable[[], StateCopy | None],
        join: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
        instead: Beginning,
    ) -> Beginning:
        """Return one that workers hold.

        Args:
            name, master: as for the class; the master becomes it when its copy has come and it is needed.
            copy: gives the copy on its way here, None while none is.
            join: makes one state of the parts that come.
            instead: what is left where the copy does not come.
        """
        made = cls(name, master)
        made._copy, made._join, made._instead = copy, join, instead
        return made

    @property
    def _is_here(self) -> bool:
        copy = self._copy()
        return self._instead is None or (copy is not None and copy.is_whole)

    @property
    def name(self) -> str:
        """Which state it would be now."""
        return self._name if self._is_here else self._instead.name  # type: ignore[union-attr]

    @property
    def loss(self) -> str:
        """What is lost if the workers are, in a sentence; "" where the state is here."""
        if self._is_here:
            return ""
        why = "only workers that are gone had it, and its copy had not come"
        return f"{self._name} is lost: {why}. The run goes on from {self.name}"

    def state(self) -> dict[str, Any]:
        """Return the state, or what is left instead."""
        if not self._is_here:
            assert self._instead is not None
            return self._instead.state()
        if self._saved is not None:
            return self._saved
        assert self._master is not None
        copy = self._copy()
        if self._instead is not None and copy is not None:
            self._master.load_state(self._join(copy.parts()))
        return self._master.state()

    def preserve(self) -> None:
        """The master is about to change: keep what it holds."""
        if self._instead is not None:
            if not self._is_here:
                self._instead.preserve()
        elif self._saved is None and self._master is not None:
            self._saved = self._master.state()

    def settle(self) -> None:
        """Its copy will not come: be what is left instead."""
        if self._instead is not None and not self._is_here:
            self._instead.settle()
            self._name, self._saved, self._instead = self._instead.name, self._instead.state(), None

    def fill(self, state: dict[str, Any]) -> None:
        """Its state has come."""
        self._saved = state

    def drop(self) -> None:
        """No run goes back here any more."""
        self._master = self._instead = None
