"""Bounds and boxes of full tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.parallel.state.shard_layout import chunk_bounds, even_bounds

sizes = st.integers(0, 9)


@given(sizes, st.integers(1, 6))
def test_bounds_cover_everything_once(length: int, parts: int) -> None:
    for bounds in (even_bounds, chunk_bounds):
        found = [bounds(length, parts, index) for index in range(parts)]
        assert [i for start, end in found for i in range(start, end)] == list(range(length))


@given(sizes, st.integers(1, 6))
def test_chunks_are_torchs(length: int, parts: int) -> None:
    theirs = [len(chunk) for chunk in torch.arange(length).chunk(parts)] if length else []
    mine = [end - start for start, end in (chunk_bounds(length, parts, i) for i in range(parts))]
    assert [n for n in mine if n] == theirs
