"""Finds out that user code changed which parameters a model has, or which of them take gradients, after a run began.

What is exchanged, optimized and saved was laid out when the run began. Knows modules; knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from guava_nb.errors import TrainingError
from guava_nb.parallel.module_state import late_gradient

__all__ = ["GradientSwitches", "ParameterWatch", "forward_changes"]


class ParameterWatch:
    """A model's parameters as they were when this was made."""

    def __init__(self, model: nn.Module, by_name: bool = False) -> None:
        """Take the present parameters as the right ones; `by_name`: torch puts others under their names, as FSDP2 does."""
        self._model, self._same = model, _same_names if by_name else _same
        self._named = dict(model.named_parameters())
        self._take_present()

    def check(self) -> None:
        """A backward is over.

        Raises:
            TrainingError: a parameter came, went or was replaced.
        """
        same = self._same
        if any(not (same(m._parameters, own) and same(m._modules, children)) for m, own, children in self._modules):
            self._compare()

    def _compare(self) -> None:
        now = dict(self._model.named_parameters())
        for name in dict.fromkeys([*self._named, *now]):
            known = self._named.get(name)
            if now.get(name) is not known and not (self._same is _same_names and known is not None and name in now):
                what = "was added" if known is None else "was replaced" if name in now else "was removed"
                raise TrainingError(
                    f"parameter {name!r} {what} during the run, and neither the optimizer nor other workers know of that: make "
                    "all parameters in the factory, and change the values of those that are there"
                )
        self._take_present()

    def _take_present(self) -> None:
        # What torch.jit made has no dicts that could be compared; its parameters were fixed when it was made.
        parts = [part for part in self._model.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._modules = [(part, dict(part._parameters), dict(part._modules)) for part in parts]


def forward_changes(name: str) -> str:
    """Say why a forward may not change a parameter where the optimizer is at the orchestrator."""
    return (
        f"the forward itself changes parameter {name!r}, and with optimizer_site='orchestrator' no forward runs where the "
        "weights are: use optimizer_site='workers' (--optimizer-site workers)"
    )


class GradientSwitches:
    """Which of the parameters that took a gradient when a run began take none now: user code may switch that in any step."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        """Take the present switches as those of the beginning."""
        self._named = {name: (parameter, parameter.requires_grad) for name, parameter in named.items()}
        self._is_own = False

    def frozen(self, is_alone: bool = False) -> tuple[str, ...] | None:
        """Return those that take none, after a shard with samples; of a lone worker, which exchanges no gradients, None for none.

        Raises:
            TrainingError: one takes a gradient that took none when the run began, and others would not know of it.
        """
        self._is_own = True
        found = []
        for name, (parameter, was_trained) in self._named.items():
            if parameter.requires_grad and not was_trained and not is_alone:
                raise late_gradient(name)
            if was_trained and not parameter.requires_grad:
                found.append(name)
        return tuple(found) if found or not is_alone else None

    def forget(self) -> None:
        """What was done of the step does not count: another worker may do it again."""
        self._is_own = False

    def end_step(self, frozen: Collection[str] | None) -> None:
        """A step is over, with these frozen at the workers that had samples of it: be alike where this one had none.

        Args:
            frozen: None where no worker told.
        """
        if frozen is not None and not self._is_own:
            for name, (parameter, was_trained) in self._named.items():
                if was_trained:
                    parameter.requires_grad_(name not in frozen)
        self.forget()


def _same(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    # At each module in each step: no Python per part. Tensors are not compared by value.
    return [*now, *map(id, now.values())] == [*before, *map(id, before.values())]


def _same_names(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    # One that was set to None keeps its name.
    return [name for name in now if now[name] is not None] == [name for name in before if before[name] is not None]
