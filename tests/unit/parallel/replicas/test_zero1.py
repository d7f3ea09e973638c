"""Owners of whole parameters under ZeRO 1."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from guava_nb.parallel.replicas.zero1 import owners

sizes = st.integers(0, 9)


@given(st.lists(sizes, min_size=1, max_size=8), st.integers(1, 4))
def test_owners_share_alike(lengths: list[int], ranks: int) -> None:
    named = {f"p{i}": nn.Parameter(torch.empty(n)) for i, n in enumerate(lengths)}
    owner = owners(named, ranks)
    assert set(owner) == set(named)
    load = [sum(max(1, named[n].numel()) for n, rank in owner.items() if rank == r) for r in range(ranks)]
    assert max(load) - min(load) <= max(1, *lengths)
