"""Figures of a validation beside loss and accuracy: measured batch by batch on the workers, put together at the hub.

Two kinds. A *function* `metric(outputs, targets)` returns a mean over its rows, or (sum, count); the result is the sum of
sums over the sum of counts. One whose value of a batch is not the mean of its parts (F1, a correlation) is told: the result is
then the mean of the batches' values. A *torchmetrics* metric is reset before every batch and the states of all batches are
merged by the metric's own reductions, so each batch counts exactly once, on any worker. torchmetrics is recognised by
what its metrics have, and never imported from here.

Merging is in the order of the loader's batches. Sums are added one by one, as a metric that had seen all batches in one
process would have done; so its result is the same to the last bit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from guava_nb.errors import ConfigError, GuavaError, TrainingError
from guava_nb.nested import axes_by_length, cut_parts, leaves, sliced
from guava_nb.protocol.messages import MetricSpec
from guava_nb.spec.factories import Resolve, build, find

__all__ = ["Measure", "Merge", "build_metric", "build_metrics", "is_torchmetric", "merge_of", "plain_result"]

Metric = Any  # a function, or a metric of torchmetrics

#: Batches of which a function's value is compared with that of their halves.
_COMPARED_BATCHES = 3


def is_torchmetric(value: Any) -> bool:
    """Whether it is a metric of torchmetrics, or works like one."""
    return not isinstance(value, type) and all(hasattr(value, n) for n in ("update", "compute", "reset", "_reductions"))


def build_metric(spec: MetricSpec, resolve: Resolve) -> Metric:
    """Return the function or the metric that a record names.

    Raises:
        ConfigError: the name is unknown, an argument does not fit.
        PreparationError: the user's own factory raised.
        ImportError: a module is missing here.
    """
    name, args = spec.factory.name, spec.factory.args
    try:
        found: Any = find("metric", name, {}, "", resolve)
    except ConfigError as error:
        raise ConfigError(
            f"{error}. A metric is a shared function of outputs and targets, or an expression that makes one of torchmetrics; "
            "loss and, for classes, accuracy are measured without being named"
        ) from error
    _check_travels(spec.name, found)
    if is_torchmetric(found):  # one that a shared cell made
        return copy.deepcopy(found)
    if isinstance(found, type) or _takes_nothing(found, args):
        made = build("metric", name, found, from_torch=False, args=args)
        _check_travels(spec.name, made)
        if not is_torchmetric(made):
            raise ConfigError(
                f"metric {name!r} made a {type(made).__name__}; give a function of (outputs, targets), or something that makes "
                "a torchmetrics metric"
            )
        return made
    return functools.partial(found, **args) if args else found


def _check_travels(name: str, metric: Any) -> None:
    """Refuse what holds other metrics: only a metric's own states travel."""
    if isinstance(metric, type):
        return
    if hasattr(metric, "items") and hasattr(metric, "compute_groups"):
        raise ConfigError(
            f"metric {name!r} is a {type(metric).__name__} of {', '.join(map(repr, metric.keys()))}: name its parts one by one, "
            "metrics={'NAME': (class, {arguments}), ...}, or give the collection itself as metrics="
        )
    parts = [m for m in metric.modules() if m is not metric and is_torchmetric(m)] if hasattr(metric, "modules") else []
    if is_torchmetric(metric) and (parts or not metric._reductions):
        inside = (
            f"holds other metrics ({', '.join(type(part).__name__ for part in parts)})" if parts else "has no states"
        )
        raise ConfigError(
            f"metric {name!r} is a {type(metric).__name__}, which {inside}, and only a metric's own states come back from "
            "workers: give the metrics inside it one by one and put their results together afterwards"
        )


def _takes_nothing(function: Callable[..., Any], args: Mapping[str, Any]) -> bool:
    """Whether a function needs no outputs and targets, so that it makes a metric instead of being one."""
    try:
        inspect.signature(function).bind(**args)
    except (TypeError, ValueError):
        return False
    return True


def build_metrics(specs: Sequence[MetricSpec], resolve: Resolve, device: torch.device) -> list[Measure]:
    """Return what measures each of these on a worker; raises as `build_metric`."""
    return [Measure(spec.name, build_metric(spec, resolve), device) for spec in specs]


# ------------------------------------------------------------------------------------------------------ on the worker


class Measure:
    """One metric over one batch.

    Args:
        name: for errors.
        metric: from `build_metric`.
        device: where outputs are.
    """

    def __init__(self, name: str, metric: Metric, device: torch.device) -> None:
        self._name = name
        self._metric = metric.to(device) if is_torchmetric(metric) and hasattr(metric, "to") else metric
        self._to_compare = _COMPARED_BATCHES
        self.begin()

    def begin(self) -> None:
        """Forget the batch before."""
        self._sum = self._count = 0.0
        self._no_mean: list[float] = []
        if is_torchmetric(self._metric):
            self._metric.reset()

    def see(self, outputs: Any, targets: Any, rows: int) -> None:
        """Take a batch, or a part of it.

        Args:
            outputs: of the model.
            targets: of the batch; None where it has none.
            rows: samples in it.

        Raises:
            ConfigError: the function returned nothing that can be added up.
        """
        if is_torchmetric(self._metric):
            self._metric.update(outputs, targets)
            return
        result = self._metric(outputs, targets)
        value, count = self._read(result, rows)
        self._sum += value
        self._count += count
        if self._to_compare and rows > 1 and not isinstance(result, list | tuple):
            self._to_compare -= 1
            self._no_mean = self._no_mean or self._compared(outputs, targets, rows, _number(result))

    def _compared(self, outputs: Any, targets: Any, rows: int, value: float) -> list[float]:
        """Return a function's value of a batch, and the mean of those of its halves where that is another one; else nothing."""
        ranges = [(0, rows // 2), (rows // 2, rows)]
        try:
            halves = cut_parts(
                (outputs, targets), axes_by_length(rows), lambda part, axis: [sliced(part, axis, *r) for r in ranges], 2
            )
            values = [_number(self._metric(*half)) for half in halves]
            again = _number(self._metric(outputs, targets))
        except Exception:  # the user's function takes no halves
            return []
        mean = sum(one * (stop - start) for one, (start, stop) in zip(values, ranges, strict=True)) / rows
        close = _rounding(outputs)
        # One that draws random numbers gives another value of the same batch, and nothing is known of it.
        return [] if again != value or math.isclose(value, mean, rel_tol=close, abs_tol=close) else [value, mean]

    def _read(self, result: Any, rows: int) -> tuple[float, float]:
        pair = result if isinstance(result, list | tuple) and len(result) == 2 else None
        try:
            if pair is not None:
                return _number(pair[0]), _number(pair[1])
            return _number(result) * rows, float(rows)
        except (TypeError, ValueError, RuntimeError):
            shape = f" of shape {tuple(result.shape)}" if isinstance(result, Tensor) else ""
            raise ConfigError(
                f"metric {self._name!r} returned a {type(result).__name__}{shape}; return one number, the mean over the "
                "rows, or (sum, count)"
            ) from None

    def state(self) -> Any:
        """Return what this batch came to, as plain data with tensors on the CPU."""
        if not is_torchmetric(self._metric):
            return [self._sum, self._count, *self._no_mean]
        return {name: _on_cpu(getattr(self._metric, name)) for name in self._metric._reductions}


def _rounding(outputs: Any) -> float:
    """How unlike two values of these outputs may be by rounding alone."""
    return (
        max((4 * torch.finfo(one.dtype).eps for one in leaves(outputs) if one.dtype.is_floating_point), default=0.0)
        + 1e-5
    )


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("text is no number")
    return float(value)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return [_on_cpu(entry) for entry in value]


# --------------------------------------------------------------------------------------------------------- at the hub


class Merge:
    """Puts the states of a function's batches together.

    Attributes:
        no_mean: the function's value of a batch, and the mean of those of its halves, where these differ; else empty.
    """

    def __init__(self) -> None:
        self._sum = self._count = 0.0
        self.no_mean: Sequence[float] = ()

    def add(self, state: Any) -> None:
        """Add the next batch."""
        self._sum += state[0]
        self._count += state[1]
        self.no_mean = self.no_mean or state[2:4]

    def result(self) -> Any:
        """Return the figure over all batches; NaN when nothing was counted."""
        return self._sum / self._count if self._count else float("nan")


class _TorchMerge(Merge):
    """Puts the states of a torchmetrics metric together by its own reductions."""

    def __init__(self, name: str, metric: Metric) -> None:
        super().__init__()
        self._name, self._metric = name, metric
        self._metric.reset()
        self._batches = 0
        self._parts: dict[str, list[Any]] = {name: [] for name in metric._reductions}

    def add(self, state: Any) -> None:
        if not isinstance(state, dict) or state.keys() != self._parts.keys():
            raise TrainingError(
                f"metric {self._name!r}: a worker has other states than the orchestrator's; install the same version of "
                "torchmetrics on both sides"
            )
        self._batches += 1
        for name, value in state.items():
            parts, reduce = self._parts[name], _known(self._metric._reductions[name])
            if isinstance(value, list):
                parts.extend(value)
            elif reduce is not None and parts:
                parts[0] = reduce(parts[0], value)
            else:
                parts.append(value)

    def result(self) -> Any:
        if not self._batches:
            return float("nan")
        for name, parts in self._parts.items():
            setattr(self._metric, name, self._reduced(name, parts))
        # What the metric would have counted itself; without it, it warns that it has seen nothing.
        self._metric._update_count, self._metric._computed = self._batches, None
        try:
            return plain_result(self._metric.compute())
        except GuavaError:
            raise
        except Exception as error:  # the metric's own code, here at the orchestrator
            raise TrainingError(f"metric {self._name!r} raised {type(error).__name__}: {error}") from error

    def _reduced(self, name: str, parts: list[Any]) -> Any:
        reduction, is_list = self._metric._reductions[name], isinstance(self._metric._defaults[name], list)
        if is_list:
            if reduction is None or not parts:
                return parts
            return reduction(parts)
        if _known(reduction) is not None:
            return parts[0]
        stacked = torch.stack(parts)
        return stacked if reduction is None else reduction(stacked)


def _known(reduction: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a reduction of two states of one shape that may be done as they come, so that not all are kept."""
    return _PAIRWISE.get(getattr(reduction, "__name__", ""))


_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
}


def merge_of(spec: MetricSpec, metric: Metric) -> Merge:
    """Return what merges a metric; `metric` is the orchestrator's own, from `build_metric`."""
    return _TorchMerge(spec.name, metric) if is_torchmetric(metric) else Merge()


def plain_result(value: Any) -> Any:
    """Return a metric's result as numbers, lists and dicts."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain_result(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_result(entry) for entry in value]
    return value
