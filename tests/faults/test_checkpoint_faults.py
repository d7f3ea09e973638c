"""Checkpoints that a run makes by itself: a full disk, a slow one, little memory, the best and the newest."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guava_nb.cluster.cluster import Cluster
from guava_nb.evaluation.validation import Validation
from guava_nb.training import checkpoint
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import Best
from guava_nb.training.saving import durable_file, run_files
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import SmallNet, difference, job_for, loader, plain, plan_for, spec


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cluster(told: list[str]) -> Iterator[Cluster]:
    made = make_cluster()
    made.notice = told.append  # type: ignore[method-assign, assignment]
    DirectWorker(made, "w0").start()
    made.wait_for(1, 10)
    yield made
    made.close()


def trained(cluster: Cluster, folder: Path, epochs: int = 2, **plan: Any) -> TrainingJob:
    """A run of three steps an epoch."""
    made = plan_for(loader(96), epochs, save_folder=folder)
    for name, value in plan.items():
        setattr(made, name, value)
    job = job_for(cluster, spec(), made)
    job.start()
    assert job.run.wait(60), job.run
    return job


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_full_disk_is_told_and_the_run_goes_on(
    cluster: Cluster, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable_file.os, "write", full)
        job = trained(cluster, tmp_path, save_every_steps=2)
    assert (job.run.state, len(job.run.history)) == ("done", 6)
    lost = [sentence for sentence in told if "was not saved" in sentence]
    assert re.search(
        r"run-1-step-2.pt was not saved: No space left on device: it needs .*B, and .*B are free in .*--checkpoint-dir",
        lost[0],
    )
    assert len(lost) == 1, "the others are counted: a night has many of them"
    counted = "the last 3 checkpoints of run-1 were not saved; no other one is there: save_checkpoint(path)"
    assert counted in " ".join(told)
    assert names(tmp_path) == [], "nor half a file that takes the last of the room"


def test_the_newest_stay_and_each_is_the_state_of_its_step(cluster: Cluster, tmp_path: Path) -> None:
    job = trained(cluster, tmp_path, save_every_steps=2, keep=2)
    assert job.run.state == "done" and names(tmp_path) == ["run-1-step-4.pt", "run-1-step-6.pt"]
    for step in (4, 6):
        content = checkpoint.read(tmp_path / f"run-1-step-{step}.pt")
        expected, _ = plain(spec(), loader(96), 2, limit=step)
        saved = SmallNet().double()
        saved.load_state_dict(content["model"])
        assert content["step"] == step - 1 and difference(saved, expected) <= 1e-12


def test_steps_go_on_while_a_file_is_written_and_the_next_one_waits_for_it(
    cluster: Cluster, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, real = threading.Event(), os.fsync
    monkeypatch.setattr(durable_file.os, "fsync", lambda handle: (free.wait(30), real(handle))[1])

    class Free:
        def on_step(self, run: Any, record: dict[str, Any]) -> None:
            if record["step"] == 4:
                assert not list(tmp_path.glob("*.pt")), "the first one is still being written"
                threading.Timer(0.2, free.set).start()

    job = trained(cluster, tmp_path, save_every_steps=2, callbacks=[Free()])
    assert job.run.state == "done" and len(names(tmp_path)) == 3
    assert sum("the steps wait for it" in sentence for sentence in told) == 1


def test_too_little_memory_for_the_copy_is_told(
    cluster: Cluster, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "_free_bytes", lambda: 1000)
    job = trained(cluster, tmp_path, save_every_steps=6)
    assert job.run.state == "done" and names(tmp_path) == []
    assert re.search(r"step-6.pt was not saved: its copy needs .*kB of memory, and 1.0 kB are free", " ".join(told))


def test_a_time_between_checkpoints(cluster: Cluster, tmp_path: Path) -> None:
    trained(cluster, tmp_path, save_every_s=1e-9)
    assert len(names(tmp_path)) == 7  # at every boundary, the first and the last included


@pytest.mark.parametrize("stops", [False, True])
def test_the_best_of_the_validations_is_kept(cluster: Cluster, tmp_path: Path, stops: bool) -> None:
    class Figures(Validation):
        values = iter([0.5, 0.9, 0.7])

        def result(self) -> Any:
            return super().result().__class__(next(self.values), None, 1)

    class Stop:
        def on_validation(self, run: Any, record: dict[str, Any]) -> bool:
            return stops and record["loss"] == 0.9

    plan = {
        "val_feed": plan_for(loader(32)).feed,
        "validation": Figures,
        "save_best": Best("loss", "max"),
        "callbacks": [Stop()],
    }
    job = trained(cluster, tmp_path, 3, **plan)
    assert job.run.state == ("stopped" if stops else "done")
    assert names(tmp_path) == ["run-1-best-step-6.pt"]
    content = checkpoint.read(tmp_path / "run-1-best-step-6.pt")
    assert content["step"] == 5 and (content["position"]["epoch"], content["position"]["batches"]) == (2, 0)
