from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guava_nb.errors import TrainingError
from guava_nb.parallel.replicas.bucketing import CompletionCounter, plan_buckets


def names(buckets: list[list[tuple[str, nn.Parameter]]]) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in buckets]


def parameter(size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=dtype))


def test_buckets_stand_in_the_order_in_which_backward_completes_them() -> None:
    named = {
        "a": parameter(2, torch.float64),
        "b": parameter(3),
        "frozen": parameter(3).requires_grad_(False),
        "c": parameter(3, torch.bfloat16),  # counts as float32
        "d": parameter(3),
        "e": parameter(100),
        "f": parameter(2, torch.float64),
    }
    buckets = plan_buckets(named.items(), 24)
    assert names(buckets) == [["e"], ["d", "c"], ["f"], ["b"], ["a"]]
    assert names(plan_buckets(named.items(), 1 << 20)) == [["f", "a"], ["e", "d", "c", "b"]]


def counted(model: nn.Module) -> tuple[CompletionCounter, list[int]]:
    complete: list[int] = []
    counter = CompletionCounter(plan_buckets(model.named_parameters(), 1), complete.append)
    counter.install()
    return counter, complete


def test_the_first_backward_counts_and_later_ones_report() -> None:
    model = nn.Linear(2, 1)  # bucket 0 is the bias
    counter, complete = counted(model)
    for early, reported in ((True, 0), (False, 0), (True, 2)):
        counter.begin(early)
        model(torch.ones(1, 2)).sum().backward()
        assert len(complete) == reported and counter.missing == [0, 0]
        counter.end()
    assert sorted(complete) == [0, 1]
    counter.remove()
    counter.begin()
    model(torch.ones(1, 2)).sum().backward()
    assert counter.missing == [1, 1] and not model.bias._post_accumulate_grad_hooks


def test_a_gradient_that_a_checkpoint_completes_several_times_is_waited_for() -> None:
    inner = nn.Linear(2, 2, bias=False)
    counter, complete = counted(inner)

    def backward(uses: int) -> None:
        counter.begin()
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(uses):
            x = checkpoint(inner, x, use_reentrant=True)
        x.sum().backward()
        counter.end()

    backward(2)
    backward(2)
    assert complete == [0]
    backward(1)  # fewer: never reported
    assert complete == [0]
    counter.begin()
    counter.sent.add(0)
    with pytest.raises(TrainingError, match="'weight' changed after it had been handed over"):
        inner(torch.ones(1, 2)).sum().backward()
    counter.cancel()
    backward(2)  # nothing is reported early any more
    assert complete == [0]
