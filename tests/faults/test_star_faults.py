"""Losses at every phase of a step, without a network: exact places, no clocks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import (
    ClusterError,
    ConfigError,
    NotFinite,
    PreparationError,
    RemoteError,
    SamplesKill,
    TrainingError,
    WorkerLost,
)
from guava_nb.protocol.messages import Factory, GradientBucket, Message, ShardReport, State, StateLoaded, StepApplied
from guava_nb.sync.handover import take_over
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster, once_after
from tests.support.processes import eventually
from tests.support.training import SmallNet, dataset, difference, job_for, loader, losses_of, plain, plan_for, spec


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


Hook = Callable[[DirectWorker, Message], None]


def start(cluster: Cluster, hooks: list[Hook | None]) -> list[DirectWorker]:
    workers = [DirectWorker(cluster, f"w{k}", *([hook] if hook else [])).start() for k, hook in enumerate(hooks)]
    cluster.wait_for(len(hooks), 10)
    return workers


def finish(run: Run) -> Run:
    assert run.wait(60), run
    return run.result()


def assert_undisturbed(run: Run, epochs: int = 2) -> None:
    model, losses = plain(spec(), loader(), epochs)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


@pytest.mark.parametrize("kind", [GradientBucket, ShardReport, StepApplied])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_worker_lost_in_mid_step_changes_nothing(cluster: Cluster, kind: type[Message], count: int) -> None:
    hook = once_after(count, kind, lambda worker: worker.die())
    start(cluster, [None, hook, None])
    job = job_for(cluster, spec(), plan_for(loader()))
    job.start()
    finish(job.run)
    assert hook.fired
    assert_undisturbed(job.run)
    assert job.run.generations == 2


@pytest.mark.parametrize("kind", [GradientBucket, ShardReport, StepApplied])
def test_a_cut_connection_resumed_in_mid_step_changes_nothing(cluster: Cluster, kind: type[Message]) -> None:
    def cut(worker: DirectWorker) -> None:
        worker.go_away()
        threading.Timer(0.1, worker.come_back).start()

    hook = once_after(3, kind, cut)
    start(cluster, [None, hook])
    job = job_for(cluster, spec(), plan_for(loader()))
    job.start()
    finish(job.run)
    assert hook.fired
    assert_undisturbed(job.run)


def test_a_worker_that_comes_back_late_gets_the_state_again(cluster: Cluster) -> None:
    back = threading.Event()
    hook = once_after(2, GradientBucket, lambda worker: worker.go_away())
    workers = start(cluster, [None, hook])

    class ComeBack:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] == 5:
                workers[1].come_back()
                back.set()

    job = job_for(cluster, spec(), plan_for(loader(), 4, callbacks=[ComeBack()]))
    job.start()
    finish(job.run)
    assert hook.fired and back.is_set()
    assert_undisturbed(job.run, 4)
    assert job.run.generations == 3 and cluster.roster.members[1].samples > 0


def test_all_connections_cut_together_wait_for_their_return(cluster: Cluster) -> None:
    workers: list[DirectWorker] = []

    def cut_all(_: DirectWorker) -> None:
        for worker in workers:
            worker.go_away()
        threading.Timer(0.1, lambda: [w.come_back() for w in workers]).start()

    hook = once_after(3, GradientBucket, cut_all)
    workers += start(cluster, [None, hook])
    job = job_for(cluster, spec(), plan_for(loader()))
    job.start()
    finish(job.run)
    assert hook.fired
    assert_undisturbed(job.run)


def test_a_newcomer_takes_part_from_the_next_boundary(cluster: Cluster) -> None:
    start(cluster, [None])
    late: list[DirectWorker] = []

    class Join:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] == 3:
                late.append(DirectWorker(cluster, "late").start())
                cluster.wait_for(2, 10)

    job = job_for(cluster, spec(), plan_for(loader(), 4, callbacks=[Join()]))
    job.start()
    finish(job.run)
    assert_undisturbed(job.run, 4)
    assert cluster.roster.members[1].samples > 0


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("every", [None, 0, 3])
def test_the_last_worker_lost_goes_back_to_the_snapshot_when_another_comes(
    cluster: Cluster, every: int | None, site: str
) -> None:
    def replace(worker: DirectWorker) -> None:
        worker.die()
        DirectWorker(cluster, "spare").start()

    hook = once_after(6, StepApplied, replace)  # in the second epoch of four steps
    start(cluster, [hook])
    job = job_for(cluster, spec(optimizer_site=site), plan_for(loader(), 3, snapshot_every_steps=every))
    job.start()
    finish(job.run)
    assert hook.fired
    assert_undisturbed(job.run, 3)


class CountingNet(SmallNet):
    """A count of forwards in Python, by which the loss goes."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        return super().forward(x) * (1 + 0.01 * self.forwards)


@pytest.mark.parametrize("case", ["replaced alone", "one joins", "one is lost", "nothing"])
def test_what_is_kept_in_python_is_told_where_workers_have_it_no_longer_alike(cluster: Cluster, case: str) -> None:
    def happen(worker: DirectWorker) -> None:
        if case in ("replaced alone", "one is lost"):
            worker.die()
        if case in ("replaced alone", "one joins"):
            DirectWorker(cluster, "spare").start()

    hook = once_after(6, StepApplied, happen)  # in the second epoch of four steps
    start(cluster, [hook] if case == "replaced alone" else [hook, None])
    job = job_for(cluster, spec(model=Factory(f"{__name__}:CountingNet")), plan_for(loader(), 4))
    said: list[str] = []
    cluster.notice = said.append  # type: ignore[method-assign]
    job.start()
    finish(job.run)
    assert sum("model.forwards" in one and "is not alike on all workers" in one for one in said) == (case != "nothing")


class FreezingNet(SmallNet):
    """Freezes a layer in its second forward, by a count that goes with its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        if self.forwards == 2:
            self.first.weight.requires_grad_(False)
        return super().forward(x)


def test_a_lone_worker_that_is_replaced_begins_with_the_switches_of_the_factory_and_that_is_told(
    cluster: Cluster,
) -> None:
    def replace(worker: DirectWorker) -> None:
        worker.die()
        DirectWorker(cluster, "spare").start()

    start(cluster, [once_after(6, StepApplied, replace)])
    job = job_for(cluster, spec(model=Factory(f"{__name__}:FreezingNet")), plan_for(loader(), 3))
    said: list[str] = []
    cluster.notice = said.append  # type: ignore[method-assign]
    job.start()
    finish(job.run)
    assert sum(one.startswith("first.weight took no gradient before workers were lost or came") for one in said) == 1


class UnfreezingNet(SmallNet):
    """Its first layer learns from the third step on, by a count in a buffer, which the state has."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        self.first.requires_grad_(bool(self.steps > 2))
        return super().forward(x)


def test_a_layer_unfrozen_late_goes_on_exactly_where_a_lone_worker_is_replaced(cluster: Cluster) -> None:
    def replace(worker: DirectWorker) -> None:
        worker.die()
        DirectWorker(cluster, "spare").start()

    start(cluster, [once_after(6, StepApplied, replace)])
    run_spec = spec(model=Factory(f"{__name__}:UnfreezingNet"))
    job = job_for(cluster, run_spec, plan_for(loader(), 3))
    job.start()
    finish(job.run)
    model, _ = plain(run_spec, loader(), 3)
    assert difference(job.run.model(), model) <= 1e-9


def test_a_run_that_is_stopped_while_it_waits_for_workers_is_that_of_its_snapshot(cluster: Cluster) -> None:
    start(cluster, [once_after(6, StepApplied, lambda worker: worker.die())])
    job = job_for(cluster, spec(), plan_for(loader(), 3))
    job.start()
    eventually(lambda: job.run.state == "waiting", 20, "the run waits for another one")
    job.run.interrupt()
    assert job.run.wait(20) and job.run.state == "stopped" and len(job.run.history) == 4
    model, _ = plain(spec(), loader(), 1)
    assert difference(job.run.model(), model) <= 1e-9 and job.accounting.position.epoch == 1


@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_a_lone_worker_that_leaves_hands_over_and_no_step_is_done_twice(
    cluster: Cluster, count: int, site: str
) -> None:
    hook = once_after(count, StepApplied, lambda worker: worker.loop.leave("asked to leave"))  # four steps an epoch
    first = start(cluster, [hook])[0]
    job = job_for(cluster, spec(optimizer_site=site), plan_for(loader(), 3))
    job.start()
    first.thread.join(20)
    assert not first.thread.is_alive() and first.left
    eventually(lambda: job.run.state == "waiting", 10, "the run waits for another one")
    done = len(job.run.history)
    assert done >= count and job.accounting.snapshot.step == done - 1
    DirectWorker(cluster, "spare").start()
    finish(job.run)
    assert_undisturbed(job.run, 3)
    assert cluster.roster.members[0].state == "left"
    assert sum(member.samples for member in cluster.members()) == 303


def test_a_worker_lost_while_it_hands_over_costs_the_epoch_and_no_more(cluster: Cluster) -> None:
    leave = once_after(6, StepApplied, lambda worker: worker.loop.leave("asked to leave"))
    die = once_after(2, State, lambda worker: worker.die())  # the first is the snapshot after an epoch of four steps

    def hook(worker: DirectWorker, message: Message) -> None:
        leave(worker, message)
        die(worker, message)

    start(cluster, [hook])
    job = job_for(cluster, spec(), plan_for(loader(), 3))
    job.start()
    eventually(lambda: job.run.state == "waiting", 20, "the run waits for another one")
    assert die.fired and job.accounting.snapshot.step == 3  # type: ignore[attr-defined]
    DirectWorker(cluster, "spare").start()
    finish(job.run)
    assert_undisturbed(job.run, 3)


def test_of_two_workers_one_leaves_at_once(cluster: Cluster) -> None:
    hook = once_after(3, StepApplied, lambda worker: worker.loop.leave("asked to leave"))
    leaver = start(cluster, [hook, None])[0]
    job = job_for(cluster, spec(), plan_for(loader(), 3))
    job.start()
    finish(job.run)
    leaver.thread.join(10)
    assert leaver.left and cluster.roster.members[0].state == "left"
    assert (job.accounting.snapshot.step + 1) % 4 == 0, "of the end of an epoch: nobody had to hand over"
    assert_undisturbed(job.run, 3)


def test_workers_that_leave_together_hand_over_once(cluster: Cluster) -> None:
    workers: list[DirectWorker] = []

    def leave_all(_: DirectWorker) -> None:
        for worker in workers:
            worker.loop.leave("asked to leave")

    workers += start(cluster, [once_after(3, StepApplied, leave_all), None])
    job = job_for(cluster, spec(), plan_for(loader(), 3))
    job.start()
    for worker in workers:
        worker.thread.join(20)
        assert worker.left
    eventually(lambda: job.run.state == "waiting", 10, "the run waits for another one")
    assert job.accounting.snapshot.step == len(job.run.history) - 1
    DirectWorker(cluster, "spare").start()
    finish(job.run)
    assert_undisturbed(job.run, 3)


def test_workers_whose_leaves_come_at_once_do_not_count_on_each_other(cluster: Cluster) -> None:
    workers: list[DirectWorker] = []

    class Leave:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] == 5:
                for worker in workers:
                    worker.loop.leave("asked to leave")
                # One may have done its part of a step that the other never does, and so never say it.
                with contextlib.suppress(AssertionError):
                    eventually(lambda: len(cluster._leaving) == 2, 0.3, "both have said it before the run looks")

    workers += start(cluster, [None, None])
    job = job_for(cluster, spec(), plan_for(loader(), 3, callbacks=[Leave()]))
    job.start()
    eventually(lambda: job.run.state == "waiting", 20, "the run waits for another one")
    assert job.accounting.snapshot.step == len(job.run.history) - 1 >= 4
    DirectWorker(cluster, "spare").start()
    finish(job.run)
    assert_undisturbed(job.run, 3)


def test_a_run_that_is_stopped_waits_for_the_state_of_who_leaves(cluster: Cluster) -> None:
    never = threading.Event()

    class Stop:
        def on_step(self, run: Run, record: dict[str, Any]) -> bool:
            return record["step"] == 5 and bool(eventually(lambda: cluster._leaving, 20, "it wants to go"))

    def hook(worker: DirectWorker, message: Message) -> None:
        leave(worker, message)
        if isinstance(message, State) and message.step > 3:
            never.wait(0.5)  # longer than the grace of an interrupt

    leave = once_after(5, StepApplied, lambda worker: worker.loop.leave("asked to leave"))
    leaver = start(cluster, [hook])[0]
    job = job_for(cluster, spec(), plan_for(loader(), 3, callbacks=[Stop()], interrupt_grace_s=0.1))
    job.start()
    assert job.run.wait(20)
    leaver.thread.join(20)
    at = len(job.run.history)
    assert job.run.state == "stopped" and not leaver.thread.is_alive()
    model = plain(spec(), loader(), 3, limit=at)[0]
    assert difference(job.run.model(), model) <= 1e-9


@pytest.mark.parametrize("count", [1, 2])
def test_a_stop_in_the_middle_of_a_handover_keeps_the_state(cluster: Cluster, count: int) -> None:
    workers: list[DirectWorker] = []

    class LeaveAndStop:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] == 6:
                for worker in workers:
                    worker.loop.leave("asked to leave")
                with contextlib.suppress(AssertionError):
                    eventually(lambda: len(cluster._leaving) == count, 0.3, "they have said it before the run looks")
                job.interrupt()

    workers += start(cluster, [None] * count)
    job = job_for(cluster, spec(), plan_for(loader(), 3, callbacks=[LeaveAndStop()]))
    job.start()
    assert job.run.wait(20) and job.run.state == "stopped" and len(job.run.history) >= 6
    assert difference(job.run.model(), plain(spec(), loader(), 3, limit=len(job.run.history))[0]) <= 1e-9
    for worker in workers:
        worker.thread.join(20)
        assert worker.left


@pytest.mark.parametrize("asked", [False, True])
def test_a_state_that_stayed_with_a_worker_after_the_run_is_taken_when_it_leaves(cluster: Cluster, asked: bool) -> None:
    class Stop:
        def on_step(self, run: Run, record: dict[str, Any]) -> bool:
            return record["step"] == 6

    go_on = threading.Event()
    slow = once_after(2, State, lambda worker: go_on.wait(20))  # the first is that of the epoch
    leaver = start(cluster, [slow])[0]
    job = job_for(cluster, spec(), plan_for(loader(), 3, callbacks=[Stop()], interrupt_grace_s=0.1))
    cluster.on_idle_leave = lambda rank: take_over(job.replica_set, cluster, rank)
    job.start()
    assert job.run.wait(20) and job.replica_set.master_step < job.replica_set.step, "the state is not here yet"
    model = threading.Thread(target=job.run.model)
    if asked:  # as by a save, while it leaves
        model.start()
    leaver.loop.leave("asked to leave")
    go_on.set()
    leaver.thread.join(20)
    if asked:
        model.join(20)
    at = len(job.run.history)
    assert leaver.left and cluster.roster.members[0].state == "left"
    assert difference(job.run.model(), plain(spec(), loader(), 3, limit=at)[0]) <= 1e-9


def test_a_worker_leaves_by_itself_when_nobody_takes_its_state(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guava_nb.worker.loop.HANDOVER_S", 0.3)
    monkeypatch.setattr("guava_nb.worker.loop.TRANSFER_S", 0.3)
    leaver = start(cluster, [once_after(2, StepApplied, lambda worker: worker.loop.leave("asked to leave"))])[0]
    monkeypatch.setattr(cluster, "release", lambda rank: None)  # an orchestrator that hangs
    job = job_for(cluster, spec(), plan_for(loader(), 3))
    job.start()
    leaver.thread.join(20)
    assert leaver.left
    leaver.die()
    DirectWorker(cluster, "spare").start()
    finish(job.run)
    assert_undisturbed(job.run, 3)


def test_a_worker_lost_while_it_gets_the_snapshot_is_waited_for_again(cluster: Cluster) -> None:
    def replace(worker: DirectWorker) -> None:
        worker.die()
        DirectWorker(cluster, "spare", once_after(1, StateLoaded, replace_again)).start()

    def replace_again(worker: DirectWorker) -> None:
        worker.die()
        DirectWorker(cluster, "third").start()

    start(cluster, [once_after(6, StepApplied, replace)])
    job = job_for(cluster, spec(), plan_for(loader(), 3))
    job.start()
    finish(job.run)
    assert_undisturbed(job.run, 3)
    assert [m.name for m in cluster.members() if m.alive] == ["third"]


def test_samples_that_end_every_worker_are_named(cluster: Cluster) -> None:
    def killer(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, ShardReport) and message.step == 2 and message.shard == 0:
            worker.die()

    start(cluster, [killer] * 4)
    job = job_for(cluster, spec(), plan_for(loader(), 1))
    job.start()
    assert job.run.wait(30)
    with pytest.raises(
        SamplesKill, match=r"3 workers were lost while they worked on samples [\d, ]+ and \d+ more of epoch 1 \(w0"
    ):
        job.run.result()
    assert len(job.run.history) == 2 and len(cluster.roster.ready()) == 1


def test_a_step_that_counts_nothing_is_told_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    cluster.notice = told.append
    data = torch.utils.data.TensorDataset(torch.randn(64, 10).double(), torch.full((64,), -100))
    start(cluster, [None])
    job = job_for(cluster, spec(), plan_for(torch.utils.data.DataLoader(data, batch_size=16), 1))
    before = {name: value.clone() for name, value in job.replica_set.master.model.state_dict().items()}
    job.start()
    finish(job.run)
    assert sum("step 1 counted nothing: its 16 samples" in line for line in told) == 1
    assert sum("counted nothing" in line for line in told) == 1
    assert all(value.isfinite().all() for value in job.run.model().state_dict().values())
    assert before.keys() == job.run.model().state_dict().keys()


def test_all_workers_lost_for_good_is_said(cluster: Cluster) -> None:
    start(cluster, [once_after(2, StepApplied, lambda worker: worker.die())])
    job = job_for(cluster, spec(), plan_for(loader(), rejoin_timeout_s=0.3))
    job.start()
    assert job.run.wait(30)
    with pytest.raises(WorkerLost, match=r"all workers are gone.*w0: it vanished"):
        job.run.result()


#: A lone worker gives the device these steps before it has seen the figures of the one before.
AHEAD = Factory("AdamW", {"lr": 0.01, "fused": True})


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize(("workers", "optimizer"), [(1, spec().optimizer), (2, spec().optimizer), (1, AHEAD)])
def test_nan_stops_everyone_before_it_is_applied(
    cluster: Cluster, workers: int, optimizer: Factory, precision: str
) -> None:
    data = dataset(96, torch.float64 if precision == "fp64" else torch.float32)
    data.tensors[0][50] = float("nan")
    batches = torch.utils.data.DataLoader(data, batch_size=16)
    start(cluster, [None] * workers)
    run_spec = spec(precision=precision, optimizer=optimizer, scheduler=Factory("StepLR", {"step_size": 2}))
    job = job_for(cluster, run_spec, plan_for(batches, 1))
    job.start()
    assert job.run.wait(30)
    with pytest.raises(NotFinite, match=rf"on w{workers - 1 if workers == 1 else 0} at step 4 \(samples 48 to"):
        job.run.result()
    assert len(job.run.history) == 3
    clean = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(48)), batch_size=16)
    model, _ = plain(run_spec, clean, 1)
    assert difference(job.run.model(), model) <= (1e-9 if precision == "fp64" else 1e-4)


def test_an_error_of_the_user_s_code_comes_with_its_traceback_and_workers_stay(cluster: Cluster) -> None:
    start(cluster, [None, None])
    bad = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
    )
    job = job_for(cluster, spec(), plan_for(bad, 1))
    job.start()
    assert job.run.wait(30)
    with pytest.raises(RemoteError, match=r"worker w\d raised RuntimeError: mat1 and mat2") as caught:
        job.run.result()
    assert "forward" in caught.value.remote_traceback
    again = job_for(cluster, spec(), plan_for(loader()), "run-2")
    again.start()
    finish(again.run)
    assert_undisturbed(again.run)


def test_a_data_set_that_raises_reaches_the_run_and_workers_stay(cluster: Cluster) -> None:
    class Broken(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            if index == 17:
                raise OSError("file 17 is damaged")
            return torch.zeros(10, dtype=torch.float64), 0

    start(cluster, [None, None])
    job = job_for(cluster, spec(), plan_for(torch.utils.data.DataLoader(Broken(), batch_size=4), 1))
    job.start()
    assert job.run.wait(30)
    with pytest.raises(Exception, match="17"):
        job.run.result()
    assert len(job.run.history) <= 4 and cluster.roster.ready() == [0, 1]


def test_a_worker_without_a_share_takes_over_when_the_others_are_gone(cluster: Cluster) -> None:
    hook = once_after(3, StepApplied, lambda worker: worker.die())
    start(cluster, [hook, None])
    job = job_for(cluster, spec(), plan_for(loader(), shares=(1, 0)))
    job.start()
    finish(job.run)
    assert hook.fired
    assert_undisturbed(job.run)


def test_a_callback_may_stop_its_run_but_not_wait_for_it(cluster: Cluster) -> None:
    start(cluster, [None])
    told: list[str] = []

    class Impatient:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            for wait in (run.wait, run.result):
                with pytest.raises(ClusterError, match="cannot wait for the run's end"):
                    wait()
                told.append(wait.__name__)
            assert run.stop() is False

    job = job_for(cluster, spec(), plan_for(loader(), 50, callbacks=[Impatient()]))
    job.start()
    assert job.run.wait(10) and job.run.state == "stopped"
    assert told[:2] == ["wait", "result"] and len(job.run.history) < 8
    assert job.run.stop() is True


def test_a_batch_without_samples_is_told_instead_of_waited_for(cluster: Cluster) -> None:
    start(cluster, [None, None])
    x, y = dataset().tensors
    job = job_for(cluster, spec(), plan_for([(x[:8], y[:8]), (x[:0], y[:0]), (x[8:], y[8:])], 1))
    job.start()
    with pytest.raises(ConfigError, match="batch 1 of the loader has no samples"):
        finish(job.run)
    again = job_for(cluster, spec(), plan_for(loader()), "run-2")
    again.plan.val_feed = LoaderFeed([(x[:0], y[:0]), (x[:8], y[:8])])
    again.start()
    assert [v["samples"] for v in finish(again.run).validations] == [8, 8]
    assert_undisturbed(again.run)


@pytest.mark.parametrize(
    "error", [ValueError("bad \udcff"), ValueError("x" * 20_000_000), SystemExit(3)], ids=["surrogate", "huge", "exit"]
)
def test_an_error_whatever_it_says_costs_no_worker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A report that cannot be sent ended one worker after the other, each given the same shard."""
    start(cluster, [None, None])

    def cursed(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        job = job_for(cluster, spec(), plan_for(loader()))
        patch.setattr(SmallNet, "forward", cursed)
        job.start()
        with pytest.raises(RemoteError, match=type(error).__name__):
            finish(job.run)
    assert cluster.roster.ready() == [0, 1]
    again = job_for(cluster, spec(), plan_for(loader()), "run-2")
    again.start()
    finish(again.run)
    assert_undisturbed(again.run)


def test_what_a_run_s_code_does_to_torch_s_defaults_ends_with_the_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(cluster, [None])
    forward = SmallNet.forward

    def meddling(self: SmallNet, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return forward(self, x)

    with monkeypatch.context() as patch:
        job = job_for(cluster, spec(), plan_for(loader()))
        patch.setattr(SmallNet, "forward", meddling)
        job.start()
        with pytest.raises(TrainingError, match="worker w0: the loss depends on no trainable parameter"):
            finish(job.run)
    again = job_for(cluster, spec(), plan_for(loader()), "run-2")
    again.start()
    finish(again.run)
    assert_undisturbed(again.run)


@pytest.mark.parametrize(("workers", "optimizer"), [(1, spec().optimizer), (2, spec().optimizer), (1, AHEAD)])
def test_a_buffer_that_is_not_finite_is_called_a_buffer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, workers: int, optimizer: Factory
) -> None:
    start(cluster, [None] * workers)
    forward = SmallNet.forward

    def spoiling(self: SmallNet, x: torch.Tensor) -> torch.Tensor:
        outputs = forward(self, x)
        self.norm.running_mean = self.norm.running_mean * float("nan")
        return outputs

    run_spec = spec(model=Factory("tests.support.training:SmallNet", {"norm": True}), optimizer=optimizer)
    job = job_for(cluster, run_spec, plan_for(loader()))
    monkeypatch.setattr(SmallNet, "forward", spoiling)
    job.start()
    with pytest.raises(NotFinite, match=r"NaN or Inf in buffer norm\.running_mean on"):
        finish(job.run)


def test_reports_that_come_after_the_answer_to_an_abort_do_not_undo_it(cluster: Cluster) -> None:
    """A worker answers an abort at once, and applies a step that was committed before it only then."""
    replica_set = job_for(cluster, spec(), plan_for(loader())).replica_set
    replica_set.step, replica_set.at[0] = 4, 2
    replica_set.sent((0,), 4, is_applied_first=False)
    replica_set.note_commit(0, StepApplied(run_id="run-1", generation=2, step=3))
    replica_set.note_commit(0, StepApplied(run_id="run-1", generation=1, step=4))
    assert replica_set.generation_of[0] == 2 and replica_set.at[0] == 4


def test_a_run_goes_on_at_once_from_one_that_failed_at_a_commit(cluster: Cluster) -> None:
    """The orchestrator commits before the workers report it: their reports must be heard before the run ends."""

    class Raise:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] == 4:
                raise KeyError("callback")

    def slow(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, StepApplied) and message.step == 3:
            threading.Event().wait(0.3)

    start(cluster, [slow, slow])
    job = job_for(cluster, spec(), plan_for(loader(), callbacks=[Raise()]))
    job.start()
    with pytest.raises(KeyError):
        finish(job.run)
    assert job.replica_set.in_step(job) == [0, 1]
    model, _ = plain(spec(), loader(), limit=4)
    assert difference(job.run.model(), model) <= 1e-9


def test_a_run_that_a_worker_cannot_build_is_refused_before_training(cluster: Cluster) -> None:
    from guava_nb.protocol.messages import Cell
    from guava_nb.sync.whole_replica_set import WholeReplicaSet
    from guava_nb.training.job import TrainingJob
    from tests.support.training import replica

    start(cluster, [None])
    plan = plan_for(loader(), 1)
    replica_set = WholeReplicaSet("run-1", spec(), (Cell("model", "import no_such_library_xyz"),), replica(spec()))
    job = TrainingJob(replica_set, plan, cluster, lambda: replica_set.master.model)
    run = job.run
    job.start()
    assert run.wait(30)
    with pytest.raises(
        PreparationError, match=r"w0 cannot import 'no_such_library_xyz': nothing here tells which package"
    ):
        run.result()
    assert run.history == []


@pytest.mark.parametrize("step", [1, 3, 6])
@pytest.mark.parametrize("workers", [1, 2])
def test_interrupts_stop_at_a_commit_and_the_next_run_goes_on(cluster: Cluster, step: int, workers: int) -> None:
    start(cluster, [None] * workers)
    holder: list[Any] = []

    class Interrupt:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] == step:
                holder[0].interrupt()

    job = job_for(cluster, spec(), plan_for(loader(), callbacks=[Interrupt()]))
    holder.append(job)
    job.start()
    assert job.run.wait(30) and job.run.state == "stopped"
    done = len(job.run.history)
    # A lone worker commits by itself until the word reaches it: a few of the steps that lie with it.
    assert step <= done <= (step + 2 if workers > 1 else len(loader()) * 2)
    model, losses = plain(spec(), loader(), limit=done)
    assert losses_of(job.run) == pytest.approx(losses, abs=1e-12)
    assert difference(job.run.model(), model) <= 1e-9
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    again = job_for(cluster, spec(), plan_for(loader()), "run-2")
    again.start()
    finish(again.run)
    assert_undisturbed(again.run)


@pytest.mark.parametrize("kind", [GradientBucket, ShardReport, StepApplied])
def test_losses_with_many_steps_in_flight_change_nothing(cluster: Cluster, kind: type[Message]) -> None:
    """26 steps an epoch, 8 and more sent ahead: all of a lost member's shards go to the others, in every step.

    Without the one-step check, which waits at steps 4, 8, 16 until none is in flight.
    """
    in_flight: list[int] = []

    def die(worker: DirectWorker) -> None:
        in_flight.append(len(job.window.exchange.in_flight))
        worker.die()

    def cut(worker: DirectWorker) -> None:
        in_flight.append(len(job.window.exchange.in_flight))
        worker.go_away()
        threading.Timer(0.05, worker.come_back).start()

    hooks = [None, once_after(30, kind, die), once_after(12, kind, cut)]
    start(cluster, hooks)
    job = job_for(cluster, spec(), plan_for(loader(batch_size=4), check="off"))
    job.start()
    finish(job.run)
    assert all(hook.fired for hook in hooks[1:]) and max(in_flight) > 3
    model, losses = plain(spec(), loader(batch_size=4))
    assert losses_of(job.run) == pytest.approx(losses, abs=1e-12)
    assert difference(job.run.model(), model) <= 1e-9
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    assert job.window.feeding().in_flight == {0: (0, 0), 1: (0, 0), 2: (0, 0)}


@pytest.mark.parametrize("workers", [1, 2])
def test_boundaries_come_between_the_same_steps_however_many_are_in_flight(cluster: Cluster, workers: int) -> None:
    """Validation every 5 steps and a schedule per step: the same numbers as one step at a time."""
    start(cluster, [None] * workers)
    run_spec = spec(scheduler=Factory("StepLR", {"step_size": 3, "gamma": 0.5}))

    def train(**changes: Any) -> tuple[list[Any], list[Any]]:
        plan = plan_for(loader(batch_size=4), 1, val_interval=5, snapshot_every_steps=7, **changes)
        plan.val_feed = LoaderFeed(loader(rows=30, batch_size=16))
        job = job_for(cluster, run_spec, plan, f"run-{len(changes)}")
        job.start()
        run = finish(job.run)
        figures = [(v["step"], v["loss"], v["accuracy"]) for v in run.validations]
        return figures, [(r["step"], r["loss"], r["learning_rate"]) for r in run.history]

    ahead, one_by_one = train(), train(prefetch_bytes=0, prefetch_steps=0)
    assert ahead == one_by_one
    assert [step for step, _, _ in ahead[0]] == [5, 10, 15, 20, 25]


def test_a_second_interrupt_ends_at_once(cluster: Cluster) -> None:
    held = threading.Event()
    started = threading.Event()

    def hold(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, StepApplied):
            started.set()
            held.wait(20)

    start(cluster, [hold])
    job = job_for(cluster, spec(), plan_for(loader()))
    job.start()
    assert started.wait(20)
    job.interrupt()
    assert not job.run.wait(0.3)
    job.interrupt()
    assert job.run.wait(20) and job.run.state == "stopped" and job.run.history == []
    held.set()


def test_a_worker_whose_parameters_drift_gets_the_state_again(cluster: Cluster) -> None:
    workers: list[DirectWorker] = []

    def spoil(worker: DirectWorker) -> None:
        with torch.no_grad():
            next(worker.loop._run.replica.model.parameters()).add_(1.0)  # type: ignore[union-attr]

    hook = once_after(1, StateLoaded, spoil)
    workers += start(cluster, [None, hook])
    job = job_for(cluster, spec(), plan_for(loader(), 3))
    job.start()
    finish(job.run)
    assert hook.fired
    for worker in workers:
        assert difference(worker.loop._run.replica.model, job.run.model()) == 0.0  # type: ignore[union-attr]


def test_validation_counts_every_sample_once_through_a_loss(cluster: Cluster) -> None:
    from guava_nb.protocol.messages import Evaluated

    hook = once_after(3, Evaluated, lambda worker: worker.die())
    start(cluster, [None, hook])
    plan = plan_for(loader(), 2)
    plan.val_feed = LoaderFeed(torch.utils.data.DataLoader(dataset(101), batch_size=7))
    job = job_for(cluster, spec(), plan)
    job.start()
    finish(job.run)
    assert hook.fired
    first, score = job.run.validations
    assert first["loss"] != score["loss"] and first["samples"] == 101
    model = job.run.model().eval()
    x, y = dataset(101).tensors
    with torch.no_grad():
        out = model(x)
    assert score["samples"] == 101
    assert score["accuracy"] == float((out.argmax(1) == y).double().mean())
    assert score["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(out, y)), abs=1e-12)


def test_optimizer_factory_wrong_is_refused_here() -> None:
    from guava_nb.errors import GuavaError
    from tests.support.training import replica

    with pytest.raises(GuavaError, match="AdamW"):
        replica(spec(optimizer=Factory("AdamWW", {"lr": 0.1})))
