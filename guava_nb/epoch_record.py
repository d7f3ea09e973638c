"""What is known of an epoch's data once it was drawn: where its order came from, and how its batches look.

For a program that shall read the same data in the same order without us. Knows torch's loaders; keeps no batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

__all__ = ["EpochRecord", "OrderKind", "look_of"]

#: "in turn": 0, 1, 2 ...; "seeds": torch's RandomSampler drew a seed for each epoch; "stream": it drew from the loader's
#: generator; "own": any other order, or none.
OrderKind = Literal["in turn", "seeds", "stream", "own"]


class EpochRecord:
    """The orders of one loader, epoch by epoch.

    Args:
        loader: whose epochs are drawn.

    Attributes:
        kind: where orders come from.
        seeds: for "seeds": of each epoch that was begun.
        stream_seed: for "stream": what the generator was seeded with; None where that does not tell where it stood.
        look: of the first batch, see `look_of`; None before it.
    """

    def __init__(self, loader: Any) -> None:
        self.kind: OrderKind = _kind(loader)
        self._sampler = getattr(loader, "sampler", None)
        self.seeds: dict[int, int] = {}
        self.stream_seed: int | None = None
        self.look: Any = None

    def begin(self, epoch: int) -> None:
        """Note from where an epoch draws its order, just before it does; no random number is drawn."""
        if self.kind == "seeds":
            self.seeds[epoch] = _next_seed()
        elif self.kind == "stream" and epoch == 0:
            generator = self._sampler.generator  # type: ignore[union-attr]
            fresh = torch.Generator().manual_seed(seed := generator.initial_seed())
            self.stream_seed = seed if torch.equal(fresh.get_state(), generator.get_state()) else None

    def see(self, batch: Any) -> None:
        """Note how a batch looks, if it is the first."""
        if self.look is None:
            self.look = look_of(batch)


def look_of(value: Any) -> Any:
    """Return a batch with each tensor or array replaced by (dtype, shape), and all else by the name of its type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if isinstance(value, Mapping):
        return {key: look_of(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [look_of(part) for part in value]
    return type(value).__name__


def _kind(loader: Any) -> OrderKind:
    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        return "own"
    sampler = loader.sampler
    if type(sampler) is SequentialSampler:
        return "in turn"
    if type(sampler) is not RandomSampler or sampler.replacement or sampler.num_samples != len(sampler.data_source):
        return "own"
    if sampler.generator is None:
        return "seeds" if loader.generator is None else "own"
    return "stream" if sampler.generator is loader.generator else "own"


def _next_seed() -> int:
    """The seed that a RandomSampler will draw, after the number that its loader draws for loader processes."""
    stream = torch.Generator()
    stream.set_state(torch.get_rng_state())
    for _ in range(2):
        drawn = torch.empty((), dtype=torch.int64).random_(generator=stream)
    return int(drawn.item())
