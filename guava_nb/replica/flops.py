"""Floating point operations of a sample, forward and backward, by torch's own counter; one shard of a run is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FlopCount"]


class FlopCount:
    """Counts once.

    Args:
        wanted: without it nothing is counted and nothing costs anything.

    Attributes:
        per_sample: operations of one sample; None until counted. Matrix products, convolutions and attention count, as torch's
            `FlopCounterMode` knows them; sums and activations are few beside them.
    """

    def __init__(self, wanted: bool) -> None:
        """Count the first shard that comes."""
        self._wanted = wanted
        self.per_sample: float | None = None

    @contextmanager
    def around(self, rows: int) -> Iterator[None]:
        """Count what is done inside, on so many samples, unless it was counted before. Results are the same."""
        if not self._wanted or self.per_sample is not None or not rows:
            yield
            return
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield
        self.per_sample = counter.get_total_flops() / rows
