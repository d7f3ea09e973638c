"""How runs ended, for later kernels."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

from guava_nb.orchestrator.past_runs import PastRuns
from guava_nb.status import EpochFigures
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


def test_a_run_of_an_earlier_process_is_told_from_a_new_one_of_its_name(tmp_path: Path) -> None:
    session = tmp_path / "session.json"
    PastRuns(lambda: session).add(replace(ENDED, run_id="run-1", began_at=1_700_000_000.0))
    for _ in range(2):
        then = PastRuns(lambda: session)
        then.add(replace(ENDED, run_id="run-1", began_at=1_700_000_100.0))
    old, new, newest = [run.run_id for run in then.all()]
    assert old.startswith("run-1@") and new.startswith("run-1@") and old != new and newest == "run-1"


def test_a_damaged_file_or_a_disk_that_takes_nothing_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "session.runs").write_bytes(b"\xff no list")
    runs = PastRuns(lambda: tmp_path / "session.json")
    runs.add(ENDED)
    assert runs.all() == [ENDED]
    gone = PastRuns(lambda: tmp_path / "no folder" / "session.json")
    gone.add(ENDED)
    assert gone.all() == [ENDED] and PastRuns(lambda: None).all() == []
