"""What a person should read before a run begins: it will work, and perhaps not as it was meant. Refuses nothing."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers

from guava_nb.spec.own_code import is_own, users_function
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.plan import TrainingPlan

__all__ = ["notes_on"]

_GLOBAL_HOOKS = (
    (hooks_of_modules, "_global_forward_pre_hooks"), (hooks_of_modules, "_global_forward_hooks"),
    (hooks_of_modules, "_global_backward_pre_hooks"), (hooks_of_modules, "_global_backward_hooks"),
    (hooks_of_optimizers, "_global_optimizer_pre_hooks"), (hooks_of_optimizers, "_global_optimizer_post_hooks"),
)  # fmt: skip
_MOST_TOLD = 3


def notes_on(replica_set: ReplicaSet, plan: TrainingPlan, asked_precision: str | None) -> Iterator[str]:
    """Give sentences on a run that is about to begin.

    Args:
        replica_set: at the state in which it begins.
        plan: of the run.
        asked_precision: as the user gave it; "auto" was settled by the workers' devices.
    """
    spec = replica_set.spec
    if asked_precision == "auto":
        cards = "the device of every worker" if spec.precision == "bf16" else "not every worker has a device that"
        yield f"precision auto: {spec.precision}, because {cards} computes bf16 by itself"
    steps = plan.steps_left(replica_set.step)
    done, every = replica_set.step + 1, plan.val_interval
    if plan.val_feed is not None and every and steps is not None and (done + steps) // every == done // every:
        yield (
            f"this run never validates: val_interval is {plan.val_interval} steps, and it has {steps}; leave val_interval "
            "out to validate after each epoch"
        )
    if spec.max_grad_norm is not None:
        yield from _clipped_beside(replica_set.master.model, replica_set.master.optimizer)
    if spec.rounds is None and (hooked := replica_set.master.hooks.names):
        more = f" and {len(hooked) - _MOST_TOLD} more" if len(hooked) > _MOST_TOLD else ""
        yield (
            f"the gradient norm that is shown is that before the hooks on the gradients of {', '.join(hooked[:_MOST_TOLD])}"
            f"{more}; what they return is what max_grad_norm clips and the optimizer takes"
        )
    if spec.optimizer_site == "workers" and (found := changed_torch()):
        more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        yield (
            f"this process has changed torch: {', '.join(found[:_MOST_TOLD])}{more}. Workers are processes of their "
            "own, which have it only where a shared cell, or a module of yours that they import, makes the same change"
        )


def _clipped_beside(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    beside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if beside and trained:
        yield (
            f"max_grad_norm counts the gradients of {len(beside)} parameters that the optimizer does not have ({beside[0]}), "
            "those of each step alone; a loop with optimizer.zero_grad() would add theirs up from step to step. If they are not "
            "to be trained, freeze them (requires_grad_(False))"
        )


def changed_torch() -> list[str]:
    """Return what code of the user's own has put into torch, in this process: functions, forwards, hooks of all modules."""
    found = [
        f"{table.removeprefix('_global_')} of all {'optimizers' if holder is hooks_of_optimizers else 'modules'}"
        for holder, table in _GLOBAL_HOOKS
        if any(map(_is_own, getattr(holder, table, {}).values()))
    ]
    for name, holder in (("torch", torch), ("torch.nn.functional", functional), ("torch.Tensor", torch.Tensor)):
        found += [f"{name}.{key}" for key, value in list(vars(holder).items()) if _is_own(value)]
    for name, cls in list(vars(nn).items()):
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            found += [f"nn.{name}.{key}" for key, value in list(vars(cls).items()) if _is_own(value)]
    return found


def _is_own(value: Any) -> bool:
    inside: Callable[..., Any] | Any = users_function(value)
    return isinstance(inside, types.FunctionType) and is_own(inside.__globals__)
