"""How runs ended, for later kernels."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from guava_nb.orchestrator import past_runs
from guava_nb.orchestrator.past_runs import KILLED, PastRuns
from guava_nb.status import EpochFigures
from guava_nb.training.run import Run
from tests.support.kernels import wait_until
from tests.unit.render.status_cases import RUN

ENDED = replace(
    RUN,
    state="done",
    val=((5, 0.3, 0.91, None),),
    epochs=(EpochFigures(1, 0.5, (("f1", 0.5),)),),
    scores=(("f1", ((5, 0.5),)),),
)


def test_a_later_process_finds_them_and_there_are_not_too_many(tmp_path: Path) -> None:
    session = tmp_path / "session.json"
    first = PastRuns(lambda: session)
    for number in range(60):
        first.add(replace(ENDED, run_id=f"run-{number}"))
    then = PastRuns(lambda: session)
    then.add(replace(ENDED, run_id="run-60"))
    assert [run.run_id for run in PastRuns(lambda: session).all()] == [f"run-{n}" for n in range(11, 61)]
    assert PastRuns(lambda: session).all()[0] == replace(ENDED, run_id="run-11")
    assert stat.S_IMODE(os.stat(tmp_path / "session.runs").st_mode) == 0o600


def test_names_of_runs_go_on_from_one_process_to_the_next(tmp_path: Path) -> None:
    session = tmp_path / "session.json"
    first = PastRuns(lambda: session)
    assert first.next_id == "run-1"
    first.add(replace(ENDED, run_id="run-1"))
    first.launched("run-2")  # and goes on
    assert first.next_id == "run-3"
    assert PastRuns(lambda: session).next_id == "run-2", "nothing was kept of the one that went on"
    first.add(replace(ENDED, run_id="run-2"))
    assert PastRuns(lambda: session).next_id == "run-3"
    assert PastRuns(lambda: None).next_id == "run-1"


def test_a_run_whose_process_is_killed_is_found_by_the_next_one(tmp_path: Path) -> None:
    session, run = tmp_path / "session.json", Run("run-1", "data", 3, None)
    run.begin()
    first = PastRuns(lambda: session)
    first.follow(run)
    kept = session.with_suffix(".run-now")
    wait_until(kept.exists, lambda: "record of the run that goes on", 10)
    then = PastRuns(lambda: session)  # as if the first were dead
    assert [(one.run_id, one.state, one.message) for one in then.all()] == [("run-1", "killed", KILLED)]
    assert then.next_id == "run-2" and not kept.exists()
    assert [one.state for one in PastRuns(lambda: session).all()] == ["killed"], "once"
    run.end("done")


def test_a_run_that_goes_on_is_noted_soon_and_then_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_runs, "FIRST_KEPT_S", 0.01)
    session, run = tmp_path / "session.json", Run("run-1", "data", 3, None)
    waits: list[float | None] = []
    wait = run.wait
    monkeypatch.setattr(run, "wait", lambda timeout=None: waits.append(timeout) or wait(timeout))
    run.begin()
    PastRuns(lambda: session).follow(run)
    run.add_step({"step": 1, "epoch": 1, "loss": 1.0, "samples": 4, "learning_rate": 0.1})
    wait_until(lambda: len(waits) >= 4, lambda: f"noted again after {waits}", 10)
    (killed,) = PastRuns(lambda: session).all()
    assert (killed.state, killed.step) == ("killed", 1)
    assert waits[:4] == [0.01, 0.02, 0.04, 0.08]
    run.end("done")


def test_a_run_that_ended_leaves_no_record_of_its_middle(tmp_path: Path) -> None:
    session, run = tmp_path / "session.json", Run("run-1", "data", 3, None)
    runs = PastRuns(lambda: session)
    runs.follow(run)
    wait_until(session.with_suffix(".run-now").exists, lambda: "record of the run that goes on", 10)
    run.end("done")
    runs.add(run.status())
    assert [one.state for one in PastRuns(lambda: session).all()] == ["done"]
    assert not session.with_suffix(".run-now").exists()


def test_a_damaged_file_or_a_disk_that_takes_nothing_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "session.runs").write_bytes(b"\xff no list")
    runs = PastRuns(lambda: tmp_path / "session.json")
    runs.add(ENDED)
    assert runs.all() == [ENDED]
    gone = PastRuns(lambda: tmp_path / "no folder" / "session.json")
    gone.add(ENDED)
    assert gone.all() == [ENDED] and PastRuns(lambda: None).all() == []
