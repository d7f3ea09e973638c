"""The short form of two benchmarks: faults, joins and sessions one after another, and hostile inputs while a worker trains.

`python -m tests.benchmarks.soak` and `python -m tests.benchmarks.hostile` are the long ones.
"""

from __future__ import annotations

import pytest

from tests.benchmarks.hostile import besiege, frames
from tests.benchmarks.soak import joins, kills, sessions
from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(300)  # workers of sessions of their own, which start for minutes on a busy machine


@pytest.fixture(autouse=True)
def processes_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_workers_that_are_killed_and_replaced_cost_no_sample() -> None:
    told = kills(4, 2, stops=False)
    assert told["faults"] and (told["lost"], told["doubled"]) == (0, 0)


def test_what_joins_and_leaves_and_sessions_leave_behind_does_not_grow() -> None:
    for told in (joins(12), sessions(4)):
        first, *_, last = told["held"]
        assert last["descriptors"] <= first["descriptors"] and last["threads"] <= first["threads"], told


def test_hostile_inputs_stop_no_run() -> None:
    told = besiege(400, seconds=10)
    assert told["inputs"] > 160 and (told["lost"], told["doubled"]) == (0, 0)
    assert told["difference"] <= 1e-9


def test_damaged_frames_raise_nothing() -> None:
    assert frames(2000, seed=1) == 2000
