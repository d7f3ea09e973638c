"""Figures that come from a device: what is read, and what tells that one of them is bad."""

from __future__ import annotations

import math

import pytest
import torch

from guava_nb.replica.device_figures import DeviceFigures, norms


@pytest.mark.parametrize("gates", [False, True])
def test_what_is_read_is_what_was_given(gates: bool) -> None:
    figures = DeviceFigures([torch.tensor(3), 2.5, torch.tensor([[1.0, 4.0]]), 7], gates)
    assert figures.read() == figures.read() == [[3.0], [2.5], [1.0, 4.0], [7.0]]
    assert figures.bad is None if not gates else float(figures.bad or 0.0) == 0.0
    assert DeviceFigures([1.0], gates).read() == [[1.0]] and DeviceFigures([], gates).read() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_number_is_told_on_the_device(value: float) -> None:
    assert float(DeviceFigures([torch.ones(()), torch.tensor([0.0, value])], gates=True).bad) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("value", [0.0, 3e38, -3e38, math.nan, math.inf, -math.inf])
def test_a_norm_is_finite_just_where_its_tensor_is(value: float, dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, 2, dtype=dtype), torch.full((4,), value, dtype=dtype), torch.ones(2, dtype=torch.int64)]
    found = norms([*tensors, torch.empty(0)])
    assert found is not None and found.isfinite().tolist() == [True, math.isfinite(value), True, True]
    assert norms([]) is None and norms(tensors[2:]) is not None
