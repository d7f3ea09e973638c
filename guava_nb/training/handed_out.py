"""What a callback may take for what trains: the registered instance, copies that `run.model()` gave, globals of the user's code.

Workers have models and modules of their own, so what a callback changes here has no effect; it is told at once.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from guava_nb.replica.one_step_check.python_state import PythonState
from guava_nb.spec.changed_code import CodeHere

__all__ = ["HandedOut"]

_SCHEDULE = (
    "Set what changes during training in the model's forward or in the step (a buffer that counts steps tells when)"
)
_INSTEAD = (
    f"Workers train models of their own, so this has no effect on the run. {_SCHEDULE}, let an optimizer or a schedule change "
    "weights, or end the run, change the registered model and start again"
)


@dataclass(slots=True)
class _Handed:
    what: str
    model: weakref.ref[nn.Module]
    versions: dict[str, tuple[int, bool]]
    state: PythonState | None  # it holds the model, so a copy has none


class HandedOut:
    """Knows the models that left the run, and sees what a callback did to them, and to what the run's code reads here.

    Args:
        notice: takes sentences.
        registered: the instance that the user registered, if it was one.
        code: the run's code as it is here; None where workers are not compared with it.
    """

    def __init__(
        self, notice: Callable[[str], object], registered: nn.Module | None, code: CodeHere | None = None
    ) -> None:
        self._notice, self._told = notice, set[str]()
        self._handed: list[_Handed] = []
        self._code, self._next_look = code, 0.0
        if registered is not None:
            self._note("the registered model", registered, PythonState(registered, {}))

    def note(self, model: nn.Module) -> nn.Module:
        """Remember a copy that a callback gets; returns it."""
        self._note("the copy that run.model() gave", model)
        return model

    def _note(self, what: str, model: nn.Module, state: PythonState | None = None) -> None:
        self._handed = [one for one in self._handed if one.model() is not None]
        self._handed.append(_Handed(what, weakref.ref(model), _versions(model), state))

    def look(self, who: str, is_often: bool = False) -> None:
        """Tell what a callback changed; each model, and each change, once.

        Args:
            who: was called.
            is_often: it is, so globals are looked at only now and then: that takes a hundredth of the time at most.
        """
        if self._code is not None and not (is_often and time.monotonic() < self._next_look):
            began = time.monotonic()
            if found := self._code.changed():
                self._tell(
                    f"{who} changed {found}, which the run's code reads. Workers have modules and cells of their own, so this "
                    f"has no effect on the run. {_SCHEDULE}, or end the run and start again, with the value in the module, the "
                    "shared cell or an argument (model_args and the like)"
                )
            self._next_look = 101 * time.monotonic() - 100 * began
        for one in list(self._handed):
            model = one.model()
            changed = None if model is None else next(_changes(one, model), None)
            if changed is not None:
                self._handed.remove(one)
                self._tell(f"{who} changed {changed} of {one.what}. {_INSTEAD}")

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._notice(sentence)
            warnings.warn(sentence, stacklevel=3)


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
        moved = handed.state.moved(handed.state.read())
        yield from (
            name.removeprefix("model.") for name in moved if name.startswith("model.")
        )  # globals are the code's
