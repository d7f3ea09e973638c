"""How many micro-batches, how large, and how values are cut into them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.parallel.pipeline.microbatches import (
    WholeParts,
    check_micro_batches,
    count_micro_batches,
    cut_rows,
    micro_batch_sizes,
)

quick = settings(max_examples=80, deadline=None)


# ------------------------------------------------------------------------------------------------------- micro-batches


@quick
@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_add_up_and_differ_by_one_at_most(rows: int, count: int) -> None:
    count = min(rows, count)
    sizes = micro_batch_sizes(rows, count)
    assert sum(sizes) == rows
    assert len(sizes) == count
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@quick
@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 40), st.integers(1, 80), st.integers(1, 8))
def test_counts_never_leave_a_part_empty_and_fit_the_schedule(
    schedule: str, wanted: int, rows: int, ranks: int
) -> None:
    count = count_micro_batches(schedule, wanted, rows, ranks)
    assert 1 <= count <= min(wanted, rows)
    check_micro_batches(schedule, count, ranks)
    if schedule != "interleaved":
        assert count == min(wanted, rows)


def test_counts_that_a_schedule_cannot_do_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"5 micro-batches in 5 // 2 = 2 rounds.*use micro_batches=4"):
        check_micro_batches("interleaved", 5, 2)
    with pytest.raises(ConfigError, match="micro_batches is 0"):
        check_micro_batches("gpipe", 0, 2)


class Pair(NamedTuple):
    first: Any
    second: Any


@quick
@given(st.integers(1, 50), st.integers(1, 9))
def test_cut_parts_make_the_batch_again(rows: int, count: int) -> None:
    sizes = micro_batch_sizes(rows, min(rows, count))
    numbers = torch.arange(rows * 3).view(rows, 3)
    mask = torch.ones(rows + 1, 2)
    batch = {"x": [numbers, Pair(numbers[:, 0], "text")], "mask": mask, "scalar": torch.tensor(3.0), "none": None}
    parts = cut_rows(batch, rows, sizes)
    assert [len(part["x"][0]) for part in parts] == sizes
    assert torch.equal(torch.cat([part["x"][0] for part in parts]), numbers)
    assert torch.equal(torch.cat([part["x"][1].first for part in parts]), numbers[:, 0])
    assert all(part["mask"] is mask and part["x"][1].second == "text" and part["none"] is None for part in parts)


def test_a_part_may_be_written_into_while_the_graph_of_another_waits() -> None:
    x, weight = torch.ones(4, 3), torch.ones(3, requires_grad=True)
    losses = []
    for part in cut_rows(x, 4, [2, 2]):
        part.mul_(2)
        losses.append((part * weight).sum())
    sum(losses, torch.zeros(())).backward()  # autograd would find that the first part was changed with the second
    assert torch.equal(weight.grad, torch.full((3,), 8.0)) and torch.equal(x, torch.full((4, 3), 2.0))


def test_what_all_parts_share_must_not_be_written_into() -> None:
    parts = cut_rows({"x": torch.ones(4, 3), "anchors": torch.ones(7)}, 4, [2, 2])
    whole = WholeParts(parts)
    parts[0]["x"].mul_(2)
    whole.check()
    parts[1]["anchors"].mul_(2)
    with pytest.raises(
        ConfigError, match=r"writes into a tensor of shape \(7,\) of the batch that all micro-batches share"
    ):
        whole.check()
    WholeParts([]).check()


def test_a_batch_without_its_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch of 4 samples holds tensors of shape \(3, 4\), \(\)"):
        cut_rows([torch.zeros(3, 4), torch.zeros(())], 4, [2, 2])
    assert cut_rows("text", 4, [2, 2]) == ["text", "text"]
