"""What a rank of a group reports of values that are not finite."""

from __future__ import annotations

import time
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from guava_nb.replica.buckets import build_layout
from guava_nb.replica.buffers import BufferBook
from guava_nb.replica.group_replica import GroupReplica
from guava_nb.replica.shard import ShardResult

NAN = float("nan")


def reported(buffer: float, square: float = 1.0, loss: tuple[float, float, bool] = (1.0, 2.0, True)) -> ShardResult:
    """The report of a rank whose step left a buffer and a gradient like this."""
    model = nn.Sequential(nn.Linear(3, 4))
    model[0].register_buffer("seen", torch.zeros(()))
    layout = build_layout(model, 1024)
    book = BufferBook(model, layout.buffers)
    book.begin_shard()
    model[0].seen.fill_(buffer)
    rank: Any = SimpleNamespace(
        loss_scale=1.0, _buffers=book, layout=layout, _sums=lambda work, sums: loss,
        preprocessing=SimpleNamespace(total=lambda counts: None),
    )  # fmt: skip
    rank._full_name = MethodType(GroupReplica._full_name, rank)
    part: Any = SimpleNamespace(reports=True, gradient_square=lambda: square, nonfinite=lambda: "0.weight")
    return GroupReplica._result(rank, part, SimpleNamespace(rows=2), [], [], time.monotonic())  # type: ignore[arg-type]


def test_a_buffer_that_is_not_finite_is_reported_though_loss_and_gradient_are() -> None:
    found = reported(NAN)
    assert (found.finite, found.nonfinite) == (False, "0.seen")
    assert (reported(1.0).finite, reported(1.0).nonfinite) == (True, "")


@pytest.mark.parametrize("loss", [(1.0, 2.0, True), (NAN, 2.0, False)])
def test_a_gradient_that_is_not_finite_is_reported_before_a_buffer(loss: tuple[float, float, bool]) -> None:
    found = reported(NAN, NAN, loss)
    assert (found.finite, found.nonfinite) == (False, "0.weight")
