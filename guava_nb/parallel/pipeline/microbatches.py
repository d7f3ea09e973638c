"""Arithmetic of micro-batches: how many, how large, and which rows each gets.

Parts differ by one row at most and no part is empty, so nothing has to be padded: no row is computed that is not in
the batch, and criteria, dropout and batch statistics see true rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from guava_nb.errors import ConfigError
from guava_nb.nested import ARRAYS, AxisOf, axes_by_length, cut_parts, leaves, sliced

__all__ = ["WholeParts", "check_micro_batches", "count_micro_batches", "cut_rows", "micro_batch_sizes"]


def _fits(schedule: str, count: int, ranks: int) -> bool:
    # Interleaved 1F1B goes in rounds of about as many micro-batches as there are ranks, all rounds equally long.
    return schedule != "interleaved" or count % max(1, count // ranks) == 0


def check_micro_batches(schedule: str, wanted: int, ranks: int) -> None:
    """Refuse a number of micro-batches that a schedule cannot do.

    Raises:
        ConfigError: it is below one, or does not divide into the rounds of the interleaved schedule.
    """
    if wanted < 1:
        raise ConfigError(f"micro_batches is {wanted} (--micro-batches); a batch is cut into 1 part or more")
    if not _fits(schedule, wanted, ranks):
        rounds, fitting = wanted // ranks, wanted - wanted % ranks
        raise ConfigError(
            f"the interleaved schedule on {ranks} ranks does {wanted} micro-batches in {wanted} // {ranks} = {rounds} "
            f"rounds, and {wanted} is not a multiple of {rounds}; use micro_batches={fitting} (--micro-batches {fitting})"
        )


def count_micro_batches(schedule: str, wanted: int, rows: int, ranks: int) -> int:
    """Return into how many parts a batch is cut: as many as wanted, fewer where there are fewer rows.

    Args:
        schedule: "gpipe", "1f1b" or "interleaved".
        wanted: the setting.
        rows: samples of the batch, at least 1.
        ranks: ranks of the pipeline.
    """
    most = max(1, min(wanted, rows))
    return next(count for count in range(most, 0, -1) if _fits(schedule, count, ranks))


def micro_batch_sizes(rows: int, count: int) -> list[int]:
    """Return the rows of each part; they differ by one at most, the larger ones come first."""
    base, larger = divmod(rows, count)
    return [base + (index < larger) for index in range(count)]


def cut_rows(value: Any, rows: int, sizes: Sequence[int], axis_of: AxisOf | None = None, half: int = 0) -> list[Any]:
    """Cut the inputs or the targets of a batch into consecutive parts.

    Args:
        value: any nesting of containers, tensors and arrays.
        rows: samples.
        sizes: rows of each part.
        axis_of: how the pair of inputs and targets was read; None goes by length, see `axes_by_length`.
        half: 0 for inputs, 1 for targets.

    Raises:
        ConfigError: there are tensors or arrays, and none of them has `rows` rows.
    """
    if len(sizes) == 1:
        return [value]
    stops = list(accumulate(sizes))
    ranges, cut = list(zip([0, *stops], stops, strict=False)), False

    def share(part: Any, axis: int) -> list[Any]:
        nonlocal cut
        cut = True
        return [_apart(sliced(part, axis, start, stop)) for start, stop in ranges]

    parts = cut_parts(value, axis_of or axes_by_length(rows), share, len(ranges), (half,))
    arrays = [] if cut else list(leaves(value, ARRAYS))
    if arrays:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays[:4])
        raise ConfigError(
            f"a batch of {rows} samples holds tensors of shape {shapes}; a pipeline cuts a batch along the first "
            f"dimension, so at least one tensor must have {rows} rows"
        )
    return parts


def _apart(part: Any) -> Any:
    """The same memory with a count of changes of its own: a forward may write into its rows while another part waits."""
    return part.data if isinstance(part, Tensor) else part


class WholeParts:
    """What every part of a batch has the same of: a forward that writes into it would change it once for each part.

    Args:
        parts: as `cut_rows` gives them.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        others = {id(one) for part in parts[1:] for one in leaves(part)}
        self._versions = [(one, one._version) for part in parts[:1] for one in leaves(part) if id(one) in others]

    def check(self) -> None:
        """Refuse that one was written into.

        Raises:
            ConfigError: one was.
        """
        if changed := [one for one, version in self._versions if one._version != version]:
            raise ConfigError(
                f"the forward or the loss writes into a tensor of shape {tuple(changed[0].shape)} of the batch that all "
                "micro-batches share, so each would find what the one before left: let it compute a new tensor instead "
                "(x = x * 2, not x.mul_(2)), or take --micro-batches 1"
            )
