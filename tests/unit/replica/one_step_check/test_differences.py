from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guava_nb.replica.one_step_check.differences import Measured, differ, differences, is_spanned, is_unlike


def measured(loss: float, **gradients: list[float]) -> Measured:
    return Measured(loss, {name: torch.tensor(one, dtype=torch.float64) for name, one in gradients.items()}, {}, [], [])


def test_gradients_are_compared_with_the_size_of_the_whole_gradient() -> None:
    one = measured(2.0, a=[3.0, 4.0], b=[0.0])
    assert differences(one, measured(2.0, a=[3.0, 4.0], b=[1e-9]))[1] == pytest.approx(2e-10)
    by_loss, by_gradient, worst = differences(one, measured(1.0, a=[3.0, 4.0], b=[5.0]))
    assert (by_loss, worst) == (0.5, "b") and by_gradient == pytest.approx(5 / 50**0.5)
    assert not differ(one, one) and differ(one, measured(2.0, a=[3.0, 4.0])) is False
    assert differ(one, measured(float("nan"), a=[3.0, 4.0])) and differ(one, measured(2.0, a=[float("inf"), 4.0]))


@pytest.mark.parametrize(
    ("a", "b", "unlike"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), True),
        (torch.ones(2), torch.ones(3), True),
        (torch.ones(2), None, True),
        (torch.ones(2), torch.full((2,), 1.0001), False),  # rounding of single precision
        (torch.ones(2).double(), torch.full((2,), 1.0001).double(), True),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False),
    ],
)
def test_tensors_are_unlike_beyond_the_rounding_of_their_precision(a: Tensor, b: Tensor | None, unlike: bool) -> None:
    assert is_unlike(a, b) == unlike


def test_a_gradient_of_wrong_weights_is_a_weighted_sum_of_the_pieces() -> None:
    parts = [measured(0, a=[1.0, 0.0, 0.0, 1.0, 2.0]), measured(0, a=[0.0, 1.0, 0.0, 3.0, 0.0])]
    assert is_spanned(measured(0, a=[2.0, -1.0, 0.0, -1.0, 4.0]), parts)
    assert not is_spanned(measured(0, a=[2.0, -1.0, 0.5, -1.0, 4.0]), parts)
    assert not is_spanned(measured(0, a=[2.0, -1.0, 0.0, -1.0, 4.0]), [*parts, measured(0, a=[float("nan")] * 5)])
