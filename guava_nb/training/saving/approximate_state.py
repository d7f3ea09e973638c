"""What the orchestrator knows of a state that stays with a worker behind a thin line: its weights, nearly, by short messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats.held_tensors import HeldTensors

__all__ = ["ApproximateState"]


class ApproximateState:
    """A whole state that is here, moved by differences of its weights.

    What does not move with it (the optimizer's moments, a loss scale) stays as it was at the base.

    Args:
        number: by which the worker knows the base.
        state: the base, whole; nothing of it is changed.
        model: of the run, for the names of what learns.

    Attributes:
        number: as above.
        left_out: which part of the weights' way since the difference before the last one left out, 0 to 1.
    """

    def __init__(self, number: int, state: Mapping[str, Any], model: nn.Module) -> None:
        """Hold the base."""
        self.number, self.left_out = number, 0.0
        learned = {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
        tensors = {name: value for name, value in state["model"].items() if isinstance(value, Tensor)}
        self._held = HeldTensors(tensors, learned)
        self._rest = {**state, "model": {name: value for name, value in state["model"].items() if name not in tensors}}

    @property
    def count(self) -> int:
        """Differences that came."""
        return self._held.count

    @property
    def learned_elements(self) -> int:
        """Elements of the weights that move."""
        return self._held.moving_elements

    def take(self, count: int, parts: Mapping[str, Any], left_out: float) -> None:
        """Take a difference, of so many elements of each 4,096, with the schedule of its step.

        Raises:
            RemoteProtocolError: it is none of this state; nothing has changed.
        """
        messages, exact, schedule = parts.get("messages"), parts.get("exact"), parts.get("schedule")
        if not isinstance(messages, list) or not all(_is_message(one) for one in messages):
            raise RemoteProtocolError("a difference came that is no list of messages")
        if not isinstance(exact, dict) or not all(isinstance(one, Tensor) for one in exact.values()):
            raise RemoteProtocolError("a difference came whose other tensors are none")
        rest = self._scheduled(schedule)
        self._held.take(count, messages, exact)
        self._rest, self.left_out = rest, min(1.0, max(0.0, left_out))

    def _scheduled(self, schedule: Any) -> dict[str, Any]:
        """Return the rest of the state with the settings of the optimizer's groups, and the scheduler, of a step."""
        optimizer = self._rest.get("optimizer")
        groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
        came = schedule.get("groups") if isinstance(schedule, dict) else None
        if not isinstance(came, list) or not all(isinstance(one, dict) for one in came):
            raise RemoteProtocolError("a difference came without its schedule")
        rest = {**self._rest, "scheduler": schedule.get("scheduler")}
        if isinstance(groups, list):
            if len(groups) != len(came):
                raise RemoteProtocolError(f"a schedule of {len(came)} groups came, and the optimizer has {len(groups)}")
            merged = [{**old, **new, "params": old["params"]} for old, new in zip(groups, came, strict=True)]
            rest["optimizer"] = {**optimizer, "param_groups": merged}  # type: ignore[dict-item]
        return rest

    def state(self) -> dict[str, Any]:
        """Return it as a whole state."""
        return {**self._rest, "model": {**self._rest["model"], **self._held.tensors()}}


def _is_message(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1
