"""From what a user says about metrics to the records that a worker can follow.

Everything wrong with it is found here, on the orchestrator, before any worker is asked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from guava_nb.errors import ConfigError, GuavaError, PreparationError
from guava_nb.protocol.messages import Factory, MetricSpec
from guava_nb.replica.metrics import Merge, build_metric, is_torchmetric, merge_of
from guava_nb.spec.cells import resolve
from guava_nb.spec.run_spec import factory_for, factory_name, plain_arguments

__all__ = ["Metrics", "merges_for", "metric_specs"]

#: A mapping of names to metrics, or metrics alone: functions, classes, their names, torchmetrics metrics, or (one of the
#: first three, arguments).
Metrics = Mapping[str, Any] | Sequence[Any]

#: What a validation's record has anyway.
_TAKEN = ("loss", "accuracy", "samples", "step")


def metric_specs(metrics: Metrics | None, shared: ModuleType | None) -> tuple[MetricSpec, ...]:
    """Return the records of the metrics that a user gave.

    Raises:
        ConfigError: a name is taken or given twice, or a metric cannot be made again on a worker.
        SourceError: a function or class exists only here.
    """
    specs: list[MetricSpec] = []
    for name, metric in _named(metrics):
        if name in _TAKEN or any(spec.name == name for spec in specs):
            what = "is measured in any case" if name in _TAKEN else "is given twice"
            raise ConfigError(f'metric {name!r} {what}; name it otherwise: metrics={{"my_{name}": ...}}')
        specs.append(MetricSpec(name, _factory(name, metric, shared)))
    merges_for(specs, shared)
    return tuple(specs)


def merges_for(specs: Sequence[MetricSpec], shared: ModuleType | None) -> list[Merge]:
    """Return what merges each metric at the orchestrator.

    Raises:
        ConfigError: one cannot be made here; with the line to install what is missing.
    """
    merges = []
    for spec in specs:
        try:
            merges.append(merge_of(spec, build_metric(spec, lambda name: resolve(name, shared))))
        except ImportError as error:
            module = repr((error.name or "").partition(".")[0]) if error.name else "a module"
            raise ConfigError(
                f"metric {spec.name!r} is made here as well, and imports {module}, which is not installed here ({error}); "
                "install the package that has it, as on the workers"
            ) from error
    return merges


def _named(metrics: Metrics | None) -> list[tuple[str, Any]]:
    if metrics is None:
        return []
    # A MetricCollection is no mapping, but has the same items.
    if isinstance(metrics, Mapping) or (hasattr(metrics, "items") and hasattr(metrics, "compute_groups")):
        return [(str(name), metric) for name, metric in metrics.items()]
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        metrics = [metrics]
    return [(_name_of(metric), metric) for metric in metrics]


def _name_of(metric: Any) -> str:
    if isinstance(metric, tuple) and metric:
        return _name_of(metric[0])
    if isinstance(metric, functools.partial):
        return _name_of(metric.func)
    if isinstance(metric, str):
        return metric.rpartition(":")[2].rpartition(".")[2]
    return str(getattr(metric, "__name__", type(metric).__name__))


def _factory(name: str, metric: Any, shared: ModuleType | None) -> Factory:
    reference, args = (metric[0], metric[1]) if isinstance(metric, tuple) and len(metric) == 2 else (metric, None)
    if is_torchmetric(reference):
        return _factory_of(name, reference, shared)
    if not (isinstance(reference, str) or callable(reference)):
        raise ConfigError(
            f"metric {name!r} is a {type(reference).__name__}; give a function of (outputs, targets), a torchmetrics metric, or "
            "(class, {arguments})"
        )
    return factory_for("metric", reference, args, shared)


def _factory_of(name: str, metric: Any, shared: ModuleType | None) -> Factory:
    """Find the arguments with which a metric was made, and prove them: what they make must be like it."""
    cls = type(metric)
    way_out = (
        f"metric {name!r}: its arguments cannot be told from the object. Give the class and its arguments, "
        f"({cls.__name__}, {{...}}), or a shared function that makes it"
    )
    args: dict[str, Any] = {}
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = getattr(metric, parameter.name, parameter.default)
        if value is inspect.Parameter.empty:
            raise ConfigError(way_out)
        if value is not parameter.default:
            args[parameter.name] = value
    try:
        factory = Factory(factory_name("metric", cls, shared), plain_arguments("metric", args))
        again = build_metric(MetricSpec(name, factory), lambda wanted: resolve(wanted, shared))
    except (ConfigError, PreparationError) as error:
        raise ConfigError(f"{way_out} ({error})") from error
    except GuavaError:
        raise
    except Exception as error:  # its constructor wants something else
        raise ConfigError(way_out) from error
    if not _alike(metric, again):
        raise ConfigError(way_out)
    return factory


def _alike(one: Any, other: Any) -> bool:
    """Whether two metrics would measure the same: equal settings, equal empty states."""
    ours, theirs = (
        {k: v for k, v in vars(m).items() if k not in m._reductions and (k[:1] != "_" or k == "_defaults")}
        for m in (one, other)
    )
    return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in ours)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if callable(one):  # bound anew for each object
        return bool(getattr(one, "__qualname__", one) == getattr(other, "__qualname__", other))
    return bool(one == other)
