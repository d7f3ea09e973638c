"""Approximate weights: moved by differences, with the schedule of their step; what does not fit changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from guava_nb.errors import RemoteProtocolError
from guava_nb.training.saving.snapshots_at_worker import ApproximateState
from guava_nb.wire_formats.held_tensors import HeldTensors
from tests.support.training import replica, spec


def parts_of(state: dict[str, Any], learned: set[str], rate: float = 0.5) -> dict[str, Any]:
    """What a worker sends whose weights are one larger each."""
    held = HeldTensors(state["model"], learned)
    now = {name: value + 1 for name, value in state["model"].items()}
    messages, exact, _ = held.propose(now, 4096)
    groups = [{**group, "lr": rate} for group in state["optimizer"]["param_groups"]]
    schedule = {"groups": [{k: v for k, v in group.items() if k != "params"} for group in groups], "scheduler": None}
    return {"messages": messages, "exact": exact, "schedule": schedule}


def test_it_becomes_what_the_difference_says_with_the_schedule_of_its_step() -> None:
    master = replica(spec())
    state, learned = master.state(), {name for name, _ in master.model.named_parameters()}
    made = ApproximateState(1, state, master.model)
    assert made.learned_elements == sum(one.numel() for one in master.model.parameters()) and made.count == 0
    made.take(4096, parts_of(state, learned), 0.25)
    assert (made.count, made.left_out) == (1, 0.25)
    master.load_state(made.state())
    for name, value in master.model.state_dict().items():
        assert torch.allclose(value, state["model"][name] + 1, atol=1e-2), name
    assert master.learning_rate == 0.5
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.01  # the base stays as it was


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": None}, {"messages": [1]}, {"messages": [torch.zeros(3)]}, {"messages": []}, {"exact": [1]},
        {"exact": {"first.weight": 1}}, {"schedule": None}, {"schedule": {"groups": [1]}}, {"schedule": {"groups": []}},
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(changes: dict[str, Any]) -> None:
    master = replica(spec())
    state, learned = master.state(), {name for name, _ in master.model.named_parameters()}
    made = ApproximateState(1, state, master.model)
    with pytest.raises(RemoteProtocolError):
        made.take(4096, {**parts_of(state, learned), **changes}, 0.0)
    kept = made.state()
    assert made.count == 0 and kept["optimizer"] == state["optimizer"]
    assert all(torch.equal(kept["model"][name], value) for name, value in state["model"].items())
