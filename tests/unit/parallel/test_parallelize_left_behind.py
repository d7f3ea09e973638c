"""What a spread model's attributes hold of the parameters of before is found, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.parallel.parallelize import refuse_left_behind


class Helper:
    def __init__(self, model: nn.Module) -> None:
        self.parts = {"own": list(model.parameters())}


def spread(**attributes: object) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A model with attributes, one of whose layers has new parameters under the old names."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    for name, make in attributes.items():
        setattr(model, name, make(model))  # type: ignore[operator]
    before = dict(model.named_parameters())
    model[1].weight = nn.Parameter(torch.zeros(2, 1))
    return model, before


@pytest.mark.parametrize(
    ("attribute", "says"),
    [
        (lambda model: list(model.parameters()), "parameter '1.weight'"),
        (Helper, "parameter '1.weight'"),
        (lambda model: torch.optim.SGD(model[1].parameters(), lr=0.1), r"an optimizer \(SGD\) of '1.weight'"),
    ],
)
def test_who_holds_a_replaced_parameter_is_named(attribute: object, says: str) -> None:
    model, before = spread(held=attribute)
    with pytest.raises(ConfigError, match=f"attribute 'held' holds {says}"):
        refuse_left_behind(model, before)


def test_what_is_still_the_models_may_be_held() -> None:
    model, before = spread(layers=lambda model: [model[0], model[1]], first=lambda model: list(model[0].parameters()))
    model.copies = [parameter.detach().clone() for parameter in model.parameters()]
    refuse_left_behind(model, before)
