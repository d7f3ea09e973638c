"""The committed values of buffers beside the live ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from guava_nb.replica.buckets import build_layout
from guava_nb.replica.buffers import BufferBook


def book_of(model: nn.Module) -> BufferBook:
    return BufferBook(model, build_layout(model, 1024).buffers)


def test_a_state_is_read_as_committed_while_a_shard_has_moved_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].register_buffer("seen", torch.zeros(()))
    book = book_of(model)
    book.begin_shard()
    model(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))
    model[0].seen.fill_(float("nan"))
    moved = {name: value.clone() for name, value in model.named_buffers()}
    with book.as_committed():
        assert model[0].seen == 0 and model[1].num_batches_tracked == 0 and not model[1].running_mean.any()
    assert model[1].num_batches_tracked == 1 and torch.equal(model[1].running_mean, moved["1.running_mean"])
    assert book.first_not_finite() == "0.seen"
    book.restore()
    assert model[0].seen == 0 and model[1].num_batches_tracked == 0


def test_few_whole_numbers_that_changed_are_named_where_no_policy_is() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for name in ("pointer", "still", "chosen"):
        model[0].register_buffer(name, torch.zeros(1, dtype=torch.long))
    book = book_of(model)
    for value in (model[0].pointer, model[0].chosen, model[1].num_batches_tracked):
        value.fill_(16)
    book.save_all()
    assert {name: value.tolist() for name, value in book.counted("0.ch*=first").items()} == {"0.pointer": [16]}


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_sharded_parameters_are_compared_without_asking_other_ranks(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank goes back after an error of its own, and others may never come to the same comparison."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).requires_grad_(False))
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.detach(), alone, [Shard(0)]), requires_grad=False)
    book = book_of(model)
    first = model[1].weight.to_local().clone()
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **words: pytest.fail("it waits for other ranks"))
    book.begin_shard()
    model[1].weight.data.to_local().fill_(float("inf"))
    assert book.first_not_finite() == "1.weight"
    book.restore()
    assert torch.equal(model[1].weight.to_local(), first)
