"""The table and the report file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from guava_nb.cli.result import check_report_path, result_view, write_report
from guava_nb.errors import ConfigError
from guava_nb.render.text import to_text

REPORT: dict[str, Any] = {
    "mode": "data",
    "workers": [
        {"worker": "local-1", "device": "Some CPU", "state": "left", "samples": 960},
        {"worker": "local-2", "device": "Some CPU", "state": "left", "samples": 477},
    ],
    "steps": 23,
    "epochs": 1,
    "samples": 1437,
    "train_loss": [2.30123456, 0.5],
    "val": {"loss": 0.0731, "accuracy": 0.97777, "samples": 360},
    "wall_s": 1.234,
    "step_s": {"p50": 0.0123, "p95": None},
    "wire": {
        "out_bytes": 12_345_678,
        "in_bytes": 1500,
        "sample_bytes": 92_000,
        "gradient_bytes": 12_000_000,
        "activation_bytes": 0,
        "parameter_bytes": 153_128,
        "control_bytes": 900,
    },
    "lost_samples": 0,
    "duplicated_samples": 0,
    "parity": {
        "max_abs_diff": 1.5e-15,
        "max_loss_diff": 2e-16,
        "precision": "fp64",
        "steps": 23,
        "limit": 1e-9,
        "ok": True,
    },
}

TABLE = """\
Result
  mode          data, 2 workers
  steps         23 in 1 epoch
  samples       1437, 0 lost, 0 doubled
  loss          2.301 at the first step, 0.5 at the last
  accuracy      0.9778 on 360 images held out of training (loss 0.0731)
  time          1.23 s, step 12.3 ms (95 %: not measured)
  wire          12.3 MB out, 1.5 kB in
  wire by kind  sample 92.0 kB, gradient 12.0 MB, parameter 153.1 kB, control 900 B
  parity        equal to plain PyTorch in fp64: weights 1.5e-15, losses 2e-16 (limit for weights 1e-09)
  worker   device    samples  share  state
  -------  --------  -------  -----  -----
  local-1  Some CPU  960      67 %   left
  local-2  Some CPU  477      33 %   left"""


def test_the_table() -> None:
    assert to_text(result_view(REPORT)) == TABLE


def test_what_was_not_measured_is_said() -> None:
    bare = {**REPORT, "val": None, "parity": None, "train_loss": [], "workers": [], "samples": 0, "steps": 0}
    shown = to_text(result_view(bare))
    assert "accuracy      not measured" in shown
    assert "loss          no steps" in shown
    assert "parity" not in shown
    no_accuracy = {**REPORT, "val": {"loss": 1.0, "accuracy": None, "samples": 3}}
    assert "accuracy      not measured" in to_text(result_view(no_accuracy))


def test_the_file_is_one_json_object_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    check_report_path(path)
    write_report(path, REPORT)
    assert json.loads(path.read_text()) == REPORT
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_paths_that_cannot_be_written_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        check_report_path(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        check_report_path(tmp_path / "no" / "r.json")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="no permission"):
        check_report_path(tmp_path / "r.json")


def test_a_disk_error_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(tmp_path / "gone" / "r.json", REPORT)


def test_a_spread_model_shows_its_mesh_and_what_went_directly() -> None:
    wire = {**REPORT["wire"], "gradient_bytes": None, "activation_bytes": None}
    text = to_text(result_view({**REPORT, "mode": "zero", "mesh": "dp 2 x pp 1 x tp 1", "zero_stage": 2, "wire": wire}))
    assert "zero, 2 workers (dp 2 x pp 1 x tp 1, ZeRO 2)" in text
    assert "control 900 B, gradients and activations directly between the workers: not counted" in text
