"""What shares memory in one process: which two tensors do, what is refused, and what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError
from guava_nb.replica.model.shared_memory import overlaps, refuse_overlaps


def model(change: Callable[[nn.Sequential], None]) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    change(made)
    return made


def _both(place: int, make: Callable[[Tensor], Tensor]) -> Callable[[nn.Sequential], None]:
    def change(made: nn.Sequential) -> None:
        made[place].weight.data = make(made[0].weight.data)

    return change


def _buffer(made: nn.Sequential) -> None:
    made.register_buffer("copy", made[0].weight.data)


def _other_dtype(made: nn.Sequential) -> None:
    made.register_buffer("bits", made[0].weight.data.view(torch.int32))


@pytest.mark.parametrize(
    ("change", "second", "way"),
    [
        (_both(1, lambda weight: weight), "1.weight", "layer.weight = other.weight"),
        (_both(1, lambda weight: weight.t()), "1.weight", "layer.weight = other.weight"),
        (_both(2, lambda weight: weight[1:3]), "2.weight", "make the other one of it"),
        (_buffer, "copy", "make the other one of it"),
        (_other_dtype, "bits", "make the other one of it"),
    ],
)
def test_two_tensors_in_the_same_memory_are_refused_by_name(
    change: Callable[[nn.Sequential], None], second: str, way: str
) -> None:
    made = model(change)
    assert list(overlaps(made)) == [("0.weight", second)]
    with pytest.raises(ConfigError, match=f"'0.weight' and '{second}' .*mode 'zero'.*{way}"):
        refuse_overlaps(made, "mode 'zero'")


def _tied(made: nn.Sequential) -> None:
    made[1].weight = made[0].weight


def _columns(made: nn.Sequential) -> None:
    whole = torch.randn(4, 8)
    made[0].weight.data, made[1].weight.data = whole[:, :4], whole[:, 4:]


def _tables(made: nn.Sequential) -> None:
    table = torch.arange(8.0)
    made[0].register_buffer("table", table[:4])
    made[1].register_buffer("table", table[2:])


def _frozen(made: nn.Sequential) -> None:
    _both(1, lambda weight: weight)(made.requires_grad_(False))


def _empty(made: nn.Sequential) -> None:
    made.append(nn.Linear(0, 2, bias=False)).append(nn.LazyLinear(2)).append(nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("change", [_tied, _columns, _tables, _frozen, _empty])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_one_tensor_twice_neighbours_and_what_nothing_changes_are_fine(change: Callable[[nn.Sequential], None]) -> None:
    refuse_overlaps(model(change), "mode 'zero'")
