"""The hash of parameters sees every change of every value, place, name, dtype and shape."""

from __future__ import annotations

import pytest
import torch

from guava_nb.replica.state_dict import parameter_hash


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8]
)
@pytest.mark.parametrize("shape", [(3, 3000), (5,), (2, 4096)])
def test_a_change_of_one_value_or_of_two_places_changes_the_hash(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape).to(dtype)
    tensor.view(-1)[1] = 1
    known = {parameter_hash([("w", tensor)])}
    for place in (0, 1, 2, tensor.numel() - 1):
        changed = tensor.clone()
        changed.view(-1)[place] = 1 if place != 1 else 0
        known.add(parameter_hash([("w", changed)]))
    swapped = tensor.clone()
    swapped.view(-1)[[1, 3]] = tensor.view(-1)[[3, 1]]
    known |= {parameter_hash([("w", swapped)]), parameter_hash([("v", tensor)]), parameter_hash([("w", tensor.t())])}
    assert len(known) == (8 if len(shape) > 1 else 7)
    assert parameter_hash([("w", tensor.clone())]) in known and parameter_hash([]) not in known


def test_signs_and_nan_are_seen_and_strides_are_not() -> None:
    zero, nan = torch.zeros(5000), torch.full((5000,), float("nan"))
    assert len({parameter_hash([("w", one)]) for one in (zero, -zero, nan, zero + 1e-45)}) == 4
    table = torch.arange(12.0).reshape(3, 4)
    assert parameter_hash([("w", table)]) == parameter_hash([("w", table.t().contiguous().t())])
