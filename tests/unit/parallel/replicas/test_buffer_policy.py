from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from guava_nb.parallel.replicas.buffer_policy import (
    ChangeFacts,
    change_of,
    combined,
    facts_of,
    followed_parameters,
    policy_of,
    taken,
    unused_in,
    way_of,
)


def merged(
    changes: list[Any],
    rows: list[int],
    policy: str = "auto",
    name: str = "x",
    counted: dict[str, bool] | None = None,
    forwards: list[int] | None = None,
) -> tuple[list[float], bool]:
    """What becomes of changes, and whether a person is told."""
    tensors = [torch.tensor(change) for change in changes]
    facts = [
        ChangeFacts.of(facts_of(*one).tolist()) for one in zip(tensors, rows, forwards or [1] * len(rows), strict=True)
    ]

    def alike(places: Sequence[int]) -> bool:
        return all(torch.equal(tensors[places[0]], tensors[place]) for place in places)

    way, is_told = way_of(
        name, policy, not tensors[0].is_floating_point(), alike, facts, rows, {} if counted is None else counted
    )
    wide = [change.double() for change in tensors]
    return combined(way, wide, rows, forwards or [1] * len(rows)).tolist(), is_told


@pytest.mark.parametrize(
    ("changes", "rows", "becomes", "is_told"),
    [
        ([[1], [1]], [16, 16], [1.0], False),  # a counter of steps
        ([[1], [1]], [1, 1], [1.0], False),
        ([[1, 1, 1], [1, 1, 1]], [3, 3], [1.0, 1.0, 1.0], False),  # the ages of three codes
        ([[0.25], [0.25]], [3, 5], [0.25], False),  # what the data does not matter for
        ([[16], [16]], [16, 16], [32.0], False),  # samples, in equal shares
        ([[3], [5]], [3, 5], [8.0], False),
        ([[3.0], [5.0]], [3, 5], [8.0], False),
        ([[2], [1]], [2, 1], [3.0], False),
        ([[8, 8], [8, 8]], [16, 16], [16.0, 16.0], False),  # labels of balanced shares
        ([[1.0, 2.0], [3.0, 0.0]], [3, 3], [4.0, 2.0], False),  # codes that were chosen
        ([[48], [48]], [4, 4], [96.0], False),  # tokens, twelve a sample
        ([[4], [7]], [16, 16], [11.0], True),  # right predictions
        ([[0.5], [1.0]], [1, 3], [0.875], True),  # a moving average of what the data is
        ([[-3], [-3]], [3, 3], [-3.0], False),
    ],
)
def test_what_becomes_of_changes(changes: list[Any], rows: list[int], becomes: list[float], is_told: bool) -> None:
    assert merged(changes, rows) == (becomes, is_told)


@pytest.mark.parametrize(("before", "is_told"), [([[4], [4]], True), ([[1], [1]], False), ([[-12], [-12]], False)])
def test_a_count_of_samples_that_goes_back_is_told(before: list[Any], is_told: bool) -> None:
    """As `ptr = (ptr + n) % 16` does on two workers at once; a counter of steps may go round, since each has it right."""
    counted: dict[str, bool] = {}
    merged(before, [4, 4], counted=counted)
    assert merged([[-12], [-12]], [4, 4], counted=counted) == ([-12.0], is_told)
    assert merged([[1], [1]], [4, 4], counted=counted) == ([1.0], False)


def test_what_steps_told_of_a_count_decides_where_a_smaller_batch_fits_both() -> None:
    steps: dict[str, bool] = {}
    assert merged([[2], [2], [2]], [3, 3, 2], counted=steps) == ([2.0], False)
    assert merged([[2], [2], [2]], [2, 2, 2], counted=steps) == ([2.0], False)  # two a step, not the samples
    samples: dict[str, bool] = {}
    assert merged([[4], [4]], [4, 4], counted=samples) == ([8.0], False)
    assert merged([[1], [1]], [1, 1], counted=samples) == ([2.0], False)  # the samples, not a step


def test_statistics_of_norms_are_averaged_and_their_batches_counted_once() -> None:
    assert merged([[1.0], [2.0]], [1, 3], "sum", "norm.running_mean") == ([1.75], False)
    assert merged([[2], [1]], [1, 3], "sum", "norm.num_batches_tracked") == ([2.0], False)


@pytest.mark.parametrize(("policy", "becomes"), [("average", 1.75), ("first", 1.0), ("sum", 3.0)])
def test_a_choice_holds_and_nothing_is_told(policy: str, becomes: float) -> None:
    assert merged([[1.0], [2.0]], [1, 3], policy) == ([becomes], False)


def test_a_policy_is_found_by_name() -> None:
    text = "vq.*=first, hist=sum,average"
    assert [policy_of(text, name) for name in ("vq.size", "hist", "other")] == ["first", "sum", "average"]
    assert policy_of("hist=sum", "other") == "auto"
    with pytest.raises(ValueError, match="'mean' is not one of"):
        policy_of("mean", "x")


@given(
    st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=2),
    st.sampled_from(["int64", "float32", "bool", "complex64", "bfloat16"]),
)
def test_a_change_brings_a_tensor_to_where_it_was_measured(values: list[int], kind: str) -> None:
    dtype = getattr(torch, kind)
    before, after = (torch.tensor([value % 1000 if dtype != torch.int64 else value]).to(dtype) for value in values)
    change = change_of(before, after, torch.float64)
    assert torch.equal(taken(before, change.double()), after)


def test_truth_values_stay_truth_values() -> None:
    true, false = torch.tensor([True]), torch.tensor([False])
    assert taken(false, torch.tensor([2.0])).equal(true) and taken(true, torch.tensor([-2.0])).equal(false)


def _net(frozen: int, trained: int) -> nn.Module:
    net = nn.Module()
    net.a = nn.Parameter(torch.zeros(frozen), requires_grad=False)
    net.b = nn.Parameter(torch.zeros(trained))
    return net


@pytest.mark.parametrize("number", [int, float])
@pytest.mark.parametrize(
    ("changes", "rows", "forwards", "known", "becomes", "is_told"),
    [
        ([2, 2], [4, 4], [2, 2], None, 2, False),  # a counter of forwards
        ([2, 2], [2, 2], [2, 2], None, 2, True),  # of forwards or of samples, which one each does not tell
        ([2, 2], [2, 2], [2, 2], False, 2, False),  # it was one of forwards before
        ([2, 2], [2, 2], [2, 2], True, 4, False),  # it was one of samples before
        ([2, 1], [3, 1], [2, 1], None, 2, False),  # of forwards; a batch had fewer samples than there are workers
        ([2, 1], [2, 1], [2, 1], False, 2, False),
        ([4, 2], [4, 2], [2, 1], None, 6, False),  # of samples
        ([3], [3], [3], None, 3, False),  # one worker alone had samples
    ],
)
def test_counters_of_several_batches_in_one_step(
    number: type,
    changes: list[int],
    rows: list[int],
    forwards: list[int],
    known: bool | None,
    becomes: int,
    is_told: bool,
) -> None:
    counted = {} if known is None else {"x": known}
    found = merged([[number(one)] for one in changes], rows, counted=counted, forwards=forwards)
    assert found == ([becomes], is_told)


@pytest.mark.parametrize(
    ("changes", "forwards", "known", "becomes", "is_told"),
    [
        (
            [0.19, 0.271, 0.271],
            [2, 3, 3],
            None,
            0.271,
            False,
        ),  # a moving average of the weights: one had no sample of a batch
        ([0.271, 0.19], [3, 2], False, 0.271, False),  # a lone one, of what was alike before
        ([0.19, 0.271], [2, 3], None, 0.271, True),  # it may as well go by the samples
        ([0.2, 0.3, 0.4], [2, 3, 3], False, 0.3, True),  # it does
        ([0.2, 0.4], [3, 3], False, 0.3, True),
    ],
)
def test_a_replica_with_fewer_forwards_takes_what_the_others_have(
    changes: list[float], forwards: list[int], known: bool | None, becomes: float, is_told: bool
) -> None:
    counted = {} if known is None else {"x": known}
    found, told = merged([[one] for one in changes], [4] * len(changes), counted=counted, forwards=forwards)
    assert (found, told) == ([pytest.approx(becomes)], is_told)


def test_parameters_without_gradient_are_followed_where_a_copy_is_small() -> None:
    def names(net: nn.Module) -> list[str]:
        return [name for name, _ in followed_parameters(net)]

    assert names(_net(10, 1)) == ["a"]
    assert names(_net((16 << 20) + 1, 1)) == []
    assert names(_net((16 << 20) + 1, (16 << 20) + 1)) == ["a"]


def test_no_change_counts_nothing() -> None:
    def told(change: Tensor) -> list[float]:
        return facts_of(change, 3).tolist()

    assert told(torch.zeros(2)) == [0.0, 0.0, 1.0, 1.0]
    assert told(torch.ones(3)) == [1.0, 1.0, 1.0, 1.0]
    assert told(torch.tensor([1.5, 1.5])) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_as_good_as_infinite_has_no_difference(dtype: torch.dtype) -> None:
    before, after = (
        torch.tensor([1e30, -1e20, 2e30, 1.0], dtype=dtype),
        torch.tensor([0.85, 2.0, 2e30, 1e30], dtype=dtype),
    )
    assert torch.equal(taken(before, change_of(before, after)), after)


def test_what_was_infinite_or_no_number_has_no_difference() -> None:
    inf, nan = float("inf"), float("nan")
    before = torch.tensor([-inf, inf, nan, inf, -inf, nan, 1.0, 1.0])
    after = torch.tensor([-inf, inf, nan, 3.0, inf, 2.0, inf, nan])
    change = change_of(before, after)
    assert change[:6].tolist() == [0, 0, 0, 3, inf, 2]
    assert not change[6:].isfinite().any()  # a number that became none is found by it
    assert torch.allclose(taken(before, change)[:6], after[:6], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["same", "average", "sum"])
@pytest.mark.parametrize("first", [float("inf"), float("-inf"), float("nan"), 1e30])
def test_what_was_infinite_may_become_nothing(first: float, way: Any, dtype: torch.dtype) -> None:
    """The least value of images is 0; beside it stands one that no shard saw."""
    before = torch.tensor([first, first, first, 2.0], dtype=dtype)
    after = torch.tensor([0.0, first, 0.5, 0.0], dtype=dtype)
    change = combined(way, [change_of(before, after)] * 3, [3, 3, 2], [1, 1, 1])
    times = 3 if way == "sum" else 1
    expected = torch.tensor([0.0, first, 0.5 * times, 2.0 - 2.0 * times], dtype=dtype)
    assert torch.allclose(taken(before, change), expected, equal_nan=True)


def test_patterns_that_fit_no_buffer_are_found() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    assert unused_in("auto", model) == unused_in("0.running_*=sum, 2.weight=first, *=average", model) == []
    assert unused_in("0.runing_mean=sum, 1.weight=first,0.*=first", model) == ["0.runing_mean", "1.weight"]
