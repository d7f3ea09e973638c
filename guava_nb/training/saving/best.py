"""Which validation was the best so far: by which figure, and whether more of it or less is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from guava_nb.errors import ConfigError

__all__ = ["Best"]

#: What is better of the figures that every validation has; of a user's metric only the user knows.
_DIRECTIONS = {"loss": "min", "perplexity": "min", "accuracy": "max"}


class Best(NamedTuple):
    """A figure of the validations and its better direction, "min" or "max"."""

    metric: str
    direction: str

    @classmethod
    def of(cls, text: str, metrics: Iterable[str], has_accuracy: bool = True) -> Best:
        """Read an option such as "accuracy" or "f1:max".

        Args:
            metrics: names of the run's own.
            has_accuracy: validations measure it.

        Raises:
            ConfigError: no validation gives it, or its direction is not known.
        """
        metric, _, given = text.partition(":")
        known = [name for name in ("loss", "accuracy", "perplexity", *metrics) if name != "accuracy" or has_accuracy]
        if metric not in known:
            raise ConfigError(
                f"save_best is {text!r}, which no validation of this run gives; it gives {', '.join(known)}"
            )
        direction = given or ("" if metric in metrics else _DIRECTIONS.get(metric, ""))
        if direction not in ("min", "max"):
            raise ConfigError(
                f"save_best is {text!r}, and only you know what is better of {metric}: write {metric}:max where more is better, "
                f"{metric}:min where less is"
            )
        return cls(metric, direction)

    def since(self, validations: Sequence[Mapping[str, Any]]) -> int:
        """Return how many validations followed the best one; those without such a number are worse than any."""
        bests = [k for k in range(len(validations)) if self.is_newest(validations[: k + 1])]
        return len(validations) - 1 - (bests[-1] if bests else -1)

    def is_newest(self, validations: Sequence[Mapping[str, Any]]) -> bool | None:
        """Return whether the last validation is better than all before it; None: it has no such number."""
        sign = 1 if self.direction == "max" else -1
        figures = [sign * one[self.metric] for one in validations if isinstance(one.get(self.metric), int | float)]
        if not validations or not isinstance(validations[-1].get(self.metric), int | float):
            return None
        newest = figures[-1]
        before = [figure for figure in figures[:-1] if figure == figure]  # NaN is worse than any number
        return bool(newest == newest and all(newest > figure for figure in before))
