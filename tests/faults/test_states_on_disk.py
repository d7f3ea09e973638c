"""Real processes: a lone worker that is killed goes on from its disk bit for bit; where that is lost too, nearly, and told."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from guava_nb.training.run import Run
from guava_nb.training.saving import snapshots_at_worker
from tests.support.processes import ROOT, Session, Worker, eventually, loader

EPOCHS, KILLED_IN = 2, 40


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(snapshots_at_worker, "difference_count", lambda elements, steps, seconds: 1024)
    made = Session(tmp_path, num_workers=1, grace_s=2.0, snapshot_place="worker", snapshot_every_steps=5)
    try:
        yield made
    finally:
        made.close()
    assert states(tmp_path) == []  # the session is over


def states(folder: Path) -> list[Path]:
    return [path for path in (folder / "home").rglob("*") if path.is_file() and ".lock" not in path.name]


def train(session: Session) -> Run:
    return session.train(loader(batch_size=4), epochs=EPOCHS, model_args={"dropout": 0.3}, detach=True)


def killed_in_mid_run(session: Session) -> tuple[Run, Worker]:
    """A run whose only worker stands still in a step, with a state of this run on its disk."""
    [only] = session.ensure(1)
    only.trap("forward", KILLED_IN)
    before = set(states(session.folder))  # of the run before: it is no use to this one
    run = train(session)
    only.wait_trapped()
    eventually(
        lambda: any(path.suffix == ".state" for path in {*states(session.folder)} - before),
        20,
        "a state lies on the disk",
    )
    return run, only


def end(worker: Worker) -> None:
    """End its process and what started it, as when a machine goes down."""
    worker.handle.kill()
    assert worker.handle.wait(20)


def ended(run: Run) -> dict[str, Any]:
    assert run.wait(90), run
    run.result()
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    [loss] = run.losses
    return loss


def assert_same(run: Run, other: Run) -> None:
    ours, theirs = run.model().state_dict(), other.model().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [one["loss"] for one in run.history] == [one["loss"] for one in other.history]


def test_a_killed_process_is_replaced_and_one_that_joins_there_goes_on_bit_for_bit(session: Session) -> None:
    run, only = killed_in_mid_run(session)
    pid = only.pid
    os.kill(pid, signal.SIGKILL)
    loss = ended(run)
    assert loss["from"] == "disk" and 0 < loss["after"] < KILLED_IN, session.orch.status().notes
    assert only.pid != pid and only.handle.alive
    undisturbed = train(session)
    assert undisturbed.wait(90) and undisturbed.losses == []
    assert_same(run, undisturbed)

    again, only = killed_in_mid_run(session)
    end(only)
    session.ensure(1)  # and comes up again
    assert ended(again)["from"] == "disk", session.orch.status().notes
    assert_same(again, undisturbed)


def test_where_the_disk_is_lost_too_the_run_goes_on_from_approximate_weights_and_says_so(session: Session) -> None:
    run, only = killed_in_mid_run(session)
    end(only)
    shutil.rmtree(session.folder / "home")
    session.ensure(1)
    loss = ended(run)
    assert loss["from"] == "approximate weights" and 0 < loss["after"] < KILLED_IN
    notes = " ".join(session.orch.status().notes)
    assert "approximate weights after step" in notes and "approximate weights" in run.report()["approximate"]
