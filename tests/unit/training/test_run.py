from __future__ import annotations

import json

import pytest

from guava_nb.cluster.group_path import Route
from guava_nb.status import WireBytes
from guava_nb.training.logs.figures import thin
from guava_nb.training.run import Run, RunSources


def filled(steps: int, sources: RunSources | None = None) -> Run:
    run = Run("run-1", "data", 2, steps, sources)
    run.move("training")
    run.begin_epoch(0)
    for k in range(steps):
        run.add_step({"step": k + 1, "epoch": 1, "loss": 1.0 / (k + 1), "count": 4, "samples": 4, "learning_rate": 0.1})
    return run


def test_thin_keeps_the_last_point_and_few_others() -> None:
    records = [{"step": k} for k in range(10_001)]
    kept = thin(records, 500)
    assert len(kept) <= 501 and kept[0]["step"] == 0 and kept[-1]["step"] == 10_000
    assert thin(records[:3]) == records[:3]


def test_what_workers_exchange_directly_is_not_counted() -> None:
    routes = [Route("relay", "guava", "asked for"), Route("direct", "gloo", "on one host")]
    now: list[Route] = []
    run = filled(1, RunSources(wire=lambda: WireBytes(90, 10, 50, 7, 3), route=lambda: now[-1]))
    found = []
    for route in routes:
        now.append(route)
        found.append(run.wire)
    assert found == [WireBytes(90, 10, 50, 7, 3), WireBytes(90, 10, 50, None, None)]
    run.end("done")
    wire = json.loads(json.dumps(run.report()))["wire"]
    assert (wire["gradient_bytes"], wire["activation_bytes"], wire["sample_bytes"]) == (None, None, 50)


def test_the_report_is_json_with_the_promised_keys() -> None:
    run = filled(3)
    run.add_validation({"step": 3, "loss": 0.5, "accuracy": 0.75, "samples": 8})
    run.end("done")
    report = json.loads(json.dumps(run.report()))
    assert {
        "mode", "sync", "workers", "steps", "epochs", "samples", "train_loss", "val", "wall_s", "step_s", "wire", "energy",
        "parity", "lost_samples", "duplicated_samples", "generations",
    } <= report.keys()  # fmt: skip
    assert report["steps"] == 3 and report["samples"] == 12 and len(report["train_loss"]) == 3
    assert report["val"] == {"loss": 0.5, "accuracy": 0.75, "samples": 8}
    kinds = {f"{kind}_bytes" for kind in ("out", "in", "sample", "gradient", "activation", "parameter", "control")}
    assert kinds == report["wire"].keys()


def test_what_was_not_measured_is_none_and_never_zero() -> None:
    run = Run("run-1", "data", 1, None)
    assert run.report()["step_s"] == {"p50": None, "p95": None} and run.report()["val"] is None
    assert run.status().samples_per_s is None and run.status().loss is None


def test_result_raises_what_ended_the_run() -> None:
    run = filled(1)
    assert not run.wait(0)
    run.end("failed", ValueError("no"))
    assert run.wait(0) and run.state == "failed" and "no" in run.status().message
    with pytest.raises(ValueError, match="no"):
        run.result()


def test_a_run_that_waits_knows_how_long() -> None:
    run = filled(1)
    run.move("waiting", "for workers", 300)
    assert 290 < (run.status().waits_s or 0) <= 300
    run.move("training")
    assert run.status().waits_s is None
    run.move("waiting", "for workers", 0)
    assert run.status().waits_s == 0
    run.end("failed", ValueError("nobody came"))
    assert run.status().waits_s is None


def test_rewind_forgets_steps_and_validations() -> None:
    run = filled(5)
    run.add_validation({"step": 5, "loss": 0.5, "accuracy": None, "samples": 8})
    run.rewind(2)
    assert [r["step"] for r in run.history] == [1, 2] and run.validations == []


def test_an_epoch_of_which_no_step_counts_is_not_counted_when_the_run_ends() -> None:
    run = filled(3)
    run.begin_epoch(1)
    run.end("stopped")
    assert run.status().epoch == run.report()["epochs"] == 1
