from __future__ import annotations

import pytest
import torch

from guava_nb.errors import TrainingError
from guava_nb.replica.buckets import BUFFERS, Bucket, pack_present
from guava_nb.replica.buffer_merge import BufferMerge, changes_in

BUCKET = Bucket(BUFFERS, ("a", "steps", "b"), ((2,), (), (2,)), torch.float64, frozenset({1}))


def merged(
    parts: list[dict[int, list[float]]], rows: list[int], policies: str = "auto"
) -> tuple[dict[int, list[float]], tuple[str, ...]]:
    merge = BufferMerge(BUCKET, rows, policies, {})
    for shard, part in reversed(list(enumerate(parts))):
        assert not merge.complete
        flat = torch.tensor([value for _, values in sorted(part.items()) for value in values], dtype=torch.float64)
        merge.add(shard, flat, pack_present([i in part for i in range(3)]))
    assert merge.complete
    present, flat = merge.result(BUCKET.present_bytes)
    return {i: change.tolist() for i, change in changes_in(BUCKET, flat, present).items()}, merge.unlike


def test_buffers_that_moved_in_some_shards_only_are_not_taken_for_each_other() -> None:
    """Both have two elements: added up in place they would be one."""
    assert merged([{0: [1.0, 2.0]}, {2: [4.0, 8.0]}], [1, 3]) == ({0: [0.25, 0.5], 2: [3.0, 6.0]}, ("a", "b"))


def test_a_shard_without_samples_does_not_count() -> None:
    assert merged([{0: [0.5, 0.5], 1: [1.0]}, {}], [4, 0]) == ({0: [0.5, 0.5], 1: [1.0]}, ())


def test_nothing_moved() -> None:
    assert merged([{}, {}], [4, 2]) == ({}, ())


def test_the_option_decides_by_name() -> None:
    parts = [{0: [1.0, 0.0], 2: [1.5, 0.0]}, {0: [0.0, 3.5], 2: [0.0, 3.0]}]
    assert merged(parts, [2, 2], "a=sum,b=first") == ({0: [1.0, 3.5], 2: [1.5, 0.0]}, ())


def test_what_is_not_as_large_as_it_says_is_refused() -> None:
    with pytest.raises(TrainingError, match="sent 3 elements for the buffers a, which have 2"):
        BufferMerge(BUCKET, [1], "auto", {}).add(0, torch.zeros(3), pack_present([True, False, False]))
