"""What the options of rounds of local steps may be together, and what they are where nothing is given. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from guava_nb.errors import ConfigError

__all__ = ["SPARSE_METHODS", "RoundOptions", "check_rounds", "filled", "outer_step"]

#: Outer methods whose messages have the largest elements only.
SPARSE_METHODS = ("sparse", "partial")
_EVERY = 30
#: The outer step of partial averaging, from which length of a round on, and up to which part of the elements in a message
#: (tests/benchmarks/RESULTS.md).
_LONG_STEP, _LONG_STEP_EVERY, _LONG_STEP_DENSITY = 1.4, 15, 1 / 32


class RoundOptions(Protocol):
    """As much of the options of a run as there is to look at."""

    @property
    def sync_every(self) -> int | None: ...  # noqa: D102
    @property
    def sync_delay(self) -> int | None: ...  # noqa: D102
    @property
    def mixing(self) -> float | None: ...  # noqa: D102
    @property
    def outer(self) -> str | None: ...  # noqa: D102
    @property
    def outer_momentum(self) -> float | None: ...  # noqa: D102
    @property
    def outer_args(self) -> Mapping[str, Any] | None: ...  # noqa: D102
    @property
    def wire(self) -> str: ...  # noqa: D102
    @property
    def check(self) -> str: ...  # noqa: D102


def check_rounds(options: RoundOptions) -> None:
    """Refuse options of local sync that contradict each other or would have no effect.

    Raises:
        ConfigError: some do.
    """
    if options.outer_momentum and (options.outer not in (None, "nesterov") or options.outer_momentum >= 1):
        raise ConfigError(
            f"outer_momentum is {options.outer_momentum:g}; give a number below 1, and only with outer='nesterov' "
            "(--outer nesterov): an average has none, nor has partial, and sparse has its error feedback instead"
        )
    every, delay = options.sync_every or _EVERY, options.sync_delay or 0
    if delay >= every:
        raise ConfigError(
            f"sync_delay is {delay}, and a round has {every} steps (sync_every, --sync-every): the common weights of one round "
            "are mixed in before the last step of the next, so give a smaller number"
        )
    if options.mixing is not None and not (delay and options.mixing < 1):
        raise ConfigError(
            f"mixing is {options.mixing:g}, and sync_delay {delay}; give a mixing from 0 to below 1, and only with a sync_delay "
            "(--sync-delay) above 0: without one a worker begins each round with the common weights"
        )
    if options.outer == "partial" and options.mixing is not None:
        raise ConfigError(
            f"mixing is {options.mixing:g}, and with outer='partial' a worker keeps what it did not send of its pseudo-gradient: "
            "leave mixing out (what it did during sync_delay is kept, too)"
        )
    if options.outer in SPARSE_METHODS and options.wire != "fp32":
        raise ConfigError(
            f"wire is {options.wire!r}, and outer={options.outer!r} has a format of its own: leave wire at 'fp32', and give "
            "outer_args={'bits': 4} (--outer-args) for finer values"
        )
    if options.check == "strict":
        raise ConfigError(
            "check='strict' compares a whole batch with its pieces, and with sync='local' no step is taken on a whole batch: "
            "leave check at 'warn'"
        )


def outer_step(outer: str, every: int, outer_args: Mapping[str, Any] | None = None) -> float:
    """Return the learning rate of an outer step without momentum that is taken where none is given.

    With partial averaging one worker sends an element, and the others went the same way but did not send it: a longer step
    stands in for that. Measured: in rounds of 5 steps, and where a message has many elements, it is too long.
    """
    density = (outer_args or {}).get("density", 1 / 64)
    is_sparse = isinstance(density, int | float) and density <= _LONG_STEP_DENSITY  # all else is refused elsewhere
    return _LONG_STEP if outer == "partial" and every >= _LONG_STEP_EVERY and is_sparse else 1.0


def filled(options: RoundOptions) -> dict[str, Any]:
    """Return, by name, what the options of local sync that were not given are."""
    outer = options.outer or "average"
    usual: dict[str, Any] = {"sync_every": _EVERY, "outer": outer, "outer_lr": 0.7, "outer_momentum": 0.9}
    usual["sync_delay"] = 0
    if outer != "nesterov":
        usual |= {
            "outer_lr": outer_step(outer, options.sync_every or _EVERY, options.outer_args),
            "outer_momentum": 0.0,
        }
    return {name: value for name, value in usual.items() if getattr(options, name) is None}
