"""What torch says of derivatives that spread layers cannot give is told as a sentence; the user's own mistakes are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from guava_nb.errors import TrainingError
from guava_nb.parallel.step_errors import explained, explaining_stages
from guava_nb.parallel.tensor.tensor_ops import total


class _OneRank:
    rank, size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        return [tensor]


class _Own(torch.autograd.Function):
    """As a user writes one, without the method that transforms need."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def raised_by(forward: Callable[[Tensor], Tensor]) -> BaseException:
    with pytest.raises(RuntimeError) as raised:
        torch.func.vmap(torch.func.jacrev(forward))(torch.ones(2, 3))
    return raised.value


def test_a_transform_through_a_spread_layer_is_told() -> None:
    error = raised_by(lambda x: total(x, _OneRank()))
    assert "use data mode, or" in str(explained(error, is_sharded=False))
    assert "zero_stage=1" in str(explained(error, is_sharded=True))


def test_a_function_of_the_users_own_is_their_own() -> None:
    assert explained(raised_by(_Own.apply), is_sharded=True) is None


def test_copies_of_a_sharded_model_are_told_in_the_words_in_which_torch_refuses_them() -> None:
    refuse = FSDPModule.__new__.__globals__["_unimplemented_deepcopy"]
    with pytest.raises(AssertionError) as caught:
        refuse()
    assert "the step copies the model" in str(explained(caught.value, is_sharded=True))
    assert explained(caught.value, is_sharded=False) is None
    assert explained(AssertionError(), is_sharded=True) is None


def test_parameters_that_were_given_back_are_told_where_they_can_be() -> None:
    error = RuntimeError("setStorage: ... which has storage of size 0")
    assert "gradient of a gradient" in str(explained(error, is_sharded=True))
    assert explained(error, is_sharded=False) is None
    assert explained(ValueError("storage of size 0, setup_context"), is_sharded=True) is None


def test_a_graph_that_was_used_up_is_told_in_the_words_in_which_torch_refuses_it() -> None:
    loss = torch.ones(2, requires_grad=True).pow(2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError) as raised:
        loss.backward()  # type: ignore[no-untyped-call]
    assert "leave backward(), zero_grad() and optimizer.step() out of it" in str(explained(raised.value))


class _Layer:
    kept: dict[str, Tensor] = {}


@pytest.mark.parametrize(
    "raises",
    [
        lambda: torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 13])),
        lambda: torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(3, 2)),
        lambda: "a word".float(),  # type: ignore[attr-defined]
        lambda: [1].shape,  # type: ignore[attr-defined]
        lambda: torch.zeros(1).nothing,  # type: ignore[attr-defined]
    ],
    ids=["label", "word", "text", "list", "tensor"],
)
def test_a_batch_that_does_not_fit_is_not_blamed_on_the_stages(raises: Callable[[], object]) -> None:
    with pytest.raises((IndexError, AttributeError)), explaining_stages(1, 2):
        raises()


@pytest.mark.parametrize("raises", [lambda: _Layer.kept["first"], lambda: _Layer().gone, lambda: None[0]])  # type: ignore[attr-defined,index]
def test_what_another_stage_keeps_is_missed_there(raises: Callable[[], object]) -> None:
    with pytest.raises(TrainingError, match="stage 2 of 2"), explaining_stages(1, 2):
        raises()
