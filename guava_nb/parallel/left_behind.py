"""What a model's plain attributes hold of parameters that spreading has replaced: lists of them, optimizers, other modules.

A layer that is shared out, and what FSDP2 shards, gets new parameters under the old names. Who kept the old ones would go on
with the values of before, or with gradients that no step sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import nn
from torch.optim import Optimizer

from guava_nb.errors import ConfigError

__all__ = ["refuse_left_behind"]

#: Attributes that torch gives every module.
_TORCHS = frozenset(vars(nn.Module()))
#: Objects that are looked into, one inside another.
_DEPTH = 4


def refuse_left_behind(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Check that no attribute holds a parameter that is the model's no more.

    Args:
        model: what this rank has of it, spread.
        before: the parameters that it had as a whole, by name.

    Raises:
        ConfigError: one does.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    now, seen = {id(parameter) for parameter in model.parameters()}, {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _TORCHS:
                continue
            for found, holder in _parameters(value, _DEPTH, set(seen)):
                if id(found) in names and id(found) not in now:
                    raise ConfigError(_text(f"{name}.{key}".lstrip("."), type(holder), names[id(found)]))


def _parameters(value: Any, depth: int, seen: Set[int]) -> Iterator[tuple[nn.Parameter, Any]]:
    """The parameters that a value holds, each with the optimizer or other object that has it."""
    if isinstance(value, nn.Parameter):
        yield value, value
        return
    if id(value) in seen or not depth or type(value).__module__.startswith(("guava_nb.", "torch.distributed")):
        return
    seen |= {id(value)}
    if isinstance(value, Optimizer):
        inside: Any = [group["params"] for group in value.param_groups]
    elif isinstance(value, nn.Module):
        inside = list(value.parameters())
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []
    for one in inside:
        for parameter, holder in _parameters(one, depth - 1, seen):
            yield parameter, value if isinstance(value, Optimizer | nn.Module) else holder


def _text(place: str, kind: type, name: str) -> str:
    if issubclass(kind, Optimizer):
        way = (
            "it would step values that the run does not use. Give the run one optimizer for all parameters (--optimizer), whose "
            "function may make groups of them, or train with one worker"
        )
    else:
        way = (
            "it would be read as it was before the run. Take parameters from their modules each time, or use data mode or "
            "zero_stage=1 (--zero 1)"
        )
    what = f"an optimizer ({kind.__name__}) of" if issubclass(kind, Optimizer) else "parameter"
    return f"the model's attribute {place!r} holds {what} {name!r}, of which each worker gets a part of its own here: {way}"
