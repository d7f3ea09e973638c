"""Batches of loaders that fill the same memory again and again."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from guava_nb.data.frozen_batch import snapshot
from guava_nb.data.loader_feed import LoaderFeed

Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - as users write them


@dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    name: str


def test_everything_of_a_batch_is_copied_and_what_occurs_twice_stays_one() -> None:
    tensor, array = torch.arange(4), np.arange(3)
    batch = {"t": [tensor, tensor], "p": Pair(array, "x"), "f": Frozen(tensor[:2], "y"), "n": None, "u": (1, b"z")}
    copied = snapshot(batch)
    tensor.zero_()
    array[:] = 0
    assert copied["t"][0].tolist() == [0, 1, 2, 3] and copied["t"][0] is copied["t"][1]
    assert copied["p"].a.tolist() == [0, 1, 2] and type(copied["p"]) is Pair
    assert copied["f"].image.tolist() == [0, 1] and copied["f"].name == "y"
    assert copied["n"] is None and copied["u"] == (1, b"z")


class Reused(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.zeros(2)
        for number in range(4):
            yield buffer.fill_(number)


def reusing_collate() -> Any:
    buffer = torch.zeros(2)
    return lambda samples: buffer.copy_(torch.stack([sample[0] for sample in samples]))


def test_batches_that_are_held_do_not_change() -> None:
    values = TensorDataset(torch.arange(8.0))
    for loader, wanted in (
        (Reused(), [0.0, 1.0, 2.0, 3.0]),
        (DataLoader(Reused(), batch_size=None), [0.0, 1.0, 2.0, 3.0]),
        (DataLoader(values, batch_size=2, collate_fn=reusing_collate()), [0.0, 2.0, 4.0, 6.0]),
    ):
        feed = LoaderFeed(iter(loader) if isinstance(loader, Reused) else loader)
        held = [loaded.batch for loaded in feed.epoch()]
        assert [float(batch[0]) for batch in held] == wanted
