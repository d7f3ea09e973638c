"""Workers that are connected and do not answer: named, spared, and taken back; without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from guava_nb.cluster.cluster import Cluster
from guava_nb.protocol.messages import Message, Prepared, ShardReport, StateLoaded, StepApplied
from guava_nb.training import membership
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.processes import eventually
from tests.support.training import difference, job_for, loader, losses_of, plain, plan_for, spec

#: A worker that hangs is held until the test lets it go, so this may be short.
PATIENT_S = 1.2


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    made.least_wait_s = PATIENT_S
    made.notice = Said()
    yield made
    made.close()


class Said(list[str]):
    def __call__(self, sentence: str) -> None:
        self.append(sentence)

    def __contains__(self, part: object) -> bool:
        return any(str(part) in sentence for sentence in self)


class Hang:
    """Holds a worker's own thread before its n-th message of a type, until it is let go."""

    def __init__(self, kind: type[Message], count: int = 1) -> None:
        self.kind, self.count = kind, count
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, worker: DirectWorker, message: Message) -> None:
        if isinstance(message, self.kind):
            self.count -= 1
            if self.count == 0:
                self.hangs.set()
                assert self.goes_on.wait(60)


def start(cluster: Cluster, *hooks: Callable[[DirectWorker, Message], None] | None) -> list[DirectWorker]:
    workers = [DirectWorker(cluster, f"w{k}", *([hook] if hook else [])).start() for k, hook in enumerate(hooks)]
    cluster.wait_for(len(hooks), 10)
    return workers


def assert_undisturbed(run: Run, epochs: int = 2) -> None:
    assert run.wait(60), run
    run.result()
    model, losses = plain(spec(), loader(), epochs)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "count", "doing"),
    [
        (Prepared, 1, "it builds the run"),
        (StateLoaded, 1, "it takes the state"),
        (ShardReport, 3, "step 3 is in work there"),
    ],
)
def test_a_worker_that_hangs_is_named_and_the_others_go_on(
    cluster: Cluster, kind: type[Message], count: int, doing: str
) -> None:
    hang = Hang(kind, count)
    start(cluster, None, hang)
    job = job_for(cluster, spec(), plan_for(loader()))
    job.start()
    try:
        assert_undisturbed(job.run)
        assert hang.hangs.is_set() and "waits for w1 since 1 s: " in cluster.notice
        assert "w1 is slow: no answer for" in cluster.notice and doing in cluster.notice
        assert cluster.roster.members[1].state == "ready" and "slow" in cluster.roster.members[1].detail
    finally:
        hang.goes_on.set()


def test_a_slow_worker_takes_part_again_when_it_answers(cluster: Cluster) -> None:
    hang = Hang(ShardReport, 2)
    start(cluster, None, hang)
    back = threading.Event()

    class LetGo:
        def on_step(self, run: Run, record: dict[str, object]) -> None:
            if record["step"] == 4:
                hang.goes_on.set()
                eventually(lambda: job.membership.newcomers() == [1] or bool(job._mailbox.qsize()), 20, "it answers")
                back.set()

    job = job_for(cluster, spec(), plan_for(loader(), 4, callbacks=[LetGo()]))
    job.start()
    assert_undisturbed(job.run, 4)
    assert back.is_set() and "w1 answers again" in cluster.notice
    assert cluster.roster.members[1].detail == "" and cluster.roster.members[1].samples > 16


def test_a_worker_whose_heartbeats_stay_away_is_spared_before_it_is_slow(cluster: Cluster) -> None:
    cluster.least_wait_s = 60.0
    hang = Hang(ShardReport, 3)
    silent = start(cluster, None, hang)[1]
    job = job_for(cluster, spec(), plan_for(loader()))
    job.start()
    try:
        assert hang.hangs.wait(30)
        silent.session.silent_s = 8.0
        assert_undisturbed(job.run)
        assert "w1 is silent: nothing came from it for 8 s. Others do its work" in cluster.notice
    finally:
        hang.goes_on.set()


def test_a_lone_worker_that_hangs_is_waited_for_and_named(cluster: Cluster) -> None:
    hang = Hang(StepApplied, 3)
    start(cluster, hang)
    job = job_for(cluster, spec(), plan_for(loader()))
    job.start()
    try:
        eventually(lambda: "waits for w0 since" in cluster.notice, 30, "it is named")
        assert job.run.state == "training"
    finally:
        hang.goes_on.set()
    assert_undisturbed(job.run)
    assert "is slow" not in cluster.notice


@pytest.mark.parametrize("vanishes", [False, True])
def test_a_newcomer_that_builds_for_long_holds_up_no_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, vanishes: bool
) -> None:
    monkeypatch.setattr(membership, "BUILD_S", 0.05)
    hang, late = Hang(Prepared), list[DirectWorker]()
    start(cluster, None)
    cluster.least_wait_s = 60.0

    class Join:
        def on_step(self, run: Run, record: dict[str, object]) -> None:
            if record["step"] == 2:
                late.append(DirectWorker(cluster, "late", hang).start())
                cluster.wait_for(2, 10)
            if record["step"] == 6:
                assert hang.hangs.wait(20)
                if vanishes:
                    late[0].go_away()
                hang.goes_on.set()
                if not vanishes:
                    eventually(lambda: bool(job._mailbox.qsize()), 20, "it answers")

    job = job_for(cluster, spec(), plan_for(loader(), 4, callbacks=[Join()]))
    job.start()
    assert_undisturbed(job.run, 4)
    assert "is slow" not in cluster.notice
    assert (cluster.roster.members[1].samples > 0) is not vanishes
