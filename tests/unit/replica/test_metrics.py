"""Metrics measured batch by batch and merged: what one process that saw all batches would say."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.data.codec import pack, unpack
from guava_nb.errors import ConfigError, SourceError
from guava_nb.evaluation.metric_specs import merges_for, metric_specs
from guava_nb.protocol.messages import Factory, MetricSpec
from guava_nb.replica.metrics import Measure, build_metric, build_metrics, merge_of

CPU = torch.device("cpu")
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def shared(**names: Any) -> types.ModuleType:
    module = types.ModuleType("guava_shared")
    module.__dict__.update(names)
    return module


def error_rate(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) != targets).double().mean()


def margin(outputs: torch.Tensor, targets: torch.Tensor, k: int = 0) -> tuple[torch.Tensor, int]:
    picked = outputs[targets > k]
    return picked.double().sum(), picked.numel()


def data(sizes: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def merged(specs: Sequence[MetricSpec], module: types.ModuleType, sizes: Sequence[int], seed: int) -> dict[str, Any]:
    """Each batch on another worker, states over the wire, merged at the hub."""
    from guava_nb.spec.cells import resolve

    merges = merges_for(specs, module)
    x, y = data(sizes, seed)
    workers = [build_metrics(specs, lambda name: resolve(name, module), CPU) for _ in range(2)]
    for number, (outputs, targets) in enumerate(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True)):
        measures = workers[number % 2]
        for measure in measures:
            measure.begin()
            measure.see(outputs, targets, len(outputs))
        tree, buffers = pack([measure.state() for measure in measures])
        states = unpack(tree, memoryview(bytearray(b"".join(bytes(b) for b in buffers))))
        for merge, state in zip(merges, states, strict=True):
            merge.add(state)
    return {spec.name: merge.result() for spec, merge in zip(specs, merges, strict=True)}


@given(SIZES, st.integers(0, 99))
def test_functions_give_the_mean_over_all_rows_however_they_are_batched(sizes: list[int], seed: int) -> None:
    module = shared(error_rate=error_rate, margin=margin)
    specs = metric_specs({"errors": error_rate, "margin": ("margin", {"k": 1})}, module)
    found = merged(specs, module, sizes, seed)
    x, y = data(sizes, seed)
    assert found["errors"] == pytest.approx(float(error_rate(x, y)), abs=1e-12)
    total, count = margin(x, y, 1)
    if count:
        assert found["margin"] == pytest.approx(float(total) / count, abs=1e-9)
    else:
        assert found["margin"] != found["margin"]


def torchmetrics_cases() -> dict[str, Callable[[], Any]]:
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is part of the extra test")
    c = metrics.classification
    return {
        "macro": lambda: c.MulticlassAccuracy(num_classes=4, average="macro"),
        "f1": lambda: metrics.F1Score(task="multiclass", num_classes=4, top_k=2),
        "confusion": lambda: c.MulticlassConfusionMatrix(num_classes=4),
        "auroc": lambda: c.MulticlassAUROC(num_classes=4),  # keeps all scores, in lists
        "calibration": lambda: c.MulticlassCalibrationError(num_classes=4, n_bins=5),
    }


@settings(max_examples=15, deadline=None)
@given(SIZES, st.integers(0, 99))
def test_torchmetrics_metrics_equal_one_process_that_saw_all_batches(sizes: list[int], seed: int) -> None:
    cases = torchmetrics_cases()
    module = shared()
    found = merged(metric_specs({n: make() for n, make in cases.items()}, module), module, sizes, seed)
    x, y = data(sizes, seed)
    for name, make in cases.items():
        metric = make()
        for outputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
            metric.update(outputs, targets)
        assert torch.equal(torch.tensor(found[name]), metric.compute()), name


def test_means_maxima_and_stacked_states_are_reduced_as_the_metric_says() -> None:
    """Regression metrics: extremes, and states that their own `compute` puts together."""
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is part of the extra test")
    x = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = x + torch.randn(30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for made in (metrics.PearsonCorrCoef(), metrics.R2Score(), metrics.MeanSquaredError(squared=False)):
        (spec,) = metric_specs([made], None)
        measure, merge = Measure("m", build_metric(spec, _resolve), CPU), merges_for([spec], None)[0]
        for outputs, targets in zip(x.split(7), y.split(7), strict=True):
            measure.begin()
            measure.see(outputs, targets, len(outputs))
            merge.add(measure.state())
            made.update(outputs, targets)
        assert merge.result() == pytest.approx(float(made.compute()), rel=1e-5)


def _resolve(name: str) -> Any:
    from guava_nb.spec.cells import resolve

    return resolve(name, None)


def test_a_metric_is_made_again_with_its_arguments_or_refused() -> None:
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is part of the extra test")
    made = metrics.classification.MulticlassF1Score(num_classes=4, average="micro", ignore_index=2)
    (spec,) = metric_specs([made], None)
    assert spec.name == "MulticlassF1Score" and spec.factory.args["average"] == "micro"
    again = build_metric(spec, _resolve)
    assert (again.num_classes, again.average, again.ignore_index) == (4, "micro", 2)

    class Scaled(metrics.MeanMetric):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.scale = 2 * factor

    with pytest.raises(ConfigError, match=r"metric 'Scaled': its arguments cannot be told.*\(Scaled, \{\.\.\.\}\)"):
        metric_specs([Scaled(3.0)], shared(Scaled=Scaled))
    made = metrics.classification.MulticlassF1Score(num_classes=4)
    made.beta = 2.0  # no argument of this class, but a part of what it measures
    with pytest.raises(ConfigError, match=r"its arguments cannot be told"):
        metric_specs([made], None)


def test_factories_collections_and_names_are_taken_too() -> None:
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is part of the extra test")

    def make_f1() -> Any:
        return metrics.F1Score(task="multiclass", num_classes=4)

    module = shared(make_f1=make_f1, error_rate=error_rate)
    specs = metric_specs(
        ["make_f1", (metrics.Accuracy, {"task": "multiclass", "num_classes": 4}), "error_rate"], module
    )
    assert [spec.name for spec in specs] == ["make_f1", "Accuracy", "error_rate"]
    found = merged(specs, module, [5, 3], 1)
    assert found["Accuracy"] == pytest.approx(1 - found["error_rate"])
    c = metrics.classification
    both = metrics.MetricCollection({"p": c.MulticlassPrecision(num_classes=4), "r": c.MulticlassRecall(num_classes=4)})
    assert [spec.name for spec in metric_specs(both, module)] == ["p", "r"]


def test_metrics_that_hold_other_metrics_are_refused_with_the_way_out() -> None:
    metrics = pytest.importorskip("torchmetrics", reason="torchmetrics is part of the extra test")
    accuracy = metrics.classification.MulticlassAccuracy(num_classes=4)
    collection = metrics.MetricCollection({"a": accuracy})
    module = shared(composed=accuracy + 1.0, wrapped=metrics.MinMaxMetric(accuracy), both=collection)
    module.make = lambda: collection
    for name, sentence in (
        (
            "composed",
            r"'composed' is a CompositionalMetric, which holds other metrics \(MulticlassAccuracy\).*one by one",
        ),
        ("wrapped", r"'wrapped' is a MinMaxMetric, which holds other metrics"),
        ("both", r"'both' is a MetricCollection of 'a': name its parts"),
        ("make", r"'make' is a MetricCollection of 'a': name its parts"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            metric_specs([name], module)


def test_what_cannot_be_measured_is_refused_before_a_worker_is_asked() -> None:
    module = shared(error_rate=error_rate, nothing=lambda: 3)
    for metrics, kind, sentence in (
        ({"loss": error_rate}, ConfigError, "metric 'loss' is measured in any case"),
        (["error_rate", error_rate], ConfigError, "metric 'error_rate' is given twice"),
        ([lambda o, t: 0], SourceError, "exists only here"),
        (["error_rat"], ConfigError, "did you mean 'error_rate'"),
        ([5], ConfigError, "metric 'int' is a int"),
        (["nothing"], ConfigError, "metric 'nothing' made a int"),
        ([("error_rate", {"x": object()})], ConfigError, "only numbers, text"),
        (["no_such_module_xyz:f"], ConfigError, "no_such_module_xyz"),
    ):
        with pytest.raises(kind, match=sentence):
            metric_specs(metrics, module)


@pytest.mark.parametrize("result", ["0.5", None, torch.zeros(3), (1, 2, 3), (torch.zeros(2), 1)])
def test_a_function_that_returns_no_number_is_told(result: Any) -> None:
    measure = Measure("odd", lambda outputs, targets: result, CPU)
    with pytest.raises(ConfigError, match=r"metric 'odd' returned a \w+.*return one number.*or \(sum, count\)"):
        measure.see(None, None, 3)


def test_nothing_counted_is_nan_and_not_zero() -> None:
    spec = MetricSpec("m", Factory("m"))
    assert merge_of(spec, error_rate).result() != merge_of(spec, error_rate).result()


def f1(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    found, wanted = outputs.argmax(1) == 1, targets == 1
    return 2 * (found & wanted).sum() / (found.sum() + wanted.sum())


def rmse(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((outputs.amax(1) - targets).square().mean().sqrt())


def correlation(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.corrcoef(torch.stack([outputs.amax(1), targets.to(outputs.dtype)]))[0, 1]


def drawn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.rand(())


def stays_whole(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert len(outputs) == 16
    return outputs.mean()


def notes_on(metric: Callable[..., Any], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """What a validation of three batches says of a metric."""
    from guava_nb.evaluation.validation import Validation

    specs = metric_specs([metric], module := shared(**{metric.__name__: metric}))
    merges = merges_for(specs, module)
    (measure,) = build_metrics(specs, lambda name: metric, CPU)
    for seed in range(3):
        outputs, targets = data([16], seed)
        measure.begin()
        measure.see(outputs.to(dtype), targets, 16)
        merges[0].add(unpack(*(lambda tree, parts: (tree, memoryview(b"".join(parts))))(*pack(measure.state()))))
    return Validation(specs, merges).notes()


@pytest.mark.parametrize("metric", [f1, rmse, correlation])
def test_a_function_that_is_no_mean_over_rows_is_told(metric: Callable[..., Any]) -> None:
    note = notes_on(metric)[metric.__name__]
    assert "no mean over its rows" in note and "(sum, count)" in note and "torchmetrics" in note


@pytest.mark.parametrize("metric", [error_rate, margin, drawn, stays_whole])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mean_a_sum_with_its_count_and_what_cannot_be_known_are_not_told(
    metric: Callable[..., Any], dtype: torch.dtype
) -> None:
    assert notes_on(metric, dtype) == {}


def test_a_partial_object_is_its_function_with_its_arguments() -> None:
    module = shared(margin=margin)
    margin.__module__, named = "__main__", margin.__qualname__  # as in a notebook
    (made,) = metric_specs([functools.partial(margin, k=2)], module)
    assert (made.name, made.factory) == (named, Factory("margin", {"k": 2}))
