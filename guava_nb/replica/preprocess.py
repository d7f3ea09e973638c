"""What a user's functions do to a batch on the worker: augment (training only), then preprocess; and how they count tokens.

Data travels in the dtype it has; what makes floats of it, normalises or augments runs where the device is. Knows batches;
knows nothing of models. The replica calls `train` with the shard's random state in place, so a shard that is computed
again is the same one.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from guava_nb.data.sample_count import count_rows
from guava_nb.errors import ConfigError
from guava_nb.nested import axes_of, cut_parts, map_leaves, sliced
from guava_nb.protocol.messages import Factory, RunSpec
from guava_nb.spec.factories import Resolve, build, find

__all__ = ["Preprocessing", "cut", "cut_at", "pair_of", "place"]

# A batch on its way into a model: on the right device, in the right precision.
#
# Knows nested batches; knows nothing of models or losses.


def cut(batch: Any, marks: bytes, rows: int, pieces: int) -> list[tuple[Any, int]]:
    """Cut a batch into at most `pieces` parts of about equal size; returns them with their samples.

    Args:
        batch: of `rows` samples.
        marks: which parts have an entry per sample, as `guava_nb.nested.marks_of` wrote them down.
    """
    edges = sorted({round(rows * k / pieces) for k in range(pieces + 1)})
    ranges = list(zip(edges, edges[1:], strict=False))
    return [(part, stop - start) for part, (start, stop) in zip(cut_at(batch, marks, ranges), ranges, strict=True)]


def cut_at(batch: Any, marks: bytes, ranges: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the samples of each range (start, stop) of a batch; `marks` as for `cut`.

    Args:
        batch: of any nesting.
        marks: as for `cut`.
        ranges: start and stop of each, in samples.
    """

    def entries(part: Any, axis: int) -> list[Any]:
        return [sliced(part, axis, *one) for one in ranges]

    return cut_parts(batch, axes_of(marks), entries, len(ranges))


def place(batch: Any, device: torch.device, double: bool = False) -> Any:
    """Return the batch with its tensors on `device`; on the CPU nothing is copied.

    Args:
        batch: any nesting of the containers of `guava_nb.nested` around tensors; anything else stays as it is.
        device: where the model is.
        double: also turn floating-point tensors into float64 (complex ones into complex128), as a float64 run needs.
    """
    if device.type == "cpu" and not double:
        return batch

    def moved(value: Any) -> Any:
        return value.to(device, _dtype(value.data, double), non_blocking=True)

    # A packed sequence is moved as a whole, because the lengths in it stay on the CPU.
    return map_leaves(batch, moved, (Tensor, PackedSequence))


def _dtype(value: Tensor, double: bool) -> torch.dtype:
    """Return the dtype of a value of any shape on the device: `double` makes real and complex numbers wide."""
    if double and value.is_complex():
        return torch.complex128
    return torch.float64 if double and value.is_floating_point() else value.dtype


Function = Callable[[Any], Any]


class Preprocessing:
    """A run's `preprocess` and `augment`, found by name; either may be missing.

    Args:
        spec: the run's record.
        resolve: finds shared and importable objects.
        device: where batches lie.

    Raises:
        ConfigError: a name stands for nothing that can be called.
    """

    def __init__(self, spec: RunSpec, resolve: Resolve, device: torch.device) -> None:
        """Find the functions."""
        self._device, self._double = device, spec.precision == "fp64"
        self._preprocess = _function("preprocess", spec.preprocess, resolve)
        self._augment = _function("augment", spec.augment, resolve)
        self._tokens = _function("tokens", spec.tokens, resolve)

    @property
    def functions(self) -> dict[str, object]:
        """The user's functions, by their roles."""
        found = {"preprocess": self._preprocess, "augment": self._augment, "tokens": self._tokens}
        return {role: named[1] for role, named in found.items() if named is not None}

    @property
    def is_any(self) -> bool:
        """Whether a batch is treated at all."""
        return self._augment is not None or self._preprocess is not None

    def done(self) -> Preprocessing:
        """Return one for batches that are treated already: it does no more than place them."""
        placing = copy.copy(self)
        placing._augment = placing._preprocess = None
        return placing

    def train(self, batch: Any) -> Any:
        """Place a batch and treat it for training; draws from the random state of the moment.

        Raises:
            ConfigError: a function returned no batch, or one with another number of samples.
        """
        return self._run(self._preprocess, self._run(self._augment, self._place(batch)))

    def tokens(self, batch: Any) -> Any:
        """Count the tokens of a batch as the model gets it; None without such a function. A tensor is left on its device.

        Raises:
            ConfigError: the function returned no single number.
        """
        if self._tokens is None:
            return None
        name, function = self._tokens
        with torch.no_grad():
            count = function(batch)
        if isinstance(count, torch.Tensor):
            if count.numel() == 1 and not count.is_complex() and not count.is_meta:
                return count
            raise _no_number(name, f"a tensor of shape {tuple(count.shape)}, {count.dtype}, on {count.device}")
        if getattr(count, "size", None) == 1 and hasattr(count, "item"):  # NumPy's numbers and arrays
            count = count.item()
        if not isinstance(count, numbers.Real):
            raise _no_number(name, repr(count)[:80])
        try:
            return float(count)
        except (OverflowError, ValueError, TypeError):
            raise _no_number(name, "a number that is too large") from None

    def total(self, counts: Iterable[Any]) -> float | None:
        """Add up what `tokens` returned for the parts of a shard; on a GPU this waits for the device.

        Raises:
            ConfigError: a count is negative or not finite.
        """
        if self._tokens is None:
            return None
        found = [float(count) for count in counts if count is not None]
        odd = [count for count in found if not math.isfinite(count) or count < 0]
        if odd:
            raise ConfigError(f"{self._tokens[0]} returned {odd[0]:g}: a number of tokens is finite and at least 0")
        return sum(found) if found else None

    def for_evaluation(self, batch: Any) -> Any:
        """Place a batch and treat it for validation or prediction; errors as in `train`."""
        return self._run(self._preprocess, self._place(batch))

    def _place(self, batch: Any) -> Any:
        return place(batch, self._device, self._double)

    def _run(self, named: tuple[str, Function] | None, batch: Any) -> Any:
        if named is None or batch is None:
            return batch
        name, function = named
        rows = count_rows(batch)
        with torch.no_grad():
            treated = function(batch)
        if treated is None:
            raise ConfigError(f"{name} returned None instead of a batch: end it with a return")
        after = count_rows(treated)
        if rows is not None and after != rows:
            what = "nothing that can be counted" if after is None else f"{after} samples"
            raise ConfigError(
                f"{name} was given {rows} samples and returned {what}: each sample counts once, so leave none out, add none, "
                "and keep the samples on the first axis"
            )
        return self._place(treated)  # what it made from nothing is on the CPU, in torch's default dtype


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return a batch's inputs and targets.

    Raises:
        ConfigError: it is not of that form.
    """
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ConfigError(
            f"pipeline stages need batches of the form (inputs, targets), this one is a {type(batch).__name__}: the first "
            "stage gets the inputs, the last one the targets. Let the data set, collate_fn or preprocess give such pairs"
        )
    return batch[0], batch[1]


def _no_number(name: str, what: str) -> ConfigError:
    return ConfigError(f"{name} returned {what}: it takes a batch and returns one number, that of its tokens")


def _function(role: str, factory: Factory | None, resolve: Resolve) -> tuple[str, Function] | None:
    if factory is None:
        return None
    found = find(role, factory.name, {}, "", resolve)
    if isinstance(found, type):  # a class: its object is the function
        found = build(role, factory.name, found, from_torch=False, args=factory.args)
        if not callable(found):
            raise ConfigError(f"{role} {factory.name!r} makes a {type(found).__name__}, which cannot be called")
    return f"{role} {factory.name!r}", found
