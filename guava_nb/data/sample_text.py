"""Which samples a sentence is about."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["sample_text"]

#: Ids that are named one by one; a shuffled batch has no first and last that say anything.
_NAMED = 4


def sample_text(ids: Sequence[int]) -> str:
    """Return "sample 7", "samples 32 to 63" where they follow one another, else "samples 1062, 17, 784, 5 and 28 more"."""
    if not ids:
        return "its samples"
    if len(ids) == 1:
        return f"sample {ids[0]}"
    if list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return f"samples {ids[0]} to {ids[-1]}"
    more = len(ids) - _NAMED
    if more <= 0:
        return f"samples {', '.join(map(str, ids[:-1]))} and {ids[-1]}"
    return f"samples {', '.join(map(str, ids[:_NAMED]))} and {more} more"
