"""Models that a callback may take for the one that trains: the registered instance, and copies that `run.model()` gave.

Workers train models of their own, so what a callback changes in one of these has no effect; it is told at once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from guava_nb.replica.one_step_check.python_state import PythonState

__all__ = ["HandedOut"]

_INSTEAD = (
    "Workers train models of their own, so this has no effect on the run. Set what changes during training in the model's "
    "forward or in the step (a buffer that counts steps tells when), let an optimizer or a schedule change weights, or end the "
    "run, change the registered model and start again"
)


@dataclass(slots=True)
class _Handed:
    what: str
    model: weakref.ref[nn.Module]
    versions: dict[str, tuple[int, bool]]
    state: PythonState | None  # it holds the model, so a copy has none


class HandedOut:
    """Knows the models that left the run, and sees what a callback did to them.

    Args:
        notice: takes sentences.
        registered: the instance that the user registered, if it was one.
    """

    def __init__(self, notice: Callable[[str], object], registered: nn.Module | None) -> None:
        self._notice, self._told = notice, set[str]()
        self._handed: list[_Handed] = []
        if registered is not None:
            self._note("the registered model", registered, PythonState(registered, {}))

    def note(self, model: nn.Module) -> nn.Module:
        """Remember a copy that a callback gets; returns it."""
        self._note("the copy that run.model() gave", model)
        return model

    def _note(self, what: str, model: nn.Module, state: PythonState | None = None) -> None:
        self._handed = [one for one in self._handed if one.model() is not None]
        self._handed.append(_Handed(what, weakref.ref(model), _versions(model), state))

    def look(self, who: str) -> None:
        """Tell what a callback changed; each model, and each change, once."""
        for one in list(self._handed):
            model = one.model()
            changed = None if model is None else next(_changes(one, model), None)
            if changed is not None:
                self._handed.remove(one)
                sentence = f"{who} changed {changed} of {one.what}. {_INSTEAD}"
                if sentence in self._told:
                    continue
                self._told.add(sentence)
                self._notice(sentence)
                warnings.warn(sentence, stacklevel=2)


def _versions(model: nn.Module) -> dict[str, tuple[int, bool]]:
    return {name: (p._version, p.requires_grad) for name, p in model.named_parameters()}


def _changes(handed: _Handed, model: nn.Module) -> Iterator[str]:
    now = _versions(model)
    for name, (version, takes_gradient) in handed.versions.items():
        if name in now and now[name][1] != takes_gradient:
            yield f"requires_grad of {name}"
        if name in now and now[name][0] != version:
            yield name
    if handed.state is not None:
        yield from (name.removeprefix("model.") for name in handed.state.moved(handed.state.read()))
