"""Ranges are named for samples that follow one another only."""

from __future__ import annotations

import pytest

from guava_nb.data.sample_text import sample_text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "its samples"),
        ([7], "sample 7"),
        (range(32, 64), "samples 32 to 63"),
        ([3, 4], "samples 3 to 4"),
        ([4, 3], "samples 4 and 3"),
        ([1062, 17, 784], "samples 1062, 17 and 784"),
        ([1062, 17, 9, 5, 6, 784], "samples 1062, 17, 9, 5 and 2 more"),
        ((5, 7, 6), "samples 5, 7 and 6"),
    ],
)
def test_which_samples(ids: list[int], text: str) -> None:
    assert sample_text(ids) == text
