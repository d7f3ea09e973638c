"""Full states put together from boxes, and taken apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from guava_nb.errors import CheckpointError
from guava_nb.parallel.state.full_state import (
    FullOrder,
    StatePiece,
    assemble,
    assemble_optimizer,
    optimizer_pieces,
    pieces_of,
)
from guava_nb.parallel.state.gradient_norm import gradient_square
from guava_nb.parallel.state.shard_layout import Layout, chunk_bounds
from guava_nb.parallel.tensor.tensor_layers import ranges_of


@st.composite
def spreads(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[Layout]]]:
    """A tensor, cut in units along one dim over ranks, and its parts' rows over replicas."""
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    dim = draw(st.integers(0, len(shape) - 1))
    unit, repeats, ranks, replicas = (draw(st.integers(1, 3)) for _ in range(4))
    shape[dim] *= unit * repeats
    full = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)
    layouts = []
    for ranges in ranges_of(shape[dim], ranks, unit, repeats):
        part = Layout.ranges(shape, dim, ranges)
        rows = part.local[0]
        layouts.append([part.rows(*chunk_bounds(rows, replicas, r)) for r in range(replicas)])
    return full, layouts


@given(spreads())
@settings(max_examples=150, deadline=None)
def test_parts_of_parts_make_the_whole(spread: tuple[torch.Tensor, list[list[Layout]]]) -> None:
    full, layouts = spread
    pieces, square = [], 0.0
    for tp, parts in enumerate(layouts):
        for dp, layout in enumerate(parts):
            local = layout.cut(full)
            assert tuple(local.shape) == layout.local
            assert layout.counted(dp, tp)
            pieces.append(pieces_of("w", local, layout))
            parameter = nn.Parameter(local.clone())
            parameter.grad = local
            square += float(gradient_square({"w": parameter}, {"w": layout}, dp, tp))
    assert torch.equal(assemble(pieces)["w"], full)
    assert square == pytest.approx(float(full.square().sum()))


def test_a_copy_counts_once() -> None:
    layout = Layout.whole((2, 3))
    assert [layout.counted(dp, tp) for dp in (0, 1) for tp in (0, 1)] == [True, False, False, False]
    assert replace(layout, data_copies=False).counted(1, 0)


def test_pieces_that_do_not_fit_are_refused() -> None:
    half = StatePiece("w", torch.ones(2, 3), (4, 3), (0, 0))
    with pytest.raises(CheckpointError, match=r"12 elements, its 1 pieces hold 6"):
        assemble([[half]])
    with pytest.raises(CheckpointError, match=r"shape \(4, 3\) on one worker and \(5, 3\)"):
        assemble([[half], [replace(half, shape=(5, 3), offsets=(2, 0))]])


def test_scalars_and_empty_tensors_survive() -> None:
    values = {"a": torch.tensor(3.0), "b": torch.empty(0, 4), "c": torch.tensor(7)}
    pieces = [p for i, (n, t) in enumerate(values.items()) for p in pieces_of(n, t, Layout.whole(t.shape), i)]
    found = assemble([list(reversed(pieces))])
    assert list(found) == list(values)
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in values.items())


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adafactor"])
def test_an_optimizers_state_round_trips(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    words = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(
        [{"params": list(model[1].parameters()), "lr": 0.5}, {"params": list(model[0].parameters())}], lr=0.1, **words
    )
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model[0].weight] |= {"losses": [0.5, 0.25], "none": []}  # the user's own lists are no pieces
    order = FullOrder.of(model, optimizer)
    named = dict(model.named_parameters())
    layouts = {n: Layout.whole(p.shape) for n, p in named.items()}
    names = {id(p): n for n, p in named.items()}
    pieces = optimizer_pieces(optimizer, names, order.groups, layouts, order, lambda name: True)
    found, theirs = assemble_optimizer([pieces]), optimizer.state_dict()
    assert found["param_groups"] == theirs["param_groups"]
    for number, values in theirs["state"].items():
        for key, value in values.items():
            ours = found["state"][number][key]
            assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value
