"""Whether a step leaves parameters without a gradient: DistributedDataParallel has to be told, or waits for them."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import torch
from torch import nn

from guava_nb.parallel.module_state import unheard
from guava_nb.protocol.messages import RunSpec
from guava_nb.replica.objective import build_objective
from guava_nb.replica.preprocess import Preprocessing
from guava_nb.spec.factories import Resolve

__all__ = ["leaves_unused"]

_ROWS = 2  # batch norms refuse one
_STEPS = 4  # what is left out at random is left out in one of them, more often than not


def leaves_unused(model: nn.Module, spec: RunSpec, resolve: Resolve, look: Any) -> bool:
    """Try steps on stand-in batches on the CPU, and look which parameters got no gradient.

    Args:
        model: as workers build it; it is called in training mode, its weights stay.
        spec: of the run.
        resolve: finds shared and importable objects.
        look: of the run's first batch, see `guava_nb.epoch_record.look_of`.

    Returns:
        True where one did in any step; False also where no step runs on stand-ins, for torch then says at the program's
        second step what to write.
    """
    cpu = torch.device("cpu")
    with torch.random.fork_rng(devices=[]), unheard(), contextlib.suppress(Exception):
        spec = msgspec.structs.replace(spec, precision="fp32")  # as the model was built
        objective, treated = build_objective(spec, resolve, cpu), Preprocessing(spec, resolve, cpu)
        first = _first_axis(look)
        model.train()
        for seed in range(_STEPS):
            torch.manual_seed(seed)
            batch = treated.train(_stand_in(look, first))
            model.zero_grad()
            torch.autograd.backward(objective(model, batch, _ROWS if first else 1).value)
            if any(one.requires_grad and one.grad is None for one in model.parameters()):
                return True
    return False


def _first_axis(look: Any) -> int:
    """The first axis that all tensors of a batch have in common; 0 where there is none."""
    sizes = {shape[0] if shape else 0 for _, shape in _tensors(look)}
    return sizes.pop() if len(sizes) == 1 else 0


def _tensors(look: Any) -> list[tuple[str, tuple[int, ...]]]:
    if isinstance(look, tuple):
        return [look]
    parts = look.values() if isinstance(look, dict) else look if isinstance(look, list) else ()
    return [one for part in parts for one in _tensors(part)]


def _stand_in(look: Any, first: int) -> Any:
    """Return a batch of that look, of few rows where all its tensors have as many."""
    if isinstance(look, dict):
        return {key: _stand_in(part, first) for key, part in look.items()}
    if isinstance(look, list):
        return [_stand_in(part, first) for part in look]
    name, shape = look
    dtype = getattr(torch, name)
    sizes = (_ROWS, *shape[1:]) if first else shape
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(sizes, dtype=dtype)
    return torch.randn(sizes, dtype=torch.float32 if dtype is torch.float64 else dtype)
