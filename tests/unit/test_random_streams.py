"""Streams of the user's own are put back, wherever a forward finds them."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from guava_nb.random_streams import streams_kept

GLOBAL = torch.Generator().manual_seed(1)
SEVERAL = {"numpy": np.random.default_rng(1), "python": random.Random(1)}


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = [np.random.RandomState(1)]

    def forward(self) -> list[float]:
        drawn = [float(torch.rand((), generator=GLOBAL)), self.own[0].rand()]
        return [*drawn, SEVERAL["numpy"].random(), SEVERAL["python"].random()]


def test_a_second_run_draws_what_the_first_one_drew() -> None:
    model = nn.Sequential(Drawing())
    with streams_kept(model):
        first = model[0]()
    assert model[0]() == first
    assert not set(model[0]()) & set(first)
