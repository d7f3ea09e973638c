"""The names in a run's record, looked up before anything is built: while workers are still waited for, and for a big model.

Knows the record and the finders of this room; builds nothing, so that it takes no time.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeGuard

from torch import nn

from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.replica.objective import find_criterion, user_function
from guava_nb.replica.optimizer import OPTIMIZERS, SCHEDULERS
from guava_nb.spec.cells import resolve
from guava_nb.spec.factories import Resolve, check_arguments, find
from guava_nb.spec.run_spec import factory_name
from guava_nb.spec.training_options import Reference

__all__ = ["check_names", "named_function"]


def check_names(spec: RunSpec, look_up: Resolve) -> None:
    """Refuse a name that leads nowhere, or arguments that cannot be given to what it leads to.

    What a factory raises when it is called is seen only when the replica is built.

    Raises:
        ConfigError: which one; a name comes with the nearest that is known.
    """
    if _is_here(spec.model):
        _check_maker("model", spec.model, find("model", spec.model.name, {}, "", look_up), 0)
    if _is_here(spec.criterion):
        found = find_criterion(spec.criterion.name, look_up)
        # A class is called with its arguments, an object or a function with outputs and targets.
        _check_maker("criterion", spec.criterion, found, 0 if isinstance(found, type) else 2)
    if _is_here(spec.step):
        user_function("step", spec.step, look_up)
    if _is_here(spec.optimizer):
        found = find("optimizer", spec.optimizer.name, OPTIMIZERS, "torch.optim", look_up)
        _check_maker("optimizer", spec.optimizer, found, 1)
    if _is_here(spec.scheduler):
        found = find("scheduler", spec.scheduler.name, SCHEDULERS, "torch.optim.lr_scheduler", look_up)
        _check_maker("scheduler", spec.scheduler, found, 1)
    for role in ("preprocess", "augment", "tokens"):
        if _is_here(factory := getattr(spec, role)):
            find(role, factory.name, {}, "", look_up)


def named_function(role: str, reference: Reference, shared: ModuleType | None) -> Factory:
    """Return the record of a function of model and batch, looked up here.

    Args:
        role: what it is for, in the user's words.
        reference: its name, or itself.
        shared: module of the shared cells; None: there are none.

    Raises:
        ConfigError: the name leads nowhere, or it cannot be called so.
        SourceError: it exists in this notebook or script only.
    """
    factory = Factory(factory_name(role, reference, shared))
    user_function(role, factory, lambda name: resolve(name, shared))
    return factory


def _is_here(factory: Factory | None) -> TypeGuard[Factory]:
    """Whether there is a name to look up, and not one of the worker's own process."""
    return factory is not None and not factory.name.startswith("@")


def _check_maker(role: str, factory: Factory, found: object, given: int) -> None:
    if callable(found) and not isinstance(found, nn.Module):
        check_arguments(role, factory.name, found, given, factory.args)
