"""Gradients in a short wire format: near to plain PyTorch, equal on all replicas, no sample lost; without a network."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import NotFinite
from guava_nb.protocol.messages import (
    BatchShard,
    GradientBucket,
    Message,
    ParameterBucket,
    RunSpec,
    ShardReport,
    StepApplied,
    SumBucket,
)
from guava_nb.protocol.tensor_bounds import ITEM_BYTES
from guava_nb.replica.gradient_buckets import bucket_sender
from guava_nb.replica.shard import ShardWork
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster, once_after
from tests.support.training import dataset, difference, job_for, loader, losses_of, plain, plan_for, replica, spec

LOSSY = ("bf16", "fp16", "int8", "int4")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def wired(wire: str, **changes: Any) -> RunSpec:
    """Float32; all workers report a hash of their parameters after every step."""
    return spec(**{"precision": "fp32", "wire": wire, "hash_every_steps": 1, **changes})


def data() -> Any:
    return loader(dtype=torch.float32)


def train(
    cluster: Cluster, run_spec: RunSpec, hooks: Sequence[Any], epochs: int = 6, are_equal: bool = True, **changes: Any
) -> Run:
    hashes: dict[int, set[str]] = {}

    def noting(own: Any) -> Any:
        def hook(worker: DirectWorker, message: Message) -> None:
            if isinstance(message, StepApplied) and message.parameter_hash:
                hashes.setdefault(message.step, set()).add(message.parameter_hash)
            if own is not None:
                own(worker, message)

        return hook

    for number, hook in enumerate(hooks):
        DirectWorker(cluster, f"w{number}", noting(hook)).start()
    cluster.wait_for(len(hooks), 10)
    job = job_for(cluster, run_spec, plan_for(data(), epochs, **changes))
    job.start()
    assert job.run.wait(60), job.run
    job.run.result()
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    # A lone worker reports none: there is nothing to compare it with.
    assert hashes and are_equal == all(len(found) == 1 for found in hashes.values())
    return job.run


def last_loss(losses: Sequence[float]) -> float:
    """The mean of the last epoch of four steps."""
    return sum(losses[-4:]) / 4


def assert_near(run: Run, part: float = 0.01, epochs: int = 6) -> None:
    _, losses = plain(wired("fp32"), data(), epochs)
    assert last_loss(losses_of(run)) == pytest.approx(last_loss(losses), rel=part)


@pytest.mark.parametrize("wire", LOSSY)
def test_the_loss_ends_where_that_of_plain_pytorch_does(cluster: Cluster, wire: str) -> None:
    run = train(cluster, wired(wire), [None] * 3)
    assert_near(run, 0.02 if wire == "int4" else 0.01)
    model, _ = plain(wired("fp32"), data(), 6)
    assert difference(run.model(), model) > 0  # it was encoded


def test_a_replica_that_reads_other_sums_is_found(cluster: Cluster) -> None:
    """So all other tests here prove that replicas are equal after every step."""

    def hook(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, StepApplied) and message.step == 1:
            wire = worker.loop._steps._run.replica.wire  # type: ignore[union-attr]
            decode = wire.decode_sum
            wire.decode_sum = lambda *given: decode(*given).mul_(1.01)  # type: ignore[method-assign]

    train(cluster, wired("int8"), [None, hook], are_equal=False)


def test_parameters_that_come_from_the_orchestrator_are_exact_and_their_gradients_are_not(cluster: Cluster) -> None:
    assert_near(train(cluster, wired("int8", optimizer_site="orchestrator"), [None] * 2))


@pytest.mark.parametrize("workers, wire", [(1, "int8"), (2, "fp32")])
def test_what_loses_nothing_equals_plain_pytorch(cluster: Cluster, workers: int, wire: str) -> None:
    """A lone worker's gradients do not travel."""
    run_spec = spec(wire=wire)
    job = job_for(cluster, run_spec, plan_for(loader(), 2))
    for number in range(workers):
        DirectWorker(cluster, f"w{number}").start()
    cluster.wait_for(workers, 10)
    job.start()
    assert job.run.wait(60)
    assert difference(job.run.result().model(), plain(spec(), loader())[0]) <= 1e-9


class Counter:
    """Bytes of gradients up and of their sums down, as payloads."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.up = self.down = 0
        self._send_all = cluster.send_all
        monkeypatch.setattr(cluster, "send_all", self.sent)

    def __call__(self, worker: DirectWorker, message: Message) -> None:
        if isinstance(message, GradientBucket):
            self.up += message.tensor.numel * ITEM_BYTES[message.tensor.dtype]

    def sent(self, ranks: Any, message: Message, buffers: Any = ()) -> None:
        if isinstance(message, SumBucket | ParameterBucket):
            self.down += len(ranks) * sum(buffer.nbytes for buffer in buffers)
        self._send_all(ranks, message, buffers)


def test_bf16_halves_the_bytes_of_gradients_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {}
    for wire in ("fp32", "bf16", "int8"):
        cluster = make_cluster()
        counter = Counter(cluster, monkeypatch)
        train(cluster, wired(wire), [counter, counter], 1)
        counted[wire] = counter.up, counter.down
        cluster.close()
    elements = sum(p.numel() for p in replica(wired("fp32")).model.parameters())
    assert counted["fp32"] == (4 * elements * 2 * 4, 4 * elements * 2 * 4)  # four steps, two workers
    assert counted["bf16"] == (counted["fp32"][0] // 2, counted["fp32"][1] // 2)
    assert 0.25 < counted["int8"][0] / counted["fp32"][0] == counted["int8"][1] / counted["fp32"][1] < 0.27


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("kind", [GradientBucket, ShardReport, StepApplied])
def test_a_worker_killed_in_mid_step_costs_no_sample(cluster: Cluster, kind: type[Message]) -> None:
    hook = once_after(4, kind, lambda worker: worker.die())
    assert_near(train(cluster, wired("int8"), [None, hook, None]))
    assert hook.fired  # type: ignore[attr-defined]


def test_a_worker_whose_shard_another_did_meanwhile_stays_like_it(cluster: Cluster) -> None:
    def cut(worker: DirectWorker) -> None:
        worker.go_away()
        threading.Timer(0.1, worker.come_back).start()

    hook = once_after(3, GradientBucket, cut)
    assert_near(train(cluster, wired("int8"), [None, hook]))
    assert hook.fired  # type: ignore[attr-defined]


def test_a_newcomer_is_like_the_others_from_its_first_step(cluster: Cluster) -> None:
    late: list[DirectWorker] = []

    class Join:
        def on_step(self, run: Run, record: dict[str, Any]) -> None:
            if record["step"] == 3:
                late.append(DirectWorker(cluster, "late").start())
                cluster.wait_for(3, 10)

    assert_near(train(cluster, wired("int8"), [None, None], callbacks=[Join()]))
    assert cluster.roster.members[2].samples > 0


@pytest.mark.parametrize("wire", LOSSY)
def test_nan_still_stops_the_run_and_names_parameter_and_samples(cluster: Cluster, wire: str) -> None:
    from tests.support.training import SmallNet

    def poison(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * torch.nan)

    def hook(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, StepApplied) and message.step == 1:
            model = worker.loop._steps._run.replica.model  # type: ignore[union-attr]
            assert isinstance(model, SmallNet)
            model.first.register_forward_hook(poison)

    with pytest.raises(NotFinite, match=r"gradient of first\.(weight|bias) on w1 at step 3"):
        train(cluster, wired(wire), [None, hook])


# ----------------------------------------------------------------------------------------------------------- residuals


def sent_by(one: Any, step: int) -> list[bytes]:
    x, y = dataset(8, torch.float32).tensors
    payloads: list[bytes] = []
    message = BatchShard(run_id="r", generation=0, step=step, shard=0, rows=8, global_rows=8, batch=None)  # type: ignore[arg-type]
    sender = bucket_sender(lambda head, buffers: payloads.append(bytes(buffers[0])), message, one.wire)
    one.run_shard(ShardWork(step, 0, [(x, y)], 8, 8), sender)
    return payloads


def test_an_aborted_step_leaves_the_residuals_of_the_one_before_it() -> None:
    one = replica(wired("int4"))
    first = sent_by(one, 0)
    one.restore()
    assert sent_by(one, 0) == first
    one.wire.commit()
    second = sent_by(one, 0)
    assert second != first  # what the first left out came with it
    one.restore()
    assert sent_by(one, 0) == second
    one.load_state(one.state())
    assert sent_by(one, 0) == first  # another lineage begins without


def test_a_run_tells_what_becomes_of_residuals_and_a_resumed_one_repeats_exactly(tmp_path: Any) -> None:
    from tests.parity.test_forecast import Session

    cluster, told = make_cluster(), list[str]()
    cluster.notice = told.append  # type: ignore[method-assign, assignment]
    session = Session(cluster, 2)
    plan, saved = plan_for(data(), 2, save_every_steps=6, save_folder=tmp_path), tmp_path / "run-1-step-6.pt"
    session.train(wired("int8"), plan, tmp_path)
    models = [session.train(wired("int8"), plan_for(data(), 1), tmp_path, begin=saved).model() for _ in range(2)]
    cluster.close()
    assert difference(*models) == 0
    assert "travel as int8" in told[0] and "takes its rest with it" in told[0]
