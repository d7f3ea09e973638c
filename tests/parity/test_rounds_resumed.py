"""Rounds of local steps go on from a checkpoint bit for bit: what only one worker has lies on its disk, or is told to be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import Factory, RoundSpec, RunSpec, ShardReport
from guava_nb.sync.handover import fetch_between_runs, fetch_of_ended_process, keep_own_between_runs
from guava_nb.training import checkpoint
from guava_nb.training.initial_state import from_checkpoint
from guava_nb.training.job import TrainingJob
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import dataset, difference, job_for, losses_of, plan_for, spec

MODEL = Factory("tests.support.training:SmallNet", {"dropout": 0.3, "norm": True})
ADAMW, MOMENTUM = Factory("AdamW", {"lr": 0.01}), Factory("SGD", {"lr": 0.05, "momentum": 0.9})
OUTER = {"nesterov": (0.7, 0.9), "average": (1.0, 0.0), "sparse": (1.0, 0.0), "partial": (1.0, 0.0)}
EVERY, SAVED = 3, 12  # steps of a round; the checkpoint is in the second of three epochs of 10 steps
CUT_OFF_IN = 5  # a round, from 0


def spec_of(outer: str, delay: int, optimizer: Factory = ADAMW) -> RunSpec:
    schedule = Factory("StepLR", {"step_size": 7, "gamma": 0.7})
    rounds = RoundSpec(outer, *OUTER[outer], sync_delay=delay)
    return spec(model=MODEL, optimizer=optimizer, scheduler=schedule, rounds=rounds, bucket_bytes=1 << 20)


class Sessions:
    """Sessions one after another, whose workers keep states in folders of their machines."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, list[str]()
        self.open: list[Cluster] = []

    def begin(
        self, machines: Sequence[str], hook: Callable[[DirectWorker, Any], None] = lambda one, said: None
    ) -> Cluster:
        """Open a session; a worker on each of these machines joins, in this order. `hook` as of `DirectWorker`."""
        made = make_cluster()
        made.notice = self.told.append  # type: ignore[method-assign, assignment]
        self.open.append(made)
        for k, machine in enumerate(machines):
            DirectWorker(made, f"w{k}", hook, states=self.folder / machine).start()
            made.wait_for(k + 1, 10)
        return made

    def end(self) -> None:
        while self.open:
            self.open.pop().close()

    def job(self, cluster: Cluster, run_spec: RunSpec, saved: Path | None, run_id: str) -> TrainingJob:
        generator = torch.Generator().manual_seed(9)
        data = DataLoader(dataset(160), batch_size=16, shuffle=True, generator=generator)
        plan = plan_for(data, 3, sync_every=EVERY, save_every_steps=SAVED, save_folder=self.folder)
        job = job_for(cluster, run_spec, plan, run_id)
        if saved is None:
            return job
        from_checkpoint(job.replica_set, job.plan, saved, checkpoint.read(saved))
        return TrainingJob(job.replica_set, job.plan, cluster, job.run.model)

    def train(self, cluster: Cluster, run_spec: RunSpec, saved: Path | None = None, run_id: str = "run") -> TrainingJob:
        job = self.job(cluster, run_spec, saved, run_id)
        job.start()
        assert job.run.wait(60) and job.run.state == "done", job.run.error
        return job


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    made = Sessions(tmp_path)
    yield made
    made.end()


def assert_goes_on(whole: Run, rest: Run) -> None:
    losses = losses_of(rest)
    assert losses and list(losses) == list(losses_of(whole)[-len(losses) :])
    assert difference(whole.model(), rest.model()) == 0.0


def saved_in(sessions: Sessions) -> Path:
    [path] = sessions.folder.glob("whole-step-1[0-9].pt")
    return path


@pytest.mark.parametrize(
    ("delay", "optimizer"), [(0, ADAMW), (1, MOMENTUM)], ids=["AdamW", "SGD with momentum, delayed"]
)
@pytest.mark.parametrize("outer", OUTER)
def test_a_new_session_goes_on_from_a_checkpoint_bit_for_bit(
    sessions: Sessions, outer: str, delay: int, optimizer: Factory
) -> None:
    run_spec = spec_of(outer, delay, optimizer)
    whole = sessions.train(sessions.begin(["a", "b"]), run_spec, run_id="whole")
    sessions.end()
    rest = sessions.train(sessions.begin(["a", "b"]), run_spec, saved_in(sessions), "rest")
    assert_goes_on(whole.run, rest.run)
    assert not any("own part" in text for text in sessions.told), sessions.told


@pytest.mark.parametrize(
    ("outer", "machines"), [("nesterov", ["c", "a", "b"]), ("sparse", ["c", "b", "a"]), ("sparse", ["b", "a", "a"])]
)
def test_who_joins_first_and_whose_disk_is_shared_changes_nothing(
    sessions: Sessions, outer: str, machines: list[str]
) -> None:
    run_spec, first = spec_of(outer, 1), ["a", "b", "c"] if "c" in machines else ["a", "b", "a"]
    whole = sessions.train(sessions.begin(first), run_spec, run_id="whole")
    sessions.end()
    rest = sessions.train(sessions.begin(machines), run_spec, saved_in(sessions), "rest")
    assert_goes_on(whole.run, rest.run)


@pytest.mark.parametrize(
    ("outer", "workers", "ends"),
    [
        ("nesterov", 2, "stopped"),
        ("sparse", 2, "its process is gone"),
        ("average", 3, "its process is gone"),
        ("partial", 3, "stopped"),
    ],
)
def test_a_run_that_was_cut_off_in_mid_round_begins_that_round_again(
    sessions: Sessions, outer: str, workers: int, ends: str
) -> None:
    run_spec, machines = spec_of(outer, 1), ["a", "b", "c"][:workers]
    whole = sessions.train(sessions.begin(machines), run_spec, run_id="whole")
    jobs: list[TrainingJob] = []

    def cut_off(worker: DirectWorker, message: Any) -> None:
        if isinstance(message, ShardReport) and message.step == CUT_OFF_IN and worker.name == "w1":
            jobs[0].interrupt()
            jobs[0].interrupt()  # at once

    cluster, path = sessions.begin(machines, cut_off), sessions.folder / "cut-off.pt"
    jobs.append(sessions.job(cluster, run_spec, None, "cut-off"))
    jobs[0].start()
    assert jobs[0].run.wait(60) and jobs[0].run.state == "stopped"
    held = jobs[0].replica_set
    assert held.step == CUT_OFF_IN - 1
    if ends == "stopped":
        state = fetch_between_runs(held, cluster, 20)
        keep_own_between_runs(held, cluster)
    else:  # another process knows no more than the run's name and its last step
        held = sessions.job(cluster, run_spec, None, "cut-off").replica_set
        state = fetch_of_ended_process(held, CUT_OFF_IN, cluster, 20)
    extras = checkpoint.Extras(own=held.own_of(CUT_OFF_IN - 1))
    checkpoint.write(path, state, CUT_OFF_IN - 1, jobs[0].where(CUT_OFF_IN - 1), run_spec, extras)
    rest = sessions.train(cluster, run_spec, path, "rest")
    assert_goes_on(whole.run, rest.run)
    assert not any("own part" in text for text in sessions.told), sessions.told


def no_disk(folder: Path) -> None:
    for path in folder.rglob("*.state"):
        path.unlink()


def damaged(folder: Path) -> None:
    for path in folder.rglob("*.state"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("happened", [no_disk, damaged])
def test_a_lost_disk_loses_what_only_its_worker_had_and_that_is_told(
    sessions: Sessions, happened: Callable[[Path], None]
) -> None:
    run_spec = spec_of("average", 1)
    whole = sessions.train(sessions.begin(["a", "b"]), run_spec, run_id="whole")
    sessions.end()
    happened(sessions.folder / "b")
    rest = sessions.train(sessions.begin(["b", "a"]), run_spec, saved_in(sessions), "rest")
    [told] = [text for text in sessions.told if "own parts" in text]
    assert "1 of 2 workers' own parts" in told and "w0 begins with a copy of another worker's" in told
    assert 0 < difference(whole.run.model(), rest.run.model()) < 1


def test_a_worker_that_cannot_write_is_told_when_the_checkpoint_is_made(sessions: Sessions) -> None:
    (sessions.folder / "b").write_text("no folder")
    sessions.train(sessions.begin(["a", "b"]), spec_of("average", 0), run_id="whole")
    told = [text for text in sessions.told if "keeps nothing beside a checkpoint" in text]
    assert told and all(text.startswith("w1 ") for text in told)


def test_files_of_the_newest_checkpoints_stay_after_the_session(sessions: Sessions) -> None:
    cluster = sessions.begin(["a", "b"])
    sessions.train(cluster, spec_of("average", 0), run_id="whole")
    before: dict[Any, int] = {path: path.stat().st_size for path in sessions.folder.rglob("*.state")}
    sessions.end()
    assert len(before) == 2 * len(list(sessions.folder.glob("whole-*.pt")))
    assert {path: path.stat().st_size for path in sessions.folder.rglob("*.state")} == before
