"""Snapshots on a lone worker's disk: a run goes on from there exactly, and without the disk from approximate weights, told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import Factory, FetchState, LoadState, RoundSpec, State, StepApplied
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.saving import snapshots, snapshots_at_worker
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import by_hand, difference, job_for, loader, plain, plan_for, spec

STEPS, EPOCHS, KILLED_AFTER = 26, 3, 45
EVERY = 2  # steps of a round of local ones


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cluster(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(snapshots, "FIRST_S", 0.0)
    monkeypatch.setattr(snapshots, "period_s", lambda *costs: 0.0)
    monkeypatch.setattr(snapshots_at_worker, "difference_count", lambda elements, steps, seconds: 1024)
    made = make_cluster()
    made.notice = told.append  # type: ignore[method-assign, assignment]
    yield made
    made.close()


class Machine:
    """Runs a worker until it has applied a step, then kills it and runs another one.

    Args:
        then: called with the folder of states at the kill; returns that of the machine where the other one runs.

    Attributes:
        came: messages that the other one was sent.
    """

    def __init__(self, cluster: Cluster, folder: Path, then: Callable[[Path], Path] = lambda folder: folder) -> None:
        self.cluster, self.folder, self.then = cluster, folder, then
        self.came: list[Any] = []
        self.told = threading.Condition()
        self.owed = self.num_saved = 0
        self.is_killed = False

    def start(self, name: str) -> DirectWorker:
        worker = DirectWorker(self.cluster, name, self, states=self.folder)
        take = worker.take

        def taken(message: Any, payload: memoryview) -> None:
            with self.told:
                self.owed += isinstance(message, FetchState) and message.save is not None
                if self.is_killed:
                    self.came.append(message)
            take(message, payload)

        worker.take = taken  # type: ignore[method-assign]
        return worker.start()

    def __call__(self, worker: DirectWorker, message: Any) -> None:
        with self.told:
            if isinstance(message, State) and message.saved is not None:
                self.owed, self.num_saved = self.owed - 1, self.num_saved + bool(message.saved.digest)
                self.told.notify_all()
        if self.is_killed or not isinstance(message, StepApplied):
            return
        if message.step % 8 == 7:  # steps take less time than a file: let it have one
            with self.told:
                assert self.told.wait_for(lambda: self.owed <= 0, 20)
        if message.step >= KILLED_AFTER and self.num_saved > 1:
            self.is_killed = True
            worker.die()
            worker.loop.keeper.close()  # a file that is half written ends with its process; here the thread would go on
            self.folder = self.then(self.folder)
            self.start("w1")


def plan_of(options: dict[str, Any], **more: Any) -> TrainingPlan:
    """Of as many rounds as other runs have steps."""
    every = EVERY if "rounds" in options else 1
    return plan_for(loader(104 * every, batch_size=4), EPOCHS, sync_every=every, **more)


def trained(machine: Machine, tmp_path: Path, **options: Any) -> Any:
    machine.start("w0")
    machine.cluster.wait_for(1, 10)
    job = job_for(machine.cluster, spec(**options), plan_of(options, snapshot_place="worker"))
    job.start()
    assert job.run.wait(90) and job.run.state == "done", job.run.error
    assert (len(job.run.history), job.run.lost_samples, job.run.duplicated_samples) == (STEPS * EPOCHS, 0, 0)
    return job


def losses(job: Any, source: str) -> dict[str, Any]:
    """The one loss of a run, which went on from that source and lost what came after it."""
    [loss] = job.run.losses
    assert loss["from"] == source and loss["after"] >= 2 and loss["steps"] + loss["after"] >= KILLED_AFTER
    return dict(loss)


SCHEDULED: dict[str, Any] = {
    "scheduler": Factory("StepLR", {"step_size": 1, "gamma": 0.5}), "scheduler_interval": "epoch",
    "model": Factory("tests.support.training:SmallNet", {"dropout": 0.3, "norm": True}),
}  # fmt: skip


ROUNDS: dict[str, Any] = {
    "rounds": RoundSpec("nesterov", 0.7, 0.9, sync_delay=1),
    "scheduler": Factory("StepLR", {"step_size": 9, "gamma": 0.9}),
}


@pytest.mark.parametrize(
    "options",
    [{}, SCHEDULED, ROUNDS],
    ids=["plain", "dropout, norm and a schedule of epochs", "rounds of local steps"],
)
def test_after_a_kill_the_run_goes_on_from_the_disk_exactly_and_no_state_is_sent(
    cluster: Cluster, told: list[str], tmp_path: Path, options: dict[str, Any]
) -> None:
    undisturbed = make_cluster()
    DirectWorker(undisturbed, "w0").start()
    undisturbed.wait_for(1, 10)
    other = job_for(undisturbed, spec(**options), plan_of(options))
    other.start()
    assert other.run.wait(60)
    machine = Machine(cluster, tmp_path / "states")
    job = trained(machine, tmp_path, **options)
    loss = losses(job, "disk")
    assert difference(job.run.model(), other.run.model()) == 0.0
    assert [one["loss"] for one in job.run.history] == [one["loss"] for one in other.run.history]
    assert not any(isinstance(message, LoadState) for message in machine.came)
    unit = "round" if "rounds" in options else "step"
    assert f"w1 read the state after {unit} {loss['after']} from its disk" in " ".join(told)
    assert job.run.approximate == "" and job.run.report()["losses"] == [loss]
    undisturbed.close()


def test_a_state_that_was_written_counts_though_its_worker_died_before_it_said_so(
    cluster: Cluster, tmp_path: Path
) -> None:
    died_with: list[int] = []

    def hook(worker: DirectWorker, message: Any) -> None:
        if isinstance(message, State) and message.saved is not None and message.step > 20 and not died_with:
            died_with.append(message.step)
            worker.die()
            DirectWorker(cluster, "w1", states=tmp_path).start()

    DirectWorker(cluster, "w0", hook, states=tmp_path).start()
    cluster.wait_for(1, 10)
    job = job_for(cluster, spec(), plan_for(loader(104, batch_size=4), EPOCHS, snapshot_place="worker"))
    job.start()
    assert job.run.wait(90) and job.run.state == "done", job.run.error
    [loss] = job.run.losses
    assert (loss["from"], loss["after"]) == ("disk", died_with[0] + 1)
    expected, _ = plain(spec(), loader(104, batch_size=4), EPOCHS)
    assert difference(job.run.model(), expected) <= 1e-9


def test_a_newcomer_that_had_built_the_run_before_the_loss_reads_the_state_too(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The state that it should get dies with the worker that has it."""

    def hook(worker: DirectWorker, message: Any) -> None:
        if isinstance(message, StepApplied) and message.step == KILLED_AFTER:
            DirectWorker(cluster, "w1", states=tmp_path).start()

    first = DirectWorker(cluster, "w0", hook, states=tmp_path)
    take = first.take

    def taken(message: Any, payload: memoryview) -> None:
        if isinstance(message, FetchState) and message.save is None:
            first.die()
        take(message, payload)

    first.take = taken  # type: ignore[method-assign]
    first.start()
    cluster.wait_for(1, 10)
    job = job_for(cluster, spec(), plan_for(loader(104, batch_size=4), 2 * EPOCHS, snapshot_place="worker"))
    job.start()
    assert job.run.wait(90) and job.run.state == "done", job.run.error
    assert first.dead and [loss["from"] for loss in job.run.losses] == ["disk"]
    expected, _ = plain(spec(), loader(104, batch_size=4), 2 * EPOCHS)
    assert difference(job.run.model(), expected) <= 1e-9


def test_an_order_that_comes_after_the_next_step_leaves_the_state_that_is_known_on_the_disk(
    cluster: Cluster, told: list[str], tmp_path: Path
) -> None:
    """Orders and batches travel on several connections; the worker is killed when it has heard an order too late."""
    late: list[tuple[FetchState, memoryview]] = []
    saved: list[int] = []
    heard, answered = threading.Condition(), [0, 0]

    def hook(worker: DirectWorker, message: Any) -> None:
        with heard:
            if isinstance(message, State) and message.saved is not None:
                saved.extend([message.step] * bool(message.saved.digest))
                answered[1] += 1
                heard.notify_all()
        if worker is not first or not isinstance(message, StepApplied):
            return
        if late:
            first.loop._handle(*late.pop())
            first.loop.keeper.close()
            first.die()
            DirectWorker(cluster, "w1", states=tmp_path).start()
        elif message.step % 8 == 7:  # steps take less time than a file: let it have one
            with heard:
                assert heard.wait_for(lambda: answered[1] >= answered[0], 20)

    first = DirectWorker(cluster, "w0", hook, states=tmp_path)
    take = first.take

    def taken(message: Any, payload: memoryview) -> None:
        is_order = isinstance(message, FetchState) and message.save is not None
        if is_order and len(saved) >= 2:
            late.append((message, payload))
            return
        with heard:
            answered[0] += is_order
        take(message, payload)

    first.take = taken  # type: ignore[method-assign]
    first.start()
    cluster.wait_for(1, 10)
    job = job_for(cluster, spec(), plan_for(loader(104, batch_size=4), EPOCHS, snapshot_place="worker"))
    job.start()
    assert job.run.wait(90) and job.run.state == "done", job.run.error
    [loss] = job.run.losses
    assert (loss["from"], loss["after"]) == ("disk", saved[1] + 1), told
    expected, _ = plain(spec(), loader(104, batch_size=4), EPOCHS)
    assert difference(job.run.model(), expected) <= 1e-9


def no_disk(folder: Path) -> Path:
    return folder.with_name("another machine")


def damaged(folder: Path) -> Path:
    for path in folder.glob("*/*.state"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    return folder


def cut(folder: Path) -> Path:
    for path in folder.glob("*/*.state"):
        path.write_bytes(path.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(("then", "options"), [(no_disk, {}), (damaged, {}), (cut, {}), (no_disk, ROUNDS)])
def test_without_the_state_on_its_disk_the_run_goes_on_from_approximate_weights_and_says_so(
    cluster: Cluster, told: list[str], tmp_path: Path, then: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    machine = Machine(cluster, tmp_path / "states", then)
    job = trained(machine, tmp_path, **options)
    loss = losses(job, "approximate weights")
    sentence = f"approximate weights after {'round' if options else 'step'} {loss['after']}"
    assert sentence in job.run.status().approximate and sentence in job.run.report()["approximate"]
    assert any(sentence in text and "are done again" in text for text in told)
    assert sum(isinstance(message, LoadState) for message in machine.came) == 1
    if options:
        exact, _ = by_hand(spec(**options), loader(104 * EVERY, batch_size=4), 1, EVERY, EPOCHS)
    else:
        exact, _ = plain(spec(), loader(104, batch_size=4), EPOCHS)
    assert 0 < difference(job.run.model(), exact) < 1


def test_what_would_be_lost_is_told_for_a_kill_and_for_a_lost_disk(cluster: Cluster, tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []

    class Look:
        def on_epoch(self, run: Any, record: dict[str, Any]) -> None:
            status = run.status()
            seen.append((status.at_risk_killed_s, status.at_risk_s))

    DirectWorker(cluster, "w0", states=tmp_path).start()
    cluster.wait_for(1, 10)
    plan = plan_for(loader(104, batch_size=4), EPOCHS, snapshot_place="worker", callbacks=[Look()])
    job = job_for(cluster, spec(), plan)
    job.start()
    assert job.run.wait(90) and job.run.state == "done", job.run.error
    assert len(seen) == EPOCHS and all(0 <= killed <= vanished for killed, vanished in seen)


def test_a_worker_that_cannot_write_is_told_once_and_snapshots_come_here(
    cluster: Cluster, told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "states").write_text("no folder")
    sent: list[Any] = []
    DirectWorker(cluster, "w0", lambda worker, message: sent.append(message), states=tmp_path / "states").start()
    cluster.wait_for(1, 10)
    job = job_for(cluster, spec(), plan_for(loader(104, batch_size=4), EPOCHS, snapshot_place="worker"))
    job.start()
    assert job.run.wait(90) and job.run.state == "done", job.run.error
    assert sum("keeps no snapshots on its disk" in text for text in told) == 1
    assert any(isinstance(message, State) and message.saved is None for message in sent)


def test_by_itself_a_thin_line_keeps_them_there_and_a_fast_one_brings_them_here(
    cluster: Cluster, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "AT_ONCE_BYTES", 0)
    for number, rate in enumerate((1.0, 1e9)):  # of a line that nobody has measured
        monkeypatch.setattr(snapshots_at_worker, "_ASSUMED_BYTES_S", rate)
        sent: list[State] = []

        def note(worker: DirectWorker, message: Any, sent: list[State] = sent) -> None:
            if isinstance(message, State):
                sent.append(message)

        worker = DirectWorker(cluster, f"w{number}", note, states=tmp_path).start()
        cluster.wait_for(1, 10)
        job = job_for(cluster, spec(), plan_for(loader(104, batch_size=4), EPOCHS), f"run-{number}")
        job.start()
        assert job.run.wait(90) and job.run.state == "done", job.run.error
        came, on_disk = ([one for one in sent if (one.saved is None) is wanted] for wanted in (True, False))
        assert (
            (len(came) == 1 and on_disk) if number == 0 else (len(came) > 1 and not on_disk)
        )  # one is that of the end
        assert sum("on its own disk" in text for text in told) == 1
        worker.die()


@pytest.mark.parametrize(
    "options", [{"snapshot_every_steps": 0}, {"snapshot_every_steps": 20}, {"snapshot_place": "orchestrator"}]
)
def test_nothing_is_kept_there_where_snapshots_come_here_at_a_pace_or_not_at_all(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(snapshots_at_worker, "_ASSUMED_BYTES_S", 1.0)
    sent: list[Any] = []
    DirectWorker(cluster, "w0", lambda worker, message: sent.append(message), states=tmp_path).start()
    cluster.wait_for(1, 10)
    job = job_for(cluster, spec(), plan_for(loader(104, batch_size=4), EPOCHS, **options))
    job.start()
    assert job.run.wait(90) and job.run.state == "done", job.run.error
    assert not any(isinstance(message, State) and message.saved is not None for message in sent)
    assert not list(tmp_path.rglob("*.state"))
