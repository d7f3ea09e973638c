"""Parameters without a gradient are found by steps on stand-ins, whatever the batch, the precision or the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from guava_nb.epoch_record import look_of
from guava_nb.export.unused import leaves_unused
from guava_nb.protocol.messages import Factory
from tests.support.training import spec

PAIR = torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64)


class Net(nn.Module):
    """Two layers; the second one may stand aside, and a norm wants more than one row."""

    def __init__(self, uses: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.norm, self.head, self.other = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.float())
        return self.head(x) + self.other(x) if self.uses() else self.head(x)


def by_name(model: nn.Module, batch: Any) -> torch.Tensor:
    print("a step")
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def found(model: nn.Module, batch: Any = PAIR, **options: Any) -> bool:
    criterion = None if "step" in options else Factory("CrossEntropyLoss")
    made = spec(criterion=criterion, **options)
    return leaves_unused(model, made, lambda name: globals()[name], look_of(batch))


def test_a_layer_that_no_step_uses_is_found_and_frozen_ones_are_not() -> None:
    model = Net(lambda: False)
    assert found(model) and not found(Net())
    model.other.requires_grad_(False)
    assert not found(model)


def test_one_that_is_left_out_at_random_is_found_and_the_users_stream_stays() -> None:
    model = Net(lambda: bool(torch.rand(()) < 0.5))
    before = torch.get_rng_state()
    assert found(model)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("uses", [True, False])
def test_steps_take_batches_of_any_form_and_print_nothing(uses: bool, capsys: pytest.CaptureFixture[str]) -> None:
    batch = {"x": torch.zeros(8, 4, dtype=torch.float64), "y": torch.zeros(8, dtype=torch.int64)}
    for precision in ("fp32", "fp64"):
        assert found(Net(lambda: uses), batch, step=Factory("by_name"), precision=precision) is not uses
    assert capsys.readouterr().out == ""


def test_where_no_step_runs_on_stand_ins_nothing_is_found() -> None:
    assert not found(nn.Linear(7, 3)) and not found(Net(lambda: False), ["text", *PAIR]) and not found(Net(), None)
