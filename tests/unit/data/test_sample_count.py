"""How many samples a batch has, by what is in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from guava_nb.data.sample_count import are_fields, count_rows, has_rows, num_rows
from guava_nb.errors import ConfigError


def test_the_first_tensor_or_array_with_axes_counts() -> None:
    batch = {"scale": torch.tensor(2.0), "x": [np.zeros((5, 2)), torch.zeros(9)]}
    assert count_rows(batch) == num_rows(batch) == 5
    assert count_rows({"names": ["a", "b"]}) is None and num_rows({"names": ["a", "b"]}) == 2
    with pytest.raises(ConfigError, match="does not tell how many samples"):
        num_rows(7)


@pytest.mark.parametrize(("batch", "rows"), [(torch.zeros(4), 4), ({"y": [1, 2, 3]}, 3), ((torch.zeros(6), "x"), 6)])
def test_something_in_a_batch_is_so_long(batch: Any, rows: int) -> None:
    assert has_rows(batch, rows) and not has_rows(batch, rows + 7)


def test_fields_of_unlike_kinds_are_no_samples() -> None:
    assert are_fields((torch.zeros(1, 10), torch.tensor([1])), 2)
    assert not are_fields([torch.zeros(3, 8), torch.zeros(3, 8)], 2)
    assert not are_fields((torch.zeros(2, 10), torch.tensor([1, 2])), 2)
