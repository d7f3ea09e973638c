"""What a worker says and refuses where its part of a step does not fit the memory."""

from __future__ import annotations

import pytest
import torch

from guava_nb.data.codec import pack
from guava_nb.protocol.messages import BatchShard
from guava_nb.replica.preprocess import cut_at
from guava_nb.worker.smaller_pieces import axes_for, memory_advice


def shard(source: int, axes: tuple[bytes, ...] = ()) -> BatchShard:
    return BatchShard(
        run_id="run-1",
        generation=0,
        step=0,
        shard=0,
        rows=2,
        global_rows=2,
        batch=pack(())[0],
        source=source,
        axes=axes,
    )


def test_what_was_loaded_here_is_read_here_and_what_came_was_read_before() -> None:
    part = (torch.zeros(2, 3), torch.zeros(2))
    assert axes_for(shard(0, (b"told",)), [part], [2]) == (b"told",)
    (marks,) = axes_for(shard(1), [part], [2])
    assert [piece[0].shape[0] for piece in cut_at(part, marks, [(0, 1), (1, 2)])] == [1, 1]


@pytest.mark.parametrize(
    ("request_id", "rows", "pieces", "words"),
    [(1, 4, 1, "validation"), (0, 4, 2, "4 samples, does not fit"), (0, 2, 2, "One sample alone")],
)
def test_advice_is_true_of_the_work(request_id: int, rows: int, pieces: int, words: str) -> None:
    assert words in memory_advice(None, request_id, rows, pieces)
