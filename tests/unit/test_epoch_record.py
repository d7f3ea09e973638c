"""What is noted of an epoch's order repeats it, and how a batch looks is told without keeping it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.epoch_record import EpochRecord, look_of

SAMPLES = 11


def drawn(feed: LoaderFeed, epochs: int) -> list[list[int]]:
    """The ids of each epoch, in the order in which they came."""
    return [[i for batch in feed.epoch() for i in batch.sample_ids] for _ in range(epochs)]


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(SAMPLES)), 4, **options)


def test_seeds_of_the_default_stream_give_the_same_orders_wherever_it_stood() -> None:
    torch.manual_seed(3)
    torch.rand(5)  # in the middle of its stream
    feed = LoaderFeed(loader(shuffle=True))
    orders = drawn(feed, 3)
    seeds = feed.record.seeds
    assert feed.record.kind == "seeds" and sorted(seeds) == [0, 1, 2]
    again = [list(RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(seeds[e]))) for e in range(3)]
    assert again == orders


def test_a_generator_that_was_just_seeded_tells_its_seed() -> None:
    stream = torch.Generator().manual_seed(9)
    feed = LoaderFeed(loader(shuffle=True, generator=stream))
    orders = drawn(feed, 2)
    assert (feed.record.kind, feed.record.stream_seed) == ("stream", 9)
    own = torch.Generator().manual_seed(9)
    again = []
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_(generator=own)
        again.append(list(RandomSampler(range(SAMPLES), generator=own)))
    assert again == orders


def test_a_generator_in_the_middle_of_its_stream_tells_nothing() -> None:
    stream = torch.Generator().manual_seed(9)
    torch.rand(1, generator=stream)
    feed = LoaderFeed(loader(shuffle=True, generator=stream))
    drawn(feed, 1)
    assert (feed.record.kind, feed.record.stream_seed) == ("stream", None)


def test_noting_draws_no_random_number() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    EpochRecord(loader(shuffle=True)).begin(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (loader(), "in turn"),
        (loader(shuffle=True, batch_sampler=None), "seeds"),
        (loader(sampler=RandomSampler(range(SAMPLES), replacement=True)), "own"),
        (loader(sampler=RandomSampler(range(SAMPLES), num_samples=5)), "own"),
        (loader(sampler=RandomSampler(range(SAMPLES), generator=torch.Generator())), "own"),
        (DataLoader(TensorDataset(torch.arange(4)), batch_sampler=[[0, 1], [2, 3]]), "own"),
        ([torch.zeros(2)], "own"),
    ],
)
def test_orders_of_other_samplers_are_their_own(made: Any, kind: str) -> None:
    assert EpochRecord(made).kind == kind


def test_a_look_has_dtypes_and_shapes_only() -> None:
    batch = {"x": torch.zeros(2, 3), "y": [torch.zeros(2, dtype=torch.int64), "name"]}
    assert look_of(batch) == {"x": ("float32", (2, 3)), "y": [("int64", (2,)), "str"]}
