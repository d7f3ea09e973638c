"""`log="wandb"` and `log="mlflow"` with the libraries themselves, offline: the figures that arrive are those of the run.

Neither is a dependency: without it its test is skipped, and `tests/unit/training/logs` has stand-ins.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guava_nb import Orchestrator
from tests.support.session import direct_session, said
from tests.support.training import SmallNet, loader

Curves = dict[str, list[tuple[int, float]]]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of whoever runs this
    with direct_session(1, checkpoint_dir=str(tmp_path / "runs")) as made:
        made.register_model(SmallNet)
        yield made


def train(session: Orchestrator, log: str) -> Curves:
    """Train two epochs; returns the curves that are to arrive."""
    run = session.start_training(loader(), loader(), num_epochs=2, precision="fp64", progress=False, log=log)
    assert "cannot be written" not in said(session), said(session)
    return {
        "train/loss": [(one["step"], one["loss"]) for one in run.history],
        "val/loss": [(one["step"], one["loss"]) for one in run.validations],
    }


def test_wandb_has_the_curves_and_the_settings(session: Orchestrator, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    wanted = train(session, "wandb")
    (file,) = tmp_path.rglob("run-*.wandb")
    config, got = read_wandb(file)
    assert {name: got[name] for name in wanted} == wanted
    assert len(got["epoch/loss"]) == 2 and "optimizer" in " ".join(config)
    assert f"wandb sync {file.parent}" in said(session)


def read_wandb(file: Path) -> tuple[list[str], Curves]:
    """What lies in a run that was kept offline: names of its settings, and its curves over `step`."""
    from wandb.proto import wandb_internal_pb2

    config: list[str] = []
    curves: Curves = {}
    for data in records_of(file.read_bytes()):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        config += [one.key for one in record.run.config.update]
        row = {".".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
        for name, value in row.items():
            curves.setdefault(name, []).append((row["step"], value))
    return config, curves


def records_of(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's form: blocks of 32 KiB; before each piece its checksum, its length and its kind."""
    block, head, at, pieces = 32 << 10, 7, 7, b""  # the file begins with 7 bytes of its own
    while at + head <= len(content):
        if (left := block - at % block) < head:
            at += left
            continue
        size, kind = struct.unpack("<4xHB", content[at : at + head])
        at += head + size
        pieces += content[at - size : at]
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


def test_mlflow_has_the_curves_the_settings_and_the_end(session: Orchestrator, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    wanted = train(session, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "runs" / "mlruns").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "guava_nb"]
    (run,) = client.search_runs([experiment.experiment_id])
    got = {name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)] for name in wanted}
    assert got == wanted and run.info.status == "FINISHED" and any("optimizer" in name for name in run.data.params)
    assert len(client.get_metric_history(run.info.run_id, "epoch/loss")) == 2
