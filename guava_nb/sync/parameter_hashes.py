"""Compares the parameters of workers of one kind after the same step, by their hashes."""

from __future__ import annotations

__all__ = ["ParameterHashes"]

#: Steps that reports may come late.
_LATE_STEPS = 4


class ParameterHashes:
    """The hashes that workers reported of the last few steps. Different kinds of devices round differently."""

    def __init__(self) -> None:
        """Nothing was reported yet."""
        self._known: dict[int, dict[str, dict[str, int]]] = {}

    def differs(self, step: int, kind: str, parameter_hash: str, rank: int) -> bool:
        """Note a worker's hash after a step; returns whether another worker of its kind reported another one."""
        known = self._known.setdefault(step, {}).setdefault(kind, {})
        for earlier in [s for s in self._known if s < step - _LATE_STEPS]:
            del self._known[earlier]
        known.setdefault(parameter_hash, rank)
        return len(known) > 1

    def clear(self) -> None:
        """Forget all: with other shares the sums round differently, so right parameters would have other hashes too."""
        self._known.clear()
