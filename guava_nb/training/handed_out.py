"""What a callback may take for what trains: the registered instance, copies that `run.model()` gave, globals of the user's code.

Workers have models and modules of their own, so what a callback changes here has no effect; and what it changes in the loader's
objects comes after the batches that are read ahead. Both is told at once.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.randomness import KeptByObjects
from guava_nb.replica.one_step_check.python_state import PythonState
from guava_nb.spec.changed_code import CodeHere
from guava_nb.training.plan import Position

__all__ = ["HandedOut"]

_SCHEDULE = (
    "Set what changes during training in the model's forward or in the step (a buffer that counts steps tells when)"
)
_INSTEAD = (
    f"Workers train models of their own, so this has no effect on the run. {_SCHEDULE}, let an optimizer or a schedule change "
    "weights, or end the run, change the registered model and start again"
)
#: Values of a parameter that are compared, about.
_MOST_VALUES = 1024


class _Placed(Protocol):
    position: Position


@dataclass(slots=True)
class _Handed:
    what: str
    model: weakref.ref[nn.Module]
    versions: dict[str, tuple[int, bool]]
    values: dict[str, torch.Tensor]
    state: PythonState | None  # it holds the model, so a copy has none


class HandedOut:
    """Knows the models that left the run, and sees what a callback did to them, and to what the run's code reads here.

    Args:
        notice: takes sentences.
        registered: the instance that the user registered, if it was one.
        code: the run's code as it is here; None where workers are not compared with it.
        feed: of the run's batches, whose objects a callback may change.
        place: says how far they have been committed.
    """

    def __init__(
        self,
        notice: Callable[[str], object],
        registered: nn.Module | None,
        code: CodeHere | None = None,
        feed: LoaderFeed | None = None,
        place: _Placed | None = None,
    ) -> None:
        """Note the registered instance."""
        self._notice, self._told = notice, set[str]()
        self._feed, self._place = feed, place
        self._last = None if feed is None else feed.kept()
        self._moving = set[str]()
        self._fresh: nn.Module | None = None  # one that the callback may have let go when it is looked at
        self._handed: list[_Handed] = []
        self._code, self._next_look = code, 0.0
        if registered is not None:
            self._note("the registered model", registered, PythonState(registered, {}))

    def note(self, model: nn.Module) -> nn.Module:
        """Remember a copy that a callback gets; returns it."""
        self._note("the copy that run.model() gave", model)
        self._fresh = model
        return model

    def _note(self, what: str, model: nn.Module, state: PythonState | None = None) -> None:
        self._handed = [one for one in self._handed if one.model() is not None]
        self._handed.append(_Handed(what, weakref.ref(model), _versions(model), _values(model), state))

    def call(self, who: str, callback: Callable[[], Any], is_often: bool = False) -> Any:
        """Call a callback and look; returns what it returns. `who` and `is_often` as for `look`."""
        is_time, began = not (is_often and time.monotonic() < self._next_look), time.monotonic()
        before = self._feed.kept() if self._feed is not None and is_time else None
        if before is not None and self._last is not None:  # loading moves these by itself
            self._moving |= before.changed_since(self._last)
        spent, outcome = time.monotonic() - began, callback()
        began = time.monotonic()
        if before is not None:
            self._look_at_loader(who, before)
        spent += time.monotonic() - began
        self.look(who, is_often)
        self._next_look += 100 * spent
        return outcome

    def look(self, who: str, is_often: bool = False) -> None:
        """Tell what a callback changed; each model, and each change, once.

        Args:
            who: was called.
            is_often: it is, so globals, values and the loader are looked at only now and then: that takes a hundredth of the
                time at most.
        """
        is_time, began = not (is_often and time.monotonic() < self._next_look), time.monotonic()
        if self._code is not None and is_time and (found := self._code.changed()):
            self._tell(
                f"{who} changed {found}, which the run's code reads. Workers have modules and cells of their own, so this "
                f"has no effect on the run. {_SCHEDULE}, or end the run and start again, with the value in the module, the "
                "shared cell or an argument (model_args and the like)"
            )
        for one in list(self._handed):
            model = one.model()
            changed = None if model is None else next(_changes(one, model, is_time), None)
            if changed is not None:
                self._handed.remove(one)
                self._tell(f"{who} changed {changed} of {one.what}. {_INSTEAD}")
        self._fresh = None
        if is_time:
            self._next_look = 101 * time.monotonic() - 100 * began

    def _look_at_loader(self, who: str, before: KeptByObjects) -> None:
        assert self._feed is not None and self._place is not None
        self._last, at = self._feed.kept(), self._place.position
        names = () if self._last is None else sorted(self._last.changed_since(before) - self._moving)
        ahead = self._feed.read_beyond(at.epoch, at.batches)
        if names and ahead:
            self._tell(
                f"{who} changed {', '.join(names[:3])} of the loader. Batches are read ahead: {ahead} were read before, and a "
                "plain loop would have read them after it. Change it in on_epoch, which is in time for the next epoch, or let "
                "the data set count by itself",
                who + names[0],
            )

    def _tell(self, sentence: str, once: str = "") -> None:
        if (once or sentence) not in self._told:
            self._told.add(once or sentence)
            self._notice(sentence)
            warnings.warn(sentence, stacklevel=3)


def _versions(model: nn.Module) -> dict[str, tuple[int, bool]]:
    return {name: (p._version, p.requires_grad) for name, p in model.named_parameters()}


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Some values of each parameter, all of a small one: what is written through `.data` shows in no version."""
    found = {}
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        found[name] = flat[:: max(1, flat.numel() // _MOST_VALUES)].clone()
    return found


def _changes(handed: _Handed, model: nn.Module, with_values: bool) -> Iterator[str]:
    now = _versions(model)
    for name, (version, takes_gradient) in handed.versions.items():
        if name in now and now[name][1] != takes_gradient:
            yield f"requires_grad of {name}"
        if name in now and now[name][0] != version:
            yield name
    for name, value in _values(model).items() if with_values else ():
        first = handed.values.get(name)
        if (
            first is not None
            and (first.dtype, first.device) == (value.dtype, value.device)
            and _is_unlike(first, value)
        ):
            yield name
    if handed.state is not None:
        moved = handed.state.moved(handed.state.read())
        yield from (
            name.removeprefix("model.") for name in moved if name.startswith("model.")
        )  # globals are the code's


def _is_unlike(first: torch.Tensor, now: torch.Tensor) -> bool:
    return first.shape != now.shape or not torch.equal(first.nan_to_num(), now.nan_to_num())
