"""What lives in the worker's own process and no other process can build: its model, criterion, optimizer, preprocessing.

A run's record names these with a leading "@", which no Python name has. The orchestrator, which has no class of such a
model, keeps a *likeness* of it: modules without a forward, with the same parameters and buffers under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError, GuavaError, PreparationError
from guava_nb.protocol.messages import TensorInfo
from guava_nb.replica.state_dict import copied

__all__ = [
    "OWN_CRITERION",
    "OWN_MODEL",
    "OWN_OPTIMIZER",
    "OWN_PREPROCESS",
    "ResidentParts",
    "describe_model",
    "likeness",
]

OWN_MODEL, OWN_CRITERION, OWN_OPTIMIZER, OWN_PREPROCESS = "@model", "@criterion", "@optimizer", "@preprocess"


@dataclass(frozen=True, slots=True)
class ResidentParts:
    """Objects of the calling process that a run may name.

    Attributes:
        model: trained in place.
        criterion: a loss of outputs and targets: torch's module or function, or one's own; None: the orchestrator's.
        optimizer: over the model's parameters; None: the orchestrator names one.
        preprocess: called with every batch that arrives; None: the orchestrator's, or none.
        service: "validation" or "inference" when the model may be asked and not trained; "" allows both.
    """

    model: nn.Module
    criterion: Callable[..., Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    preprocess: Callable[[Any], Any] | None = None
    service: str = ""

    def names(self) -> tuple[str, ...]:
        """Return which parts there are, as the hello tells them."""
        parts = ("model", "criterion", "optimizer", "preprocess", "service")
        return tuple(part for part in parts if getattr(self, part) not in (None, ""))

    def find(self, name: str) -> object:
        """Return the part behind a name that begins with "@".

        Raises:
            ConfigError: there is no such part here.
        """
        part = name.removeprefix("@")
        if part == "service" or part not in self.names():
            raise ConfigError(f"this worker has no {part} of its own: give it in setup_model({part}=...)")
        found = getattr(self, part)
        return (lambda named: found) if name == OWN_OPTIMIZER else found


def describe_model(model: nn.Module) -> tuple[TensorInfo, ...]:
    """Return every parameter and buffer in the order of the modules; one that stands twice names its first place."""
    first: dict[int, str] = {}
    described = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        hidden = module._non_persistent_buffers_set
        own: list[tuple[str, Tensor, str]] = [
            (name, tensor, "parameter" if tensor.requires_grad else "frozen")
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]
        own += [
            (name, tensor, "hidden" if name in hidden else "buffer")
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        for name, tensor, kind in own:
            full = f"{prefix}.{name}" if prefix else name
            first_name, dtype = first.setdefault(id(tensor), full), str(tensor.dtype).removeprefix("torch.")
            same_as = "" if first_name == full else first_name
            described.append(TensorInfo(full, tuple(tensor.shape), dtype, kind, same_as))
    return tuple(described)


class Likeness(nn.Module):
    """A module that holds tensors for another machine's; it computes nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            GuavaError: always.
        """
        raise GuavaError(
            "the class of this model is known to the worker's process only, so it cannot compute here. Its weights are here: "
            "load state_dict() into a model of that class"
        )


def likeness(tensors: Sequence[TensorInfo]) -> nn.Module:
    """Return a module with these parameters and buffers, all zero.

    Raises:
        PreparationError: a worker described what torch does not know.
    """
    root = Likeness()
    made: dict[str, Tensor] = {}
    for info in tensors:
        dtype = getattr(torch, info.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise PreparationError(
                f"the worker's model has {info.name} of dtype {info.dtype!r}, which this torch lacks"
            )
        path, _, name = info.name.rpartition(".")
        tensor = made.get(info.same_as)
        if tensor is None:
            tensor = torch.zeros(info.shape, dtype=dtype)
            if info.kind in ("parameter", "frozen"):
                tensor = nn.Parameter(tensor, requires_grad=info.kind == "parameter")
        made[info.name] = tensor
        module = _module_at(root, path.split(".") if path else ())
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor, persistent=info.kind != "hidden")
    return root


def _module_at(root: nn.Module, path: Iterable[str]) -> nn.Module:
    module = root
    for name in path:
        if name not in module._modules:
            module.add_module(name, Likeness())
        child = module._modules[name]
        assert child is not None
        module = child
    return module


class HeldOptimizer(torch.optim.Optimizer):
    """Keeps the state of the worker's optimizer as plain data; never steps."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._held: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was loaded last."""
        return super().state_dict() if self._held is None else copied(self._held)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it."""
        self._held = copied(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Refuse: the worker steps."""
        raise AssertionError("the optimizer lives at the worker")


def held(name: str) -> object:
    """Return what the orchestrator's master uses in place of the worker's part of this name."""
    return HeldOptimizer if name == OWN_OPTIMIZER else Likeness()
