import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.step_check.batch_traits import BatchTraits


def batch(**parts):
    return {
        "x": torch.linspace(1, 2, 8).reshape(4, 2),
        "y": torch.tensor([1, 2, 3, 1]),
        "w": np.ones(4),
        "c": 0.5,
        **parts,
    }


@pytest.mark.parametrize(
    ("changed", "text", "row"),
    [
        ({}, None, 0),
        ({"x": torch.full((4, 2), 9.0)}, None, 0),
        ({"y": torch.tensor([1, 2, -100, 1])}, "part y has values below 0", 2),
        ({"y": torch.tensor([1, 2, 3, 9])}, "part y has entries that are 9", 3),
        ({"y": torch.tensor([1, 2, 3, 8])}, None, 0),
        ({"w": np.array([1.0, 2.0, 1.0, 1.0])}, "part w is not 1 everywhere any more", 1),
        ({"w": np.zeros(4)}, "part w is not 1 everywhere any more", 0),
        ({"c": 0.7}, "part c is not 0.5 everywhere any more", 0),
        ({"x": torch.tensor([[1.0, 1.5]] * 3 + [[float("nan"), 1.0]])}, "part x has values that are no numbers", 3),
        ({"mask": torch.tensor([True] * 4)}, "part mask is a part that no batch had before", 0),
        (
            {"text": ["a", "b"], "none": None, "empty": torch.zeros(0), "half": torch.zeros(2, dtype=torch.complex64)},
            None,
            0,
        ),
    ],
)
def test_what_no_batch_had_before_is_told_once(changed, text, row):
    traits = BatchTraits()
    traits.compare_with([9])
    assert traits.see(batch(), 4) is None
    news = traits.see(batch(**changed), 4)
    assert (news and news.text, news.row if news else 0) == (text, row)
    assert traits.see(batch(**changed), 4) is None and traits.see(batch(), 4) is None


@given(st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=6), min_size=1, max_size=30))
def test_there_is_little_news_however_many_batches_come(values):
    traits = BatchTraits()
    traits.compare_with([0, 1])
    news = [traits.see({"y": torch.tensor(one)}, len(one)) for one in values]
    assert news[0] is None and sum(one is not None for one in news) <= 4
