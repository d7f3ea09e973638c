"""What each library gets; the libraries themselves are stood in for, except the standard one's CSV."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from guava_nb.training.logs.rows import Row
from guava_nb.training.logs.writers import WRITERS, CsvWriter, LogPlace


def row(step: int, kind: str = "steps", **values: Any) -> Row:
    return Row(kind, step, {"step": step, "loss": step / 10, **values})


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def steps(path: Path) -> list[int]:
    return [int(line["step"]) for line in lines(path)]


def test_csv_has_a_file_for_each_kind_and_cuts_off_what_is_done_again(tmp_path: Path) -> None:
    writer = CsvWriter(LogPlace(tmp_path / "new", "run", {}))
    writer.write([row(1, epoch=1, joules=None), row(2), row(2, "validations", **{"f1, mean": 0.5}), row(3)])
    writer.flush()
    path, validations = tmp_path / "new" / "run-steps.csv", tmp_path / "new" / "run-validations.csv"
    assert steps(path) == [1, 2, 3]
    assert lines(path)[0] == {
        "step": "1", "epoch": "1", "loss": "0.1", "learning_rate": "", "samples": "", "samples_per_s": "", "seconds": "",
        "joules": "",
    }  # fmt: skip
    assert lines(validations) == [{"step": "2", "loss": "0.2", "f1, mean": "0.5"}]
    with path.open("a", encoding="utf-8") as file:
        file.write("4,1,0.")  # what a full disk took of a line
    writer.rewind(2)
    writer.write([row(3)])
    writer.close("done")
    assert steps(path) == [1, 2, 3]
    writer.rewind(1)
    assert steps(path) == [1] and steps(validations) == []


def test_csv_goes_on_with_the_lines_of_the_run_before_which_stay_as_they_are(tmp_path: Path) -> None:
    first = CsvWriter(LogPlace(tmp_path, "one", {}))
    first.write([row(1), row(2), row(3)])
    first.close("done")
    second = CsvWriter(LogPlace(tmp_path, "two", {}, "one", 2))
    second.write([row(3), row(4)])
    second.close("done")
    assert steps(tmp_path / "two-steps.csv") == [1, 2, 3, 4] and steps(tmp_path / "one-steps.csv") == [1, 2, 3]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


def write(kind: str, place: LogPlace) -> Any:
    writer: Any = WRITERS[kind](place)
    writer.write([row(1, learning_rate=0.5, joules=None), row(1, "validations", f1=0.25)])
    writer.flush()
    return writer


def test_tensorboard_gets_scalars_and_begins_a_further_file_where_steps_are_done_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None = None) -> None:
            told.append((Path(folder).name, purge_step))

        def add_scalar(self, *given: Any) -> None:
            told.append(given)

        def flush(self) -> None:
            told.append("flush")

        def close(self) -> None:
            told.append("close")

    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    writer = write("tensorboard", LogPlace(tmp_path, "run", {}, "one", 4))
    writer.rewind(7)
    assert told == [
        ("run-tensorboard", 5), ("train/loss", 0.1, 1), ("train/learning_rate", 0.5, 1), ("val/loss", 0.1, 1),
        ("val/f1", 0.25, 1), "flush", "close", ("run-tensorboard", 8),
    ]  # fmt: skip


class WandbRun:
    name, offline, dir, url = "their-name", True, "d", None

    def __init__(self) -> None:
        self.told: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.told.append((name, step_metric))

    def log(self, data: dict[str, float]) -> None:
        self.told.append(data)

    def finish(self, exit_code: int) -> None:
        self.told.append(exit_code)


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("k", "online")])
def test_wandb_begins_a_run_which_is_offline_where_it_would_ask_for_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, mode: str
) -> None:
    given, run = {}, WandbRun()  # type: dict[str, Any], WandbRun
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("HOME", str(tmp_path))
    module(
        monkeypatch, "wandb", run=None, Settings=dict, init=lambda **settings: given.update(settings) or run
    )  # fmt: skip
    writer = write("wandb", LogPlace(tmp_path, "run", {"optimizer": "SGD"}))
    assert (given["mode"], given["dir"], given["config"]) == (mode, str(tmp_path), {"optimizer": "SGD"})
    writer.close("failed")
    assert run.told == [
        ("step", None), ("*", "step"), {"step": 1, "train/loss": 0.1, "train/learning_rate": 0.5},
        {"step": 1, "val/loss": 0.1, "val/f1": 0.25}, 1,
    ]  # fmt: skip


def test_wandb_takes_the_run_of_the_notebook_and_does_not_finish_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = WandbRun()
    module(monkeypatch, "wandb", run=run)
    write("wandb", LogPlace(tmp_path, "run", {})).close("done")
    assert run.told[-1] == {"step": 1, "val/loss": 0.1, "val/f1": 0.25}


@pytest.mark.parametrize("is_set", [False, True])
def test_mlflow_gets_metrics_and_how_the_run_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_set: bool
) -> None:
    told: list[Any] = []

    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            told.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, experiment: str, run_name: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}-{run_name}"))

        def log_param(self, *given: Any) -> None:
            told.append(given)

        def log_batch(self, run_id: str, metrics: Any) -> None:
            told.append((run_id, metrics))

        def set_terminated(self, *given: Any, status: str) -> None:
            told.append(status)

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    theirs = SimpleNamespace(info=SimpleNamespace(run_id="theirs"))
    module(
        monkeypatch, "mlflow", MlflowClient=Client, is_tracking_uri_set=lambda: is_set,
        get_tracking_uri=lambda: "http://there", active_run=lambda: theirs,
    )  # fmt: skip
    module(monkeypatch, "mlflow.entities", Metric=lambda name, value, time, step: (name, value, step))
    write("mlflow", LogPlace(tmp_path, "run", {"seed": 3})).close("stopped")
    metrics = [("train/loss", 0.1, 1), ("train/learning_rate", 0.5, 1), ("val/loss", 0.1, 1), ("val/f1", 0.25, 1)]
    if is_set:
        assert told == [None, ("theirs", metrics)]
    else:
        uri = (tmp_path / "mlruns").as_uri()
        assert told == [uri, ("7-run", "seed", 3), ("7-run", metrics), "KILLED"]
