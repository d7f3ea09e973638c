"""A round at one replica: until its commit everything stands as at its start, however often it is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from guava_nb.data.split import share_ranges
from guava_nb.errors import LocalProtocolError, TrainingError
from guava_nb.protocol.messages import BatchShard, Commit, Factory, GradientBucket, RoundSpec, RunSpec
from guava_nb.replica.gradient_buckets import bucket_sender
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.local_replica import LocalReplica, whole_replica
from guava_nb.replica.shard import ShardWork
from tests.support.star import Contribution, cloned, resolver, sum_shards
from tests.support.star import spec as star_spec
from tests.support.training import SmallNet, dataset

CPU = torch.device("cpu")
SPEC = star_spec(
    optimizer=Factory("AdamW", {"lr": 0.01}), scheduler=Factory("StepLR", {"step_size": 2}), precision="fp64",
    rounds=RoundSpec("nesterov", 0.7, 0.9),
)  # fmt: skip


def made(spec: RunSpec = SPEC, norm: bool = True, **names: Any) -> LocalReplica:
    torch.manual_seed(3)
    built = whole_replica(spec, resolver(Net=lambda: SmallNet(norm=norm), **names), CPU)
    assert isinstance(built, LocalReplica)
    return built


def work(shard: int = 0, workers: int = 1, steps: int = 3, batch: int = 8) -> ShardWork:
    """A piece of each of so many batches."""
    x, y = dataset(steps * batch).tensors
    first, last = share_ranges(batch, [1.0] * workers)[shard]
    places = [(k * batch + first, k * batch + last) for k in range(steps)]
    parts, rows = [(x[a:b], y[a:b]) for a, b in places], last - first
    return ShardWork(
        0, shard, parts, rows * steps, steps * batch, [rows] * steps, part_steps=range(steps), num_steps=steps
    )


def alike(one: Any, other: Any) -> bool:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return True


def test_a_record_without_rounds_gives_a_replica_that_steps_by_gradients() -> None:
    built = whole_replica(replace(SPEC, rounds=None), resolver(Net=SmallNet), CPU)
    assert type(built) is Replica


def test_until_the_commit_all_is_as_at_the_start_and_a_restored_round_comes_to_the_same() -> None:
    replica = made()
    start = replica.state()
    kept = Contribution(24)
    first = replica.run_shard(work(), kept)
    assert alike(replica.state(), start)
    replica.restore()
    again = Contribution(24)
    second = replica.run_shard(work(), again)
    assert first.loss_sum == second.loss_sum
    assert alike({k: v for k, (_, v) in kept.buckets.items()}, {k: v for k, (_, v) in again.buckets.items()})
    replica.apply(again.buckets, Commit(1.0, False, steps=3))
    state = replica.state()
    assert replica.steps == state["outer"]["steps"] == 3 and state["scheduler"]["last_epoch"] == 3
    assert float(state["optimizer"]["state"][0]["step"]) == 3.0 and int(state["model"]["norm.num_batches_tracked"]) == 3


def test_a_lone_worker_takes_its_own_round_as_that_of_a_hub() -> None:
    lone, shared, handed = made(), made(), Contribution(24)
    lone.run_shard(work())
    lone.apply(None, Commit(1.0, False, steps=3))
    shared.run_shard(work(), handed)
    shared.apply(handed.buckets, Commit(1.0, False, steps=3))
    assert alike(lone.state(), shared.state())


def test_a_longer_outer_step_of_partial_averaging_is_taken_with_others_only() -> None:
    lone, plain, shared, handed = (
        *(made(replace(SPEC, rounds=RoundSpec("partial", rate, 0.0))) for rate in (1.4, 1.0, 1.4)),
        Contribution(24),
    )
    start = torch.nn.utils.parameters_to_vector(lone.model.parameters()).detach().clone()
    for one in (lone, plain):
        one.run_shard(work())
        one.apply(None, Commit(1.0, False, steps=3))
    shared.run_shard(work(), handed)
    shared.apply(handed.buckets, Commit(1.0, False, steps=3))
    assert alike(lone.state()["model"], plain.state()["model"])
    ways = [torch.nn.utils.parameters_to_vector(one.model.parameters()).detach() - start for one in (plain, shared)]
    torch.testing.assert_close(ways[1], 1.4 * ways[0])


def test_a_worker_that_does_two_shards_keeps_the_optimizer_of_the_first_and_one_that_does_none_its_own() -> None:
    both, first, idle = made(), made(), made()
    handed = [Contribution(12), Contribution(12)]
    for shard in range(2):
        both.run_shard(work(shard, 2), handed[shard])
    first.run_shard(work(0, 2), Contribution(12))
    total = sum_shards(handed)
    for one in (both, first, idle):
        one.apply(cloned(total), Commit(1.0, False, steps=3))
    assert alike(both.state(), first.state())
    assert both.parameter_hash() == idle.parameter_hash() and alike(both.state()["outer"], idle.state()["outer"])
    assert idle.state()["scheduler"]["last_epoch"] == 3 and not idle.state()["optimizer"]["state"]


def test_a_skipped_round_leaves_nothing_and_one_without_sums_is_refused() -> None:
    replica = made()
    start = replica.state()
    replica.run_shard(work())
    replica.apply(None, Commit(1.0, True, steps=3))
    assert alike(replica.state(), start)
    with pytest.raises(LocalProtocolError, match="nothing came"):
        replica.apply(None, Commit(1.0, False, steps=3))


@pytest.mark.parametrize("step", [0, 2])
def test_a_round_with_nan_hands_nothing_over_and_says_so(step: int) -> None:
    replica, asked, handed = made(norm=False), work(), Contribution(24)
    asked.parts[step][0][0, 0] = float("nan")
    start = replica.state()
    result = replica.run_shard(asked, handed)
    assert not result.finite and not handed.buckets and alike(replica.state(), start)
    assert not replica.run_shard(asked).finite


def test_weights_that_overflow_in_the_last_step_are_named() -> None:
    replica = made(replace(SPEC, optimizer=Factory("SGD", {"lr": float("inf")}), scheduler=None), norm=False)
    result = replica.run_shard(work(steps=1))
    assert not result.finite and result.nonfinite in dict(replica.model.named_parameters())


def test_an_error_in_the_midst_of_a_round_leaves_its_start() -> None:
    replica, asked = made(), work()
    start = replica.state()
    asked.parts[2][1][0] = 99  # no such class
    with pytest.raises((IndexError, RuntimeError)):
        replica.run_shard(asked)
    assert alike(replica.state(), start)


class Locked(torch.optim.SGD):
    """Keeps what cannot be copied."""

    def __init__(self, parameters: Any) -> None:
        import threading

        super().__init__(parameters, lr=0.1)
        self.lock = threading.Lock()


def test_an_optimizer_that_cannot_be_copied_is_told() -> None:
    replica = made(replace(SPEC, optimizer=Factory("Locked"), scheduler=None), Locked=Locked)
    with pytest.raises(TrainingError, match="Locked keeps what cannot be copied"):
        replica.run_shard(work())


def test_a_lone_round_takes_in_what_earlier_messages_left_out_and_an_undone_one_leaves_it_owed() -> None:
    sparse = made(
        replace(SPEC, rounds=RoundSpec("sparse", 1.0, 0.0), optimizer=Factory("SGD", {"lr": 0.1})), norm=False
    )
    asked = BatchShard(run_id="r", generation=0, step=0, shard=0, rows=24, global_rows=24, batch=None)  # type: ignore[arg-type]
    came: list[tuple[GradientBucket, memoryview]] = []
    sender = bucket_sender(lambda head, buffers: came.append((head, buffers[0])), asked, sparse.wire)  # type: ignore[arg-type]
    result = sparse.run_shard(work(), sender)
    sums = {
        head.bucket: (head.present, sparse.wire.decode(head.bucket, head.tensor, payload)) for head, payload in came
    }
    sparse.apply(sums, Commit(1.0, False, steps=3))
    owed, start = sparse.wire.owed_norm(), torch.nn.utils.parameters_to_vector(sparse.model.parameters()).detach()
    assert owed > 0 and result.owed and 0.5 < result.owed < 1.0  # of four elements of 244, and nothing before
    exact = made(
        replace(SPEC, rounds=RoundSpec("average", 1.0, 0.0), optimizer=Factory("SGD", {"lr": 0.1})), norm=False
    )
    exact.load_state(sparse.state())
    for attempt in range(2):
        sparse.run_shard(work())
        if not attempt:
            sparse.restore()
            assert sparse.wire.owed_norm() == owed
    exact.run_shard(work())
    sparse.apply(None, Commit(1.0, False, steps=3))
    exact.apply(None, Commit(1.0, False, steps=3))
    ways = [start - torch.nn.utils.parameters_to_vector(one.model.parameters()).detach() for one in (sparse, exact)]
    assert float((ways[0] - ways[1]).norm()) == pytest.approx(0.95 * owed, rel=1e-9)
    assert sparse.wire.owed_norm() == 0.0


def test_the_outer_rates_of_a_state_are_those_of_the_run_that_loads_it() -> None:
    replica = made()
    replica.run_shard(work())
    replica.apply(None, Commit(1.0, False, steps=3))
    other = made(replace(SPEC, rounds=RoundSpec("nesterov", 0.3, 0.5)))
    other.load_state(replica.state())
    assert other._method.learning_rate == 0.3 and other.steps == 3
    assert alike(other.state()["outer"], replica.state()["outer"])
