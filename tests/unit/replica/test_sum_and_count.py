"""A mean beside a count, a loss beside another, and sums made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from guava_nb.errors import ConfigError
from guava_nb.replica.model.parameter_writes import ParameterWrites
from guava_nb.replica.sum_and_count import refuse_no_sum


def test_a_mean_with_a_count_and_a_loss_with_another_are_refused() -> None:
    outputs, targets = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
    ce = functional.cross_entropy
    cases = {
        "mean already": (
            lambda o, y: (ce(o, y), len(y)),
            lambda o, y: (ce(o, y) + o.pow(2).mean(), torch.tensor(6)),
            lambda o, y: (functional.mse_loss(o, o.detach() + 1), 6.0),
            lambda o, y: (o.pow(2).sum(1).mean(), len(y)),
            lambda o, y: (-ce(o, y), len(y)),
        ),
        "mean already, times 0.5": (lambda o, y: (ce(o, y) * 0.5, len(y)), lambda o, y: (ce(o, y) / 2, len(y))),
        "the second one, 0.75, is no number of samples": (
            lambda o, y: (ce(o, y), 0.75),  # an accuracy
            lambda o, y: (ce(o, y, reduction="none").mean(), torch.tensor(0.75)),
            lambda o, y: (0.5 * ce(o, y) + 0.5 * o.pow(2).mean(), torch.tensor(0.75)),
            lambda o, y: (o.pow(2).sum(1).mean(), 0.75),
        ),
        "the second one, 0, is no number of samples": (lambda o, y: (ce(o, y), torch.tensor(0.0)),),
        "divided by the second one": (lambda o, y: (ce(o, y, reduction="sum") / (y > 0).sum(), (y > 0).sum()),),
        "has a gradient": (lambda o, y: (ce(o, y) + o.pow(2).mean(), ce(o, y)),),
    }
    for says, functions in cases.items():
        for function in functions:
            with pytest.raises(ConfigError, match=says):
                refuse_no_sum("f", *function(outputs, targets), 6)
    for right in (
        lambda o, y: (ce(o, y, reduction="sum"), len(y)),
        lambda o, y: (ce(o, y) * len(y) + 0.1 * o.mean(), len(y)),
        lambda o, y: (o.exp().mean(1).sum(), (y != 0).sum()),
        lambda o, y: (o.exp().sum(0).mean(), len(y)),
        lambda o, y: (0.1 * (ce(o, y) * len(y)), len(y)),
        lambda o, y: (o.pow(2).mean() * torch.tensor(30.0) / 2, 30),
        lambda o, y: ((ce(o, y, reduction="none") * (y != 0)).mean(), (y != 0).float().mean()),
        lambda o, y: (ce(o, y, reduction="none").masked_fill(y == 0, 0.0).mean(), (y != 0).float().mean()),
        lambda o, y: (0.25 * ce(o, y), 0.25),
        lambda o, y: (o.mean() * 0.0, 0),  # no target was in this part
        lambda o, y: (ce(o, y), 1),
    ):
        refuse_no_sum("f", *right(outputs, targets), 6)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("number", [6, 6.0, torch.tensor(6.0)])
def test_numbers_beside_a_mean_are_read_while_a_dispatch_mode_looks_on(number: Any, right: bool) -> None:
    """As in the one-step check, which was not made of a step that returns (mean * count, count)."""
    outputs, targets = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
    with ParameterWrites({}):
        mean, total = (
            functional.cross_entropy(outputs, targets),
            functional.cross_entropy(outputs, targets, reduction="sum"),
        )
        for loss in (mean * number, number * mean, mean / (1 / number), mean * number + outputs.mean() / 2):
            if right:
                refuse_no_sum("f", loss, number, 6)
        for loss in (mean / number, total / number):
            if not right:
                with pytest.raises(ConfigError, match="mean already|divided by the second one"):
                    refuse_no_sum("f", loss, number, 6)
