from __future__ import annotations

import pytest
import torch

from guava_nb.worker.lost_device import loses_device


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other call",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
    ],
)
def test_errors_that_a_context_does_not_survive(text: str) -> None:
    assert loses_device(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: invalid configuration argument"),
        RuntimeError("device-side assert triggered"),
        ValueError("CUDA error: device-side assert triggered"),
        IndexError("Target 14 is out of bounds."),
    ],
)
def test_errors_after_which_the_device_goes_on(error: Exception) -> None:
    assert not loses_device(error)
