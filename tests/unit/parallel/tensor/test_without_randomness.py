import pytest
import torch
from torch import nn
from torch.nn import functional

from guava_nb.parallel.tensor.without_randomness import WithoutRandomness


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: functional.dropout(torch.ones(50), 0.5), "dropout"),
        (lambda: nn.Dropout2d(0.5)(torch.ones(2, 3, 4, 4)), "dropout"),
        (lambda: functional.scaled_dot_product_attention(*[torch.ones(1, 3, 4)] * 3, dropout_p=0.5), "dropout"),
        (lambda: nn.MultiheadAttention(4, 2, dropout=0.5)(*[torch.ones(3, 1, 4)] * 3)[1], "dropout"),
        (lambda: torch.randn(5), "randn"),
        (lambda: torch.randn_like(torch.ones(5)), "randn_like"),
        (lambda: torch.randint(3, 9, (5,)), "randint"),
        (lambda: torch.randint(9, (5,)), "randint"),
        (lambda: torch.randint_like(torch.ones(5), 2, 9), "randint_like"),
        (lambda: torch.randperm(9), "randperm"),
        (lambda: torch.empty(5).bernoulli_(0.5), "bernoulli"),
    ],
)
def test_what_would_be_random_is_constant_and_told(draw, name) -> None:
    torch.manual_seed(1)
    with WithoutRandomness() as still:
        model = torch.get_rng_state()
        first = draw() if name != "dropout" else None
        torch.set_rng_state(model)
        once = draw()
        torch.manual_seed(2)
        if name == "dropout":
            torch.set_rng_state(model)  # the weights of attention are drawn too
        again = draw()
    assert torch.equal(once, again) and (first is None or torch.equal(first, once))
    assert name in still.drawn


def test_whole_numbers_stay_within_their_bounds() -> None:
    with WithoutRandomness():
        assert torch.randint(3, 9, (2,)).tolist() == [3, 3] and torch.randint(9, (2,)).tolist() == [0, 0]
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]


def test_dropout_that_drops_nothing_is_not_told() -> None:
    with WithoutRandomness() as still:
        functional.dropout(torch.ones(3), 0.0)
        functional.scaled_dot_product_attention(*[torch.ones(1, 3, 4)] * 3)
    assert still.drawn == set()
