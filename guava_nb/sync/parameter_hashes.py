"""Compares the parameters of workers of one kind after the same step, by their hashes, and what forwards changed of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from guava_nb.errors import TrainingError
from guava_nb.protocol.messages import ParameterChange, StateLoaded

__all__ = [
    "OwnChange",
    "OwnChanges",
    "ParameterHashes",
    "check_equal",
    "missed_change",
    "trained_again",
    "unlike_change",
    "unlike_switches",
]

#: Steps that reports may come late.
_LATE_STEPS = 4
#: Relative difference of norms on unlike kinds of devices that is rounding.
_ROUGH = 1e-4


class ParameterHashes:
    """The hashes that workers reported of the last few steps. Different kinds of devices round differently."""

    def __init__(self) -> None:
        """Nothing was reported yet."""
        self._known: dict[int, dict[str, dict[str, int]]] = {}

    def differs(self, step: int, kind: str, parameter_hash: str, rank: int) -> bool:
        """Note a worker's hash after a step; returns whether another worker of its kind reported another one.

        Args:
            step: after which it was taken.
            kind: of device, and part of the model: hashes of one kind must be equal.
            parameter_hash: as of `replica.state_dict`.
            rank: of the worker.
        """
        known = self._known.setdefault(step, {}).setdefault(kind, {})
        for earlier in [s for s in self._known if s < step - _LATE_STEPS]:
            del self._known[earlier]
        if len(known) < 2:  # a third one would be no news
            known.setdefault(parameter_hash, rank)
        return len(known) > 1

    def clear(self) -> None:
        """Forget all: with other shares the sums round differently, so right parameters would have other hashes too."""
        self._known.clear()


def check_equal(loaded: Iterable[tuple[str, StateLoaded]]) -> None:
    """Compare what workers, by their names, hold after the same state was sent to them.

    Raises:
        TrainingError: two of one kind hold different parameters.
    """
    first: dict[str, tuple[str, str]] = {}
    for name, answer in loaded:
        other, parameter_hash = first.setdefault(answer.device_kind, (name, answer.parameter_hash))
        if answer.parameter_hash != parameter_hash:
            raise TrainingError(
                f"{name} and {other} hold different parameters after the same state of step {answer.step} was sent to both "
                f"(hash {answer.parameter_hash[:12]} and {parameter_hash[:12]}); start the run again, and check the memory "
                f"of {name}"
            )


@dataclass(frozen=True, slots=True)
class OwnChange:
    """What one worker's forwards, or step function, changed of the parameters in a step; None for nothing."""

    rank: int
    kind: str
    change: ParameterChange | None


class OwnChanges:
    """What all workers' own code changed of the parameters in one step, the first of each kind of worker."""

    def __init__(self) -> None:
        """Nothing was reported yet."""
        self._first: dict[str, OwnChange] = {}

    def other_than(self, rank: int, kind: str, change: ParameterChange | None) -> OwnChange | None:
        """Note a worker's change; returns that of a worker that holds the same part of the model and changed it otherwise.

        Args:
            rank: of the worker.
            kind: of device, and part of the model.
            change: that it reported; None: it changed nothing.
        """
        mine = self._first.setdefault(kind, OwnChange(rank, kind, change))
        part = kind.partition(", stage")[2]
        others = (one for one in self._first.values() if one.kind.partition(", stage")[2] == part and one is not mine)
        if not _is_alike(mine.change, change, 0.0):
            return mine
        return next((one for one in others if not _is_alike(one.change, change, _ROUGH)), None)


def _is_alike(one: ParameterChange | None, other: ParameterChange | None, rough: float) -> bool:
    """Whether two workers made the same change; one that is made twice may round once more."""
    if one is None or other is None:
        return one is other
    rounding = max(one.rounding, rough)
    return one.name == other.name and (
        one.digest == other.digest or math.isclose(one.norm, other.norm, rel_tol=rounding)
    )


def unlike_change(parameter: str, step: int, one: str, other: str) -> str:
    """Return the sentence on a change that two workers made otherwise.

    Args:
        parameter: its name.
        step: in which it was, counted from 0.
        one, other: names of the workers.
    """
    return (
        f"the forward or the step itself changes {parameter}, and in step {step + 1} {one} and {other} came to other values: "
        "each sees its own samples (max_norm of an embedding goes by them), or draws its own random numbers. The step counts "
        "nowhere. Make the change go by the parameter alone, as `with torch.no_grad(): self.embedding.weight.renorm_(2, 0, 1.0)` "
        "in the forward instead of max_norm=1.0; or train with one worker"
    )


def unlike_switches(name: str, step: int, frozen_at: str, trained_at: str) -> str:
    """Return the sentence on a parameter that takes gradients on one worker and none on another.

    Args:
        name: of the parameter.
        step: in which it was, counted from 0.
        frozen_at, trained_at: names of the workers.
    """
    return (
        f"in step {step + 1} user code leaves parameter {name!r} without gradients on {frozen_at} (requires_grad=False) and "
        f"with them on {trained_at}. It goes by the samples that a worker has, by a count of its own forwards, or "
        f"{trained_at} built the model after the switch. The step counts nowhere. Switch by what is alike on all workers, such "
        "as a buffer that counts steps (register_buffer), or between two runs; or train with one worker"
    )


def trained_again(names: Sequence[str], step: int) -> str:
    """Return the sentence on parameters that take gradients again since workers built their models anew."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} took no gradient before workers were lost or came, and takes one from step {step + 1} on. A model "
        "that is built anew begins with the requires_grad of its factory. If your code did not switch it back, the run differs "
        "from plain PyTorch from here on: switch by what the state has, such as a buffer that counts steps (register_buffer)"
    )


def missed_change(parameter: str, step: int, who: str) -> str:
    """Return the sentence on a change that a worker could not make.

    Args:
        parameter: its name.
        step: in which it was, counted from 0.
        who: name of the worker.
    """
    return (
        f"the forward or the step itself changes {parameter}, and {who} has no sample of step {step + 1} and had none before, so "
        "the change is not made there. The step counts nowhere. Give each worker a sample: larger batches, other shares, or "
        "drop_last=True in the DataLoader; or train with one worker"
    )
