"""Which part of the samples travels in each epoch where workers keep them: the real rules, played with row numbers.

Pure: knows numbers of rows and `row_cache.policy`; knows no data and no worker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from guava_nb.data.split import share_ranges
from guava_nb.row_cache.policy import CachePolicy, cost_function, deal

__all__ = ["travelling"]

#: Rows that are played at most; of larger data sets a part stands for all, with as much less room to keep them.
_MOST_ROWS = 12_000
#: Epochs that are played; in later ones about as much travels as in the last of these.
_MOST_EPOCHS = 6


def travelling(
    rows: int,
    batch_rows: int,
    weights: Sequence[float],
    epochs: int,
    *,
    row_bytes: int,
    budget_bytes: int,
    mode: str,
    shuffled: bool,
) -> tuple[float, ...]:
    """Return which part of the samples travels in each epoch, 0 to 1.

    Args:
        rows: samples of an epoch; batch_rows: of a batch.
        weights: shares of the workers.
        row_bytes: of one entry; budget_bytes: what all entries of one worker may take, in "memory" or on "disk".
        shuffled: another order in each epoch.
    """
    batch_rows = max(1, min(batch_rows, rows))
    played = min(rows, max(_MOST_ROWS // batch_rows, 1) * batch_rows)
    held = [CachePolicy(budget_bytes * played // max(1, rows), cost_function(mode)) for _ in weights]
    found = []
    for epoch in range(min(epochs, _MOST_EPOCHS)):
        for one in held:
            one.next_pass()
        order = list(range(played))
        if shuffled:
            random.Random(epoch).shuffle(order)
        sent = sum(_sent(order[at : at + batch_rows], held, weights, row_bytes) for at in range(0, played, batch_rows))
        found.append(sent / max(1, played))
    return tuple(found)


def _sent(batch: Sequence[int], held: Sequence[CachePolicy], weights: Sequence[float], row_bytes: int) -> int:
    """Deal one batch as a step does; returns how many of its rows travel."""
    keys = [row.to_bytes(4, "little") for row in batch]
    holders = [[place for place, one in enumerate(held) if key in one] for key in keys]
    counts = [last - first for first, last in share_ranges(len(batch), list(weights))]
    sent = 0
    for one, rows in zip(held, deal(holders, counts), strict=True):
        sent += len(one.order([keys[row] for row in rows], [row_bytes] * len(rows)).to_send())
    return sent
