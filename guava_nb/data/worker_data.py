"""Data that lies at the workers, as its user names it here: a data set factory, and how batches are drawn from it.

Knows indices and their order; the data set itself is never seen on this side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from guava_nb.errors import ConfigError

__all__ = ["WorkerData"]


class WorkerData:
    """A data set that every worker has: given to `start_training` in the place of a loader; only ids travel.

    Batches are those of `DataLoader(dataset, batch_size, shuffle, drop_last=..., generator=g)` with
    `g = torch.Generator().manual_seed(seed)`, in the same order.

    Args:
        dataset: a class or function (shared, importable, or its name) that gives a map-style data set: with `len()`, and
            samples by index from 0.
        batch_size: samples of the global batch.
        shuffle: draw a new order for each epoch.
        seed: of that order.
        drop_last: leave out a last batch that is smaller.
        args: plain data for `dataset`.
        collate: a shared or importable function that makes a batch of a list of samples; None is torch's own.
        check: compare some samples between the workers before the run. Switch it off where they differ by design.

    Raises:
        ConfigError: a value is out of its range.
    """

    def __init__(
        self,
        dataset: str | Callable[..., Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        args: Mapping[str, Any] | None = None,
        collate: str | Callable[..., Any] | None = None,
        check: bool = True,
    ) -> None:
        """Note the wishes; nothing is built."""
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}; give a whole number, at least 1")
        if not isinstance(dataset, str) and not callable(dataset):
            raise ConfigError(
                f"a {type(dataset).__name__} exists only here: give the function or class that makes the data set at the "
                "workers, shared in a %%guava_share cell or importable there"
            )
        self.dataset, self.args, self.collate, self.check = dataset, args, collate, check
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last

    def loader(self, length: int) -> DataLoader[Any]:
        """The loader of ids, for a data set of this length: its batches are int64 tensors."""
        return DataLoader(
            _Ids(length),
            self.batch_size,
            self.shuffle,
            drop_last=self.drop_last,
            collate_fn=_ids,
            generator=torch.Generator().manual_seed(self.seed),
        )


class _Ids(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def _ids(samples: Sequence[int]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.int64)
