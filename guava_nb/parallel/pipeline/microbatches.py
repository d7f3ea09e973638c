"""Arithmetic of micro-batches: how many, how large, and how nested values are cut into them.

Parts differ by one row at most and no part is empty, so nothing has to be padded: no row is computed that is not in
the batch, and criteria, dropout and batch statistics see true rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from guava_nb.errors import ConfigError

__all__ = ["check_micro_batches", "count_micro_batches", "cut_rows", "micro_batch_sizes"]


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


def cut_rows(value: Any, rows: int, sizes: Sequence[int]) -> list[Any]:
    """Cut a nested value into consecutive parts along the first dimension of its tensors.

    Length decides: a tensor of `rows` rows is cut, anything else (a mask for all samples, a number) goes whole into
    every part.

    Args:
        value: any nesting of tuple, list, dict and tensors.
        rows: samples.
        sizes: rows of each part.

    Raises:
        ConfigError: there are tensors, and none of them has `rows` rows.
    """
    tensors = list(_tensors(value))
    if tensors and not any(_is_cut(tensor, rows) for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise ConfigError(
            f"a batch of {rows} samples holds tensors of shape {shapes}; a pipeline cuts a batch along the first "
            f"dimension, so at least one tensor must have {rows} rows"
        )
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_part(value, rows, start, size) for start, size in zip(starts, sizes, strict=True)]


def _is_cut(tensor: Tensor, rows: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == rows


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def _part(value: Any, rows: int, start: int, size: int) -> Any:
    if isinstance(value, Tensor):
        return value[start : start + size] if _is_cut(value, rows) else value
    if isinstance(value, dict):
        return {key: _part(child, rows, start, size) for key, child in value.items()}
    if isinstance(value, list | tuple):
        parts = [_part(child, rows, start, size) for child in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
