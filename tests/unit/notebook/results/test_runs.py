"""%guava_runs: what is chosen, shown and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_session import FakeRun


@pytest.fixture
def trained(notebook: Any) -> Any:
    """A notebook whose session has two ended runs."""
    notebook.run("%guava_up --local 1\nloader = []")
    for run_id in ("run-1", "run-2"):
        notebook.next_run = notebook.orchestrator.next_run = FakeRun()
        notebook.run("%guava_train --model Net --loss L --data loader")
        status = notebook.orchestrator.run.status()
        notebook.orchestrator.past_runs.add(type(status)(**{**_fields(status), "run_id": run_id}))
    return notebook


def _fields(status: Any) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__slots__}


def test_all_runs_or_those_of_the_line_stand_beside_each_other(trained: Any) -> None:
    shown = trained.run("%guava_runs")
    assert "runs: 2 of this notebook" in shown.text and "run-1" in shown.text and "run-2" in shown.text
    shown = trained.run("%guava_runs run-2")
    assert "run-1" not in shown.text
    shown = trained.run("%guava_runs run-3")
    assert not shown.ok and "no run is called run-3" in shown.text and "Runs: run-2, run-1" in shown.text
    assert trained.complete("%guava_runs run") == ["run-1", "run-2"]


def test_of_many_runs_the_newest_are_shown_first_and_the_others_on_request(trained: Any) -> None:
    one = trained.orchestrator.past_runs.all()[0]
    for number in range(3, 41):
        trained.orchestrator.past_runs.add(type(one)(**{**_fields(one), "run_id": f"run-{number}"}))
    shown = trained.run("%guava_runs")
    rows = [line.split()[0] for line in shown.lines if line.strip().startswith("run-")]
    assert rows == [f"run-{number}" for number in range(40, 30, -1)]
    assert "30 older: %guava_runs --all. Losses in one picture: %guava_runs run-39 run-40" in shown.text
    assert "runs: 3 of" in trained.run("%guava_runs -n 3").text
    shown = trained.run("%guava_runs --all")
    assert "runs: 40 of" in shown.text and "older" not in shown.text
    assert "keep one of them" in trained.run("%guava_runs run-3 --all").text


def test_points_and_picture_are_written(trained: Any, tmp_path: Path) -> None:
    shown = trained.run(f"%guava_runs --csv {tmp_path}/a.csv --png {tmp_path}/a.png")
    assert f"Written to {tmp_path}/a.csv." in shown.text
    assert "run-1,loss,1,2.0,," in (tmp_path / "a.csv").read_text().splitlines()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    shown = trained.run(f"%guava_runs --csv {tmp_path}/none/a.csv")
    assert not shown.ok and f"there is no folder {tmp_path}/none" in shown.text and not (tmp_path / "none").exists()
    shown = trained.run("%guava_runs --csv /dev/full")
    assert not shown.ok and "cannot be written: No space left on device" in shown.lines[0]


def test_without_a_session_or_a_run_it_says_what_to_do(notebook: Any) -> None:
    assert "run %guava_up first" in notebook.run("%guava_runs").text
    notebook.run("%guava_up")
    assert "%guava_train starts one" in notebook.run("%guava_runs").text


def test_a_run_that_no_cell_shows_is_told_of_once_when_it_has_ended(notebook: Any) -> None:
    notebook.next_run = FakeRun(num_steps=2)
    notebook.run("%guava_up --local 1\nloader = []")
    shown = notebook.run("run = %guava_train --model Net --loss L --data loader --detach")
    assert "Training goes on since" in shown.text and "ended:" not in shown.text
    shown = notebook.run("while not run.wait(): pass")
    assert "run-1 ended: done, step 2, loss 1. %guava_status --follow shows all of it." in shown.text
    assert "ended" not in notebook.run("1").text
    assert "2 in 1 of 1 epochs" in notebook.run("%guava_status --follow").text
    notebook.orchestrator.next_run = FakeRun(num_steps=2)
    notebook.run("%guava_train --model Net --loss L --data loader --detach")
    assert "ended:" not in notebook.run("%guava_status --follow").text + notebook.run("1").text, "it was shown"
    notebook.orchestrator.next_run = FakeRun(num_steps=2)
    notebook.run("run = %guava_train --model Net --loss L --data loader --detach")
    told = notebook.run("while not run.wait(): pass\n%guava_down").text
    assert "run-1 ended: done, step 2, loss 1." in told and "--follow" not in told, "nothing can be asked any more"
