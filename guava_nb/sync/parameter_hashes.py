"""Compares the parameters of workers of one kind after the same step, by their hashes."""

from __future__ import annotations

from collections.abc import Iterable

from guava_nb.errors import TrainingError
from guava_nb.protocol.messages import StateLoaded

__all__ = ["ParameterHashes", "check_equal"]

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
        if len(known) < 2:  # a third one would be no news
            known.setdefault(parameter_hash, rank)
        return len(known) > 1

    def clear(self) -> None:
        """Forget all: with other shares the sums round differently, so right parameters would have other hashes too."""
        self._known.clear()


def check_equal(loaded: Iterable[tuple[str, StateLoaded]]) -> None:
    """Compare what workers, by their names, hold after the same state was sent to them.

    Raises:
        TrainingError: two of one kind hold different parameters.
    """
    first: dict[str, tuple[str, str]] = {}
    for name, answer in loaded:
        other, parameter_hash = first.setdefault(answer.device_kind, (name, answer.parameter_hash))
        if answer.parameter_hash != parameter_hash:
            raise TrainingError(
                f"{name} and {other} hold different parameters after the same state of step {answer.step} was sent to both "
                f"(hash {answer.parameter_hash[:12]} and {parameter_hash[:12]}); start the run again, and check the memory "
                f"of {name}"
            )
