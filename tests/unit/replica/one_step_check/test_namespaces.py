from pathlib import PurePosixPath

import pytest
import torch
from torch import nn

from guava_nb.replica.one_step_check.namespaces import Cell, ClassAttributes, Slots, Switches, has_slots


class Base:
    __slots__ = ("__hidden", "n")

    def __init__(self):
        self.n, self.__hidden = 1, 2


class Meter(Base):
    __slots__ = ("empty", "__dict__")


def test_slots_of_all_classes_are_read_filled_and_emptied():
    meter = Meter()
    names = Slots(meter)
    assert dict(names.items()) == {"n": 1, "_Base__hidden": 2}
    names["n"], names["empty"] = 5, 6
    assert (meter.n, meter.empty) == (5, 6) and dict(names.items())["empty"] == 6
    del names["empty"]
    assert not hasattr(meter, "empty")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(Meter(), True), (Base(), True), (3, False), (torch.zeros(1), False), (nn.Linear(1, 1), False), ([], False),
     (PurePosixPath("a"), True), (ValueError(), False)],
)  # fmt: skip
def test_only_classes_that_python_made_have_slots(value, expected):
    assert has_slots(value) == expected


def test_variables_switches_and_classes_are_filled_in_place():
    count = 1

    def counted():
        return count

    (held,) = counted.__closure__
    cell = Cell("count", held)
    assert cell.items() == [("count", 1)]
    cell["count"] = 7
    assert counted() == 7
    layer = nn.Linear(2, 2)
    switches = Switches(layer)
    ((name, value),) = switches.items()
    switches[name] = {**value, "bias": False}
    assert layer.weight.requires_grad and not layer.bias.requires_grad
    attributes = ClassAttributes(Base)
    attributes["seen"] = 3
    assert Base.seen == 3 and ("seen", 3) in attributes.items()
    del attributes["seen"]
    assert not hasattr(Base, "seen")
