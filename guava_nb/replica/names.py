"""The names in a run's record, looked up before anything is built: while workers are still waited for, and for a big model.

Knows the record and the finders of this room; builds nothing, so that it takes no time.
"""

from __future__ import annotations

from typing import TypeGuard

from torch import nn

from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.replica.objective import find_criterion, user_function
from guava_nb.replica.optimizer import OPTIMIZERS, SCHEDULERS
from guava_nb.spec.factories import Resolve, check_arguments, find

__all__ = ["check_names"]


def check_names(spec: RunSpec, resolve: Resolve) -> None:
    """Refuse a name that leads nowhere, or arguments that cannot be given to what it leads to.

    What a factory raises when it is called is seen only when the replica is built.

    Raises:
        ConfigError: which one; a name comes with the nearest that is known.
    """
    if _is_here(spec.model):
        _check_maker("model", spec.model, find("model", spec.model.name, {}, "", resolve), 0)
    if _is_here(spec.criterion):
        found = find_criterion(spec.criterion.name, resolve)
        # A class is called with its arguments, an object or a function with outputs and targets.
        _check_maker("criterion", spec.criterion, found, 0 if isinstance(found, type) else 2)
    if _is_here(spec.step):
        user_function("step", spec.step, resolve)
    if _is_here(spec.optimizer):
        found = find("optimizer", spec.optimizer.name, OPTIMIZERS, "torch.optim", resolve)
        _check_maker("optimizer", spec.optimizer, found, 1)
    if _is_here(spec.scheduler):
        found = find("scheduler", spec.scheduler.name, SCHEDULERS, "torch.optim.lr_scheduler", resolve)
        _check_maker("scheduler", spec.scheduler, found, 1)
    for role in ("preprocess", "augment", "tokens"):
        if _is_here(factory := getattr(spec, role)):
            find(role, factory.name, {}, "", resolve)


def _is_here(factory: Factory | None) -> TypeGuard[Factory]:
    """Whether there is a name to look up, and not one of the worker's own process."""
    return factory is not None and not factory.name.startswith("@")


def _check_maker(role: str, factory: Factory, found: object, given: int) -> None:
    if callable(found) and not isinstance(found, nn.Module):
        check_arguments(role, factory.name, found, given, factory.args)
