"""What batches have that those before them did not have: a check of one of these says nothing of the next.

A loss may divide by the targets that are not ignored, or weigh samples with numbers of the batch: as long as none is ignored
and all weigh the same, pieces give what the whole gives. Knows batches; knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guava_nb.nested import ARRAYS, Path, fields_of

__all__ = ["BatchTraits", "News"]

#: Parts with more entries are not looked into: of images and waveforms nothing of this kind is told.
_MOST_NUMBERS, _MOST_REALS = 1 << 24, 1 << 16
#: Parts of a batch that are looked at.
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class News:
    """The first thing that a batch has and no batch before it had.

    Attributes:
        text: what, in words.
        row: of the sample that shows it; 0 where none does.
    """

    text: str
    row: int = 0


@dataclass(slots=True)
class _Part:
    """What a part of the batches had so far; `constant` is its one value, as long as there was one only."""

    constant: float | None
    traits: set[str] = field(default_factory=set)


class BatchTraits:
    """Compares batches with those that it has seen."""

    def __init__(self) -> None:
        """No batch was seen."""
        self._parts: dict[Path, _Part] = {}
        self._numbers: tuple[int, ...] = ()

    def compare_with(self, numbers: Sequence[int]) -> None:
        """Look for these whole numbers, too: the loss compares targets with them."""
        self._numbers = tuple(sorted({*self._numbers, *numbers}))

    def see(self, batch: Any, rows: int) -> News | None:
        """Look at a batch of so many samples; returns what is new in it, None where nothing is. The first one has nothing new."""
        first, news = not self._parts, None
        for number, (path, part) in enumerate(_parts(batch, ())):
            if number == _MOST_PARTS:
                break
            for trait, where in self._new(path, part):
                row = (
                    int(where.reshape(rows, -1).any(1).nonzero()[0])
                    if where is not None and where.shape[:1] == (rows,)
                    else 0
                )
                news = news or News(f"{_name(path)} {trait}", row)
        return None if first else news

    def _new(self, path: Path, part: Any) -> Iterator[tuple[str, Tensor | None]]:
        value = _as_tensor(part)
        if value is None:
            return
        lowest, highest = float(value.amin()), float(value.amax())
        constant = lowest if lowest == highest else None
        known = self._parts.get(path)
        if known is None:
            known = self._parts[path] = _Part(constant)
            yield "is a part that no batch had before", None
        elif known.constant is not None and known.constant != constant:
            yield f"is not {known.constant:g} everywhere any more", value != known.constant
            known.constant = None
        for trait, where in self._traits(value, lowest, highest, known.traits):
            known.traits.add(trait)
            yield trait, where

    def _traits(self, value: Tensor, lowest: float, highest: float, known: set[str]) -> Iterator[tuple[str, Tensor]]:
        is_real = value.is_floating_point()
        if lowest < 0 and "has values below 0" not in known:
            yield "has values below 0", value < 0
        if lowest != lowest and "has values that are no numbers" not in known:
            yield "has values that are no numbers", value.isnan()
        for number in (0,) if is_real else self._numbers:
            trait = f"has entries that are {number}"
            if (
                trait not in known
                and not (number < lowest or number > highest)
                and bool((found := value == number).any())
            ):
                yield trait, found


def _parts(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (*ARRAYS, bool, int, float)):
        yield path, value
    elif isinstance(value, list | tuple) and not hasattr(value, "_fields") and len(value) > _MOST_PARTS:
        return
    else:
        for key, child in fields_of(value):
            yield from _parts(child, (*path, key))


def _as_tensor(part: Any) -> Tensor | None:
    """Return a part as a dense tensor of real numbers; None where it is none, is empty, or is too large."""
    if isinstance(part, np.ndarray):
        if part.dtype.kind not in "biuf":
            return None
        part = torch.from_numpy(np.ascontiguousarray(part.astype(np.int64) if part.dtype.kind == "u" else part))
    value = (
        part
        if isinstance(part, Tensor)
        else torch.tensor(part, dtype=torch.float64 if isinstance(part, float) else None)
    )
    if value.is_complex() or value.layout is not torch.strided or not value.numel() or value.is_quantized:
        return None
    if value.numel() > (_MOST_REALS if value.is_floating_point() else _MOST_NUMBERS):
        return None
    return (
        value.to(torch.uint8)
        if value.dtype == torch.bool
        else value.float()
        if value.element_size() < 2 and value.is_floating_point()
        else value
    )


def _name(path: Path) -> str:
    return f"part {'.'.join(map(str, path))}" if path else "the batch"
