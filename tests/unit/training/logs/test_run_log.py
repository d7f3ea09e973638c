"""Logs are written while a run goes on, go on with it, and end no run."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guava_nb import Orchestrator
from guava_nb.training.logs import run_log
from guava_nb.training.logs.run_log import RunLogs
from guava_nb.training.logs.writers import WRITERS, CsvWriter, LogPlace
from guava_nb.training.run import Run
from tests.support.session import direct_session, said
from tests.support.training import SmallNet, loader, spec
from tests.unit.training.logs.test_rows import step


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Orchestrator]:
    with direct_session(1, checkpoint_dir=str(tmp_path)) as made:
        made.register_model(SmallNet)
        yield made


def train(session: Orchestrator, epochs: int = 1, **options: Any) -> Run:
    return session.start_training(
        loader(), loader(), num_epochs=epochs, precision="fp64", progress=False, **{"log": "csv", **options}
    )


def lines(folder: Path, run: Run, kind: str = "steps") -> list[dict[str, str]]:
    (path,) = folder.glob(f"{run.run_id}-*-{kind}.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.history]


def test_a_log_is_the_history_and_counts_on_when_a_run_goes_on_or_is_resumed(
    session: Orchestrator, tmp_path: Path
) -> None:
    one = train(session, 2)
    assert [float(line["loss"]) for line in lines(tmp_path, one)] == losses(one)
    assert all(line["learning_rate"] and line["samples_per_s"] for line in lines(tmp_path, one))
    assert [line["epoch"] for line in lines(tmp_path, one, "epochs")] == ["1", "2"]
    assert len(lines(tmp_path, one, "validations")) == 2 and "logs to" in said(session)

    two = train(session, 2)
    checkpoint = session.save_checkpoint(tmp_path / "two.pt")
    assert [int(line["step"]) for line in lines(tmp_path, two)] == list(range(1, 4 * len(loader()) + 1))
    assert [float(line["loss"]) for line in lines(tmp_path, two)] == losses(one) + losses(two)

    three = train(session, 3, resume=checkpoint)
    assert [float(line["loss"]) for line in lines(tmp_path, three)] == losses(one) + losses(two) + losses(three)
    assert [int(line["epoch"]) for line in lines(tmp_path, three, "epochs")] == [1, 2, 3, 4, 5]
    assert not session._job or not session._job.replica_set.spec.lockstep, "a log is no on_step"

    assert lines(tmp_path, train(session, 1, fresh=True))[0]["step"] == "1"


class Failing(CsvWriter):
    """Takes half of what it gets, a given number of times."""

    fails = 0

    def flush(self) -> None:
        if Failing.fails:
            Failing.fails -= 1
            file, _ = self._files["steps"]
            file.write("5,1,0.")
            raise OSError(28, "No space left on device")
        super().flush()


def logged(run: Run, folder: Path) -> tuple[RunLogs, list[str]]:
    told: list[str] = []
    logs = RunLogs(run, told.append)
    logs.begin(["csv"], folder, run.run_id, spec())
    return logs, told


def test_a_full_disk_is_told_once_and_what_it_did_not_take_is_written_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(WRITERS, "csv", Failing)  # type: ignore[arg-type]
    monkeypatch.setattr(run_log, "_RETRY_S", 0.0)
    monkeypatch.setattr(Failing, "fails", 3)
    run = Run("run-1", "data", 1, None)
    for number in range(1, 5):
        run.add_step(step(number, loss=number / 8))
    logs, told = logged(run, tmp_path)
    while Failing.fails:
        pass
    logs.end("done")
    with (tmp_path / "run-1-steps.csv").open(encoding="utf-8", newline="") as file:
        assert [float(line["loss"]) for line in csv.DictReader(file)] == losses(run)
    assert len(told) == 2 and "No space left on device" in told[1] and "The run goes on" in told[1]


def test_a_disk_that_stays_full_and_a_network_that_hangs_end_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(WRITERS, "csv", Failing)  # type: ignore[arg-type]
    monkeypatch.setattr(Failing, "fails", 1 << 30)
    run = Run("run-1", "data", 1, None)
    run.add_step(step(1))
    logs, told = logged(run, tmp_path)
    logs.end("done")
    assert "does not have the last rows" in told[-1]

    hangs = threading.Event()

    class Hanging(CsvWriter):
        def flush(self) -> None:
            hangs.wait()

    monkeypatch.setitem(WRITERS, "csv", Hanging)  # type: ignore[arg-type]
    monkeypatch.setattr(run_log, "_END_S", 0.0)
    logs, told = logged(run, tmp_path / "other")
    logs.end("done")
    assert "is not written to its end after 0 s" in told[-1]
    hangs.set()


def test_a_folder_that_cannot_be_made_is_told_and_the_run_goes_on(session: Orchestrator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    session.config = session.config.replace(checkpoint_dir=str(tmp_path / "file"))
    assert train(session).state == "done"
    assert "the log csv cannot be written now" in said(session) and "The run goes on" in said(session)


def test_the_settings_of_a_run_are_given_to_libraries_that_show_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places: list[LogPlace] = []

    def keep(place: LogPlace) -> CsvWriter:
        places.append(place)
        return CsvWriter(place)

    monkeypatch.setitem(WRITERS, "csv", keep)  # type: ignore[arg-type]
    logs, _ = logged(Run("run-1", "data", 1, None), tmp_path)
    logs.end("done")
    assert places[0].settings["optimizer"] == "AdamW" and places[0].settings["optimizer.lr"] == 0.01
