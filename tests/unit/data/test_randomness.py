"""What objects keep is compared with an earlier moment, and put back as it was."""

import functools
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.randomness import KeptByObjects

calls = 0


def counting(value):
    global calls
    calls += 1
    return value


def around():
    held = 0

    def counting_here():
        nonlocal held
        held += 1
        return held

    return counting_here


class Holder:
    def __init__(self):
        self.count, self.words, self.inner, self.last = 0, ["a"], {"n": 1}, deque([1, 2])
        self.stream, self.own, self.torchs = (
            np.random.default_rng(0),
            random.Random(0),
            torch.Generator().manual_seed(0),
        )
        self.array, self.tensor, self.large = np.zeros(3), torch.zeros(3), torch.zeros(1 << 18)
        self.function, self.bound, self.closed = counting, functools.partial(counting, 1), around()


def move(holder):
    holder.count += 1
    holder.words.append("b")
    holder.inner["n"] = 2
    holder.last.append(3)
    holder.array += 1
    holder.tensor.add_(1)
    holder.function(0)
    holder.closed()


def places(holder):
    return [
        holder.count, list(holder.words), dict(holder.inner), list(holder.last), holder.array.tolist(), holder.tensor.tolist(),
        calls,
    ]  # fmt: skip


def test_what_moved_is_named_and_goes_back():
    holder = Holder()
    before, kept = places(holder), KeptByObjects({"it": holder})
    drawn = [holder.stream.random(), holder.own.random(), torch.rand((), generator=holder.torchs).item()]
    assert KeptByObjects({"it": holder}).changed_since(kept) == set()  # streams do not count
    move(holder)
    found = KeptByObjects({"it": holder}).changed_since(kept)
    assert found == {
        "it.count",
        "it.words",
        "it.inner.n",
        "it.last",
        "it.array",
        "it.tensor",
        "it.closed.held",
        "calls",
    }
    kept.put_back()
    assert places(holder) == before and holder.closed() == 1
    assert drawn == [holder.stream.random(), holder.own.random(), torch.rand((), generator=holder.torchs).item()]


def test_a_large_tensor_that_is_written_into_is_seen():
    holder = Holder()
    kept = KeptByObjects({"it": holder})
    holder.large[5] = 1.0
    assert KeptByObjects({"it": holder}).changed_since(kept) == {"it.large"}


class Counting(Dataset):
    """Counts its calls and draws from a stream of its own; its samples are stacked on the second axis."""

    def __init__(self):
        self.calls, self.stream = 0, np.random.default_rng(0)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.calls += 1
        return torch.full((4,), self.calls + self.stream.random())


class Stack:
    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        return torch.stack(samples, 1) * self.calls, torch.arange(len(samples))


def batches_of(feed_or_loader):
    return [[part.tolist() for part in batch] for batch in feed_or_loader]


@pytest.mark.parametrize("looked", ["read", "peek", "example"])
def test_looking_at_a_loader_moves_nothing_that_its_objects_keep(looked):
    plain = batches_of(DataLoader(Counting(), 3, collate_fn=Stack()))
    feed = LoaderFeed(
        DataLoader(Counting(), 3, collate_fn=Stack()), batch="cut on axis 1: inputs" if looked != "read" else None
    )
    if looked == "peek":
        feed.peek(2)
    elif looked == "example":
        feed.example(1)
    assert batches_of(loaded.batch for loaded in feed.epoch()) == plain
