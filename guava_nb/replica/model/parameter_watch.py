"""Finds out that user code changed which parameters a model has, or which of them take gradients, after a run began.

What is exchanged, optimized and saved was laid out when the run began. Knows modules; knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from guava_nb.errors import TrainingError
from guava_nb.parallel.module_state import late_gradient

__all__ = ["ParameterWatch", "forward_changes", "refuse_late_gradients"]


class ParameterWatch:
    """A model's parameters as they were when this was made."""

    def __init__(self, model: nn.Module) -> None:
        """Take the present parameters as the right ones."""
        self._model = model
        self._named = {name: (parameter, parameter.requires_grad) for name, parameter in model.named_parameters()}
        self._modules = [(module, dict(module._parameters), dict(module._modules)) for module in model.modules()]

    def check(self, exchanged: bool) -> None:
        """A backward is over.

        Args:
            exchanged: gradients go to other workers; else parameters may begin to take gradients, as in a plain loop.

        Raises:
            TrainingError: a parameter came, went, was replaced or began to take a gradient.
        """
        if any(not (_same(m._parameters, own) and _same(m._modules, children)) for m, own, children in self._modules):
            self._compare()
        if exchanged:
            refuse_late_gradients(self._named)

    def _compare(self) -> None:
        now = dict(self._model.named_parameters())
        for name in dict.fromkeys([*self._named, *now]):
            known = self._named.get(name, (None, False))[0]
            if now.get(name) is not known:
                what = "was added" if known is None else "was replaced" if name in now else "was removed"
                raise TrainingError(
                    f"parameter {name!r} {what} during the run, and neither the optimizer nor other workers know of that: make "
                    "all parameters in the factory, and change the values of those that are there"
                )
        self._modules = [(module, dict(module._parameters), dict(module._modules)) for module in self._model.modules()]


def forward_changes(name: str) -> str:
    """Say why a forward may not change a parameter where the optimizer is at the orchestrator."""
    return (
        f"the forward itself changes parameter {name!r}, and with optimizer_site='orchestrator' no forward runs where the "
        "weights are: use optimizer_site='workers' (--optimizer-site workers)"
    )


def refuse_late_gradients(named: dict[str, tuple[nn.Parameter, bool]]) -> None:
    """Check that no parameter takes a gradient that took none when the run began.

    Args:
        named: parameters by name, and whether each took a gradient.

    Raises:
        TrainingError: one does.
    """
    for name, (parameter, was_trained) in named.items():
        if parameter.requires_grad and not was_trained:
            raise late_gradient(name)


def _same(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    # At each module in each step: no Python per part. Tensors are not compared by value.
    return [*now, *map(id, now.values())] == [*before, *map(id, before.values())]
