"""Losses, joins and interrupts at every phase of a round of local steps, without a network: exact places, no clocks."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import NotFinite
from guava_nb.protocol.messages import Factory, GradientBucket, Message, RoundSpec, ShardReport, StepApplied
from guava_nb.sync.handover import fetch_between_runs
from guava_nb.training import checkpoint
from guava_nb.training.initial_state import from_checkpoint
from guava_nb.training.run import Run
from tests.faults.test_star_faults import finish, start
from tests.support.direct import DirectWorker, make_cluster, once_after
from tests.support.training import by_hand, dataset, difference, job_for, loader, losses_of, plan_for, spec

SGD = Factory("SGD", {"lr": 0.1})
MOMENTUM = Factory("SGD", {"lr": 0.05, "momentum": 0.5})
STEP_LR = Factory("StepLR", {"step_size": 3, "gamma": 0.5})
#: What a survivor does in a lost worker's place is what that one would have done: SGD keeps nothing of its own.
SPARSE, PARTIAL = (RoundSpec(outer, 1.0, 0.0, density=0.25) for outer in ("sparse", "partial"))
STATELESS = spec(rounds=RoundSpec("nesterov", 0.7, 0.9), optimizer=SGD, scheduler=STEP_LR)
ADAM = spec(rounds=RoundSpec("nesterov", 0.7, 0.9), hash_every_steps=1)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def assert_by_hand(run: Run, workers: int, every: int = 3, epochs: int = 2) -> None:
    model, losses = by_hand(STATELESS, loader(101, 16), workers, every, epochs)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "count"), [(GradientBucket, 1), (GradientBucket, 2), (ShardReport, 1), (StepApplied, 1)]
)
def test_a_worker_lost_in_a_round_changes_nothing(cluster: Cluster, kind: type[Message], count: int) -> None:
    hook = once_after(count, kind, lambda worker: worker.die())
    start(cluster, [None, hook])
    data = loader(101, 16)
    job = job_for(cluster, STATELESS, plan_for(data, 1, sync_every=7))  # one round: no later one has another team
    job.start()
    finish(job.run)
    assert hook.fired
    assert_by_hand(job.run, 2, 7, 1)


@pytest.mark.parametrize("kind", [GradientBucket, ShardReport, StepApplied])
def test_a_cut_connection_resumed_in_a_round_changes_nothing(cluster: Cluster, kind: type[Message]) -> None:
    def cut(worker: DirectWorker) -> None:
        worker.go_away()
        threading.Timer(0.1, worker.come_back).start()

    hook = once_after(1, kind, cut)
    start(cluster, [None, hook])
    job = job_for(cluster, STATELESS, plan_for(loader(101, 16), 1, sync_every=7))
    job.start()
    finish(job.run)
    assert hook.fired
    assert_by_hand(job.run, 2, 7, 1)


OUTER = {"average": (1.0, 0.0), "nesterov": (0.7, 0.9), "sparse": (1.0, 0.0), "partial": (1.0, 0.0)}


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("way", [*OUTER, "average+int8"])
def test_thirty_rounds_with_losses_and_joins_count_every_sample_and_keep_replicas_alike(
    cluster: Cluster, way: str, delay: int
) -> None:
    """A worker is lost every third round, with its own weights where rounds are begun early; two come late."""
    told: list[str] = []
    cluster.notice = told.append  # type: ignore[method-assign, assignment]
    hashes: dict[int, set[str]] = defaultdict(set)
    joined: list[DirectWorker] = []

    def watch(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, StepApplied) and message.parameter_hash and not worker.dead:
            hashes[message.step].add(message.parameter_hash)
        # Every third round one that joined for it is lost in its midst.
        if isinstance(message, ShardReport) and message.step % 3 == 2 and worker in joined[:-2]:
            worker.die()

    class Join:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["round"] % 3 == 1 and record["round"] < 28:
                joined.append(DirectWorker(cluster, f"late{len(joined)}", watch))
                joined.append(DirectWorker(cluster, f"late{len(joined)}", watch)) if record["round"] == 1 else None
                for worker in joined:
                    if worker.thread.ident is None:
                        worker.start()
                cluster.wait_for(sum(not one.dead for one in joined) + 2, 10)

    start(cluster, [watch, watch])
    # Momentum is an inner state: each survivor and each newcomer has another one than the lost worker had.
    outer, _, wire = way.partition("+")
    rounds = RoundSpec(outer, *OUTER[outer], density=0.25, sync_delay=delay)
    encoded = {"bucket_bytes": 1 << 20, "wire": wire or "fp32"}
    # DiLoCo's outer momentum makes each way ten times as long in the end, so its inner steps are shorter.
    optimizer = Factory("SGD", {"lr": 0.005, "momentum": 0.5}) if outer == "nesterov" else MOMENTUM
    run_spec = spec(rounds=rounds, optimizer=optimizer, hash_every_steps=1, **encoded)
    job = job_for(cluster, run_spec, plan_for(loader(101, 16), 10, sync_every=3, callbacks=[Join()]))
    job.start()
    run = finish(job.run)
    assert len(run.history) == 30 and sum(one.dead for one in joined) >= 5
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert sum(record["samples"] for record in run.history) == 1010
    assert sorted(hashes) == list(range(30)) and all(len(found) == 1 for found in hashes.values())
    _, undisturbed = by_hand(run_spec, loader(101, 16), 2, 3, 10)
    ended, expected = sum(losses_of(run)[-6:]), sum(undisturbed[-6:])
    # With partial averaging a third worker sends elements that the two did not: the loss falls faster.
    assert ended < 1.01 * expected and (outer == "partial" or ended > 0.99 * expected)
    lost = [text for text in told if "is lost, and what only it had" in text]
    assert len(lost) == sum(one.dead for one in joined) and all(
        "the state of its own optimizer" in text for text in lost
    )
    is_short = way not in ("average", "nesterov")
    assert [("had left out so far" in text) for text in lost] == [is_short] * len(lost)
    assert any("travel as" in text for text in told) == is_short


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        (GradientBucket, SPARSE),
        (ShardReport, SPARSE),
        (StepApplied, SPARSE),
        (GradientBucket, PARTIAL),
        (ShardReport, PARTIAL),
    ],
)
def test_a_worker_lost_in_a_sparse_round_leaves_replicas_alike_and_the_last_one_takes_in_what_it_owes(
    cluster: Cluster, kind: type[Message], rounds: RoundSpec
) -> None:
    hashes: dict[int, set[str]] = defaultdict(set)
    die = once_after(2, kind, lambda worker: worker.die())

    def watch(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, StepApplied) and message.parameter_hash:
            hashes[message.step].add(message.parameter_hash)

    def die_and_watch(worker: DirectWorker, message: Message) -> None:
        watch(worker, message)
        die(worker, message)

    workers = [DirectWorker(cluster, f"w{k}", hook) for k, hook in enumerate((watch, die_and_watch, watch))]
    for worker in workers:
        worker.start()
    cluster.wait_for(3, 10)
    job = job_for(cluster, spec(rounds=rounds, hash_every_steps=1), plan_for(loader(101, 16), 3, sync_every=3))
    job.start()
    finish(job.run)
    assert die.fired and (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    assert sorted(hashes) == list(range(9)) and all(len(found) == 1 for found in hashes.values())
    own = [worker.loop._steps._run.replica.wire for worker in (workers[0], workers[2])]  # type: ignore[union-attr]
    assert all(wire.owed_norm() > 0 for wire in own)  # a residual stays with its owner, whatever was lost with another


def test_two_runs_that_go_on_from_a_checkpoint_of_sparse_rounds_come_to_the_same(tmp_path: Path) -> None:
    from tests.parity.test_forecast import Session

    cluster, told = make_cluster(), list[str]()
    cluster.notice = told.append  # type: ignore[method-assign, assignment]
    session, run_spec = Session(cluster, 2), spec(rounds=SPARSE, optimizer=SGD)
    session.train(run_spec, plan_for(loader(101, 16), 2, sync_every=3, save_every_steps=3), tmp_path)
    saved = max(tmp_path.glob("*.pt"), key=lambda path: int(path.stem.rpartition("-")[2]))
    models = [
        session.train(run_spec, plan_for(loader(101, 16), 1, sync_every=3), tmp_path, begin=saved).model()
        for _ in range(2)
    ]
    cluster.close()
    assert difference(*models) == 0
    assert "takes its rest with it: with sparse messages" in told[0]


def test_the_last_worker_lost_goes_back_to_the_snapshot(cluster: Cluster) -> None:
    def substitute(worker: DirectWorker) -> None:
        worker.die()
        DirectWorker(cluster, "spare").start()

    hook = once_after(5, StepApplied, substitute)  # of three rounds an epoch
    start(cluster, [hook])
    job = job_for(cluster, STATELESS, plan_for(loader(101, 16), 3, sync_every=3))
    job.start()
    finish(job.run)
    assert hook.fired
    assert_by_hand(job.run, 1, 3, 3)


@pytest.mark.parametrize("workers", [1, 2])
def test_nan_in_a_round_is_applied_nowhere(cluster: Cluster, workers: int) -> None:
    data = dataset(96)
    data.tensors[0][50] = float("nan")
    batches = torch.utils.data.DataLoader(data, batch_size=8)
    start(cluster, [None] * workers)
    job = job_for(cluster, STATELESS, plan_for(batches, 1, sync_every=4))
    job.start()
    assert job.run.wait(30)
    with pytest.raises(NotFinite, match="at round 2"):
        job.run.result()
    assert [record["step"] for record in job.run.history] == [4]
    clean = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(32)), batch_size=8)
    model, _ = by_hand(STATELESS, clean, workers, 4, 1)
    assert difference(job.run.model(), model) <= 1e-9


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_stops_at_a_round_and_the_next_run_goes_on(cluster: Cluster, workers: int) -> None:
    start(cluster, [None] * workers)
    holder: list[Any] = []

    class Interrupt:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["round"] == 2:
                holder[0].interrupt()

    job = job_for(cluster, STATELESS, plan_for(loader(101, 16), sync_every=3, callbacks=[Interrupt()]))
    holder.append(job)
    job.start()
    assert job.run.wait(30) and job.run.state == "stopped"
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    again = job_for(cluster, STATELESS, plan_for(loader(101, 16), sync_every=3), "run-2")
    again.start()
    finish(again.run)
    assert_by_hand(again.run, workers)


def test_a_round_that_is_given_up_in_its_midst_begins_again_from_its_start_bit_for_bit(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Both are cut off when the second one has sent its way and not reported; what they did of the round is undone."""
    run_spec, holder = replace(STATELESS, lockstep=True), list[Any]()

    def cut(worker: DirectWorker) -> None:
        for one in workers:
            one.go_away()
        holder[0].interrupt()

    hook = once_after(5, ShardReport, cut)  # in the second epoch
    workers = start(cluster, [None, hook])
    job = job_for(cluster, run_spec, plan_for(loader(101, 16), 3, sync_every=3, interrupt_grace_s=0.1))
    holder.append(job)
    job.start()
    assert job.run.wait(30) and job.run.state == "stopped" and hook.fired
    assert [record["round"] for record in job.run.history] == [1, 2, 3, 4]
    for one in workers:
        one.come_back()
    path, step = tmp_path / "stopped.pt", job.replica_set.step
    checkpoint.write(path, fetch_between_runs(job.replica_set, cluster, 20), step, job.where(step), run_spec)

    undisturbed = make_cluster()
    start(undisturbed, [None, None])
    whole = job_for(undisturbed, run_spec, plan_for(loader(101, 16), 3, sync_every=3))
    whole.start()
    finish(whole.run)
    plan = plan_for(loader(101, 16), 3, sync_every=3)
    again = job_for(cluster, run_spec, plan, "run-2")
    from_checkpoint(again.replica_set, plan, path, checkpoint.read(path))
    again = type(again)(again.replica_set, plan, cluster, job.run.model)
    again.start()
    finish(again.run)
    assert [losses_of(one) for one in (job.run, again.run)] == [losses_of(whole.run)[:4], losses_of(whole.run)[4:]]
    assert difference(again.replica_set.master.model, whole.replica_set.master.model) == 0.0
    undisturbed.close()


@pytest.mark.parametrize(("workers", "run_spec"), [(1, ADAM), (2, STATELESS)])
def test_a_checkpoint_between_rounds_goes_on_exactly(
    cluster: Cluster, tmp_path: Path, workers: int, run_spec: Any
) -> None:
    path, holder = tmp_path / "between.pt", list[Any]()

    class Save:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["round"] == 4:  # in the second epoch
                holder[0].with_state(lambda: holder[0].save(path))

    run_spec = replace(run_spec, lockstep=True)
    start(cluster, [None] * workers)
    job = job_for(cluster, run_spec, plan_for(loader(101, 16), sync_every=3, callbacks=[Save()]))
    holder.append(job)
    job.start()
    finish(job.run)
    content = checkpoint.read(path)
    assert content["step"] + 1 == 10 and content["outer"]["steps"] == 10
    plan = plan_for(loader(101, 16), sync_every=3)
    again = job_for(cluster, run_spec, plan, "run-2")
    from_checkpoint(again.replica_set, plan, path, content)
    again = type(again)(again.replica_set, plan, cluster, job.run.model)
    again.start()
    finish(again.run)
    assert [record["step"] for record in again.run.history] == [record["step"] for record in job.run.history[4:]]
    assert losses_of(again.run) == pytest.approx(losses_of(job.run)[4:], abs=1e-12)
    assert again.run.status().steps_before == 10
    assert difference(again.replica_set.master.model, job.replica_set.master.model) <= 1e-9


@pytest.mark.parametrize("kind", [GradientBucket, ShardReport])
def test_one_of_two_workers_lost_in_a_sparse_round_after_the_others_messages(
    cluster: Cluster, kind: type[Message]
) -> None:
    """The survivor computes its shard as well, and its own message of the round is still here when the sum comes."""
    hook = once_after(2, kind, lambda worker: worker.die())
    start(cluster, [None, hook])
    job = job_for(cluster, spec(rounds=SPARSE, hash_every_steps=1), plan_for(loader(101, 16), 1, sync_every=2))
    job.start()
    run = finish(job.run)
    assert hook.fired and len(run.history) == 4
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
