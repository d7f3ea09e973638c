"""Operations of a sample, as torch counts them."""

from __future__ import annotations

import torch

from guava_nb.replica.device_figures import FlopCount


def test_a_linear_layer_costs_what_its_matrices_say() -> None:
    layer, x = torch.nn.Linear(32, 16, bias=False), torch.randn(8, 32, requires_grad=True)
    count = FlopCount(wanted=True)
    with count.around(8):
        layer(x).sum().backward()
    assert count.per_sample == 3 * 2 * 32 * 16  # forward, gradient of the input, gradient of the weight
    with count.around(8):
        layer(torch.randn(8, 32)).sum()
    assert count.per_sample == 3 * 2 * 32 * 16  # once


def test_nothing_is_counted_unless_wanted() -> None:
    count = FlopCount(wanted=False)
    with count.around(8):
        torch.nn.Linear(4, 4)(torch.randn(8, 4))
    assert count.per_sample is None
