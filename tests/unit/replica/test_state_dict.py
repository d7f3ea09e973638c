"""The hash of parameters sees every change of every value, place, name, dtype and shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from guava_nb.replica.state_dict import extra_states, give_extra_states, parameter_hash


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


class Counted(nn.Linear):
    """Keeps a count beside its tensors."""

    steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_extra_states_go_from_model_to_model_under_their_keys() -> None:
    one, other = (nn.Sequential(Counted(2, 2), nn.ReLU(), Counted(2, 2)) for _ in range(2))
    one[2].steps = 3  # type: ignore[assignment]
    found = extra_states(one)
    assert (
        found == {"0._extra_state": {"steps": 0}, "2._extra_state": {"steps": 3}}
        and found.keys() <= one.state_dict().keys()
    )
    give_extra_states(other, {"0.weight": torch.zeros(2), **found})
    assert other[2].steps == 3 and extra_states(Counted(1, 1)) == {"_extra_state": {"steps": 0}}
    assert extra_states(nn.Linear(1, 1)) == {}
