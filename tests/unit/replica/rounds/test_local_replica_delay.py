"""Steps of a round that are taken before the sum of the one before is here: they change no number and no committed state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from guava_nb.data.split import share_ranges
from guava_nb.protocol.messages import Commit, Factory, RoundSpec
from guava_nb.replica.buckets import BUFFERS
from guava_nb.replica.rounds.local_replica import LocalReplica, whole_replica
from guava_nb.replica.shard import ShardWork
from tests.support.star import Contribution, cloned, resolver, sum_shards
from tests.support.star import spec as star_spec
from tests.support.training import SmallNet, dataset

STEPS, BATCH = 4, 8
DELAYED = star_spec(
    optimizer=Factory("AdamW", {"lr": 0.01}), scheduler=Factory("StepLR", {"step_size": 2}), precision="fp64",
    rounds=RoundSpec("nesterov", 0.7, 0.9, sync_delay=2, mixing=0.3),
)  # fmt: skip


def made(spec: Any = DELAYED, **more: Any) -> LocalReplica:
    torch.manual_seed(3)
    built = whole_replica(spec, resolver(Net=lambda: SmallNet(norm=True, dropout=0.5), **more), torch.device("cpu"))
    assert isinstance(built, LocalReplica)
    return built


def work(step: int, shard: int = 0, steps: int = STEPS, generation: int = 0) -> ShardWork:
    """One of two workers' pieces of each batch of a round."""
    x, y = dataset(STEPS * BATCH * 4).tensors
    first, last = share_ranges(BATCH, [1.0, 1.0])[shard]
    begin = STEPS * BATCH * step
    places = [(begin + k * BATCH + first, begin + k * BATCH + last) for k in range(steps)]
    parts, rows = [(x[a:b], y[a:b]) for a, b in places], last - first
    return ShardWork(
        step, shard, parts, rows * steps, steps * BATCH, [rows] * steps, part_steps=range(steps), num_steps=steps,
        generation=generation,
    )  # fmt: skip


def alike(one: Any, other: Any) -> bool:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return True


def done(replica: LocalReplica, asked: ShardWork) -> Contribution:
    handed = Contribution(asked.rows)
    replica.run_shard(asked, handed)
    return handed


def commit(replicas: list[LocalReplica], handed: list[Contribution]) -> None:
    total = sum_shards(handed)
    for one in replicas:
        one.apply(cloned(total), Commit(1.0, False, steps=STEPS))


@pytest.fixture
def pair() -> tuple[LocalReplica, LocalReplica, list[Contribution]]:
    """Two like workers in the midst of their first round, with their shards."""
    one, other = made(), made()
    return one, other, [done(one, work(0)), done(other, work(0, 1))]


def test_a_round_that_was_begun_early_comes_to_the_same_bits_and_the_state_in_between_is_the_committed_one() -> None:
    early, late, peers = made(), made(), [made(), made()]
    for step in range(3):
        for one, peer in ((early, peers[0]), (late, peers[1])):
            handed = [done(one, work(step)), done(peer, work(step, 1))]
            if one is early and step < 2:
                before = one.state()
                assert one.can_begin_early and one.begin_early(work(step + 1)) > 0
                assert not one.can_begin_early and alike(one.state(), before)
            commit([one, peer], handed)
        assert alike(early.state(), late.state()) and early.parameter_hash() == peers[0].parameter_hash()
    state = early.state()
    assert state["outer"]["steps"] == 12 and int(state["model"]["norm.num_batches_tracked"]) == 12


def test_a_lost_workers_shard_after_an_early_begin_starts_where_the_round_did(pair: Any) -> None:
    early, other, handed = pair
    commit([early, other], handed)
    late = made()
    late.load_state(early.state())
    late._away = early._away  # nothing but its own weights tells a worker from one that loads its state
    own = [done(one, work(1)) for one in (early, late)]
    early.begin_early(work(2))
    others = [done(one, work(1, 1)) for one in (early, late)]
    assert alike(*[{k: v for k, (_, v) in one.buckets.items()} for one in others])
    for one, two in ((early, [own[0], others[0]]), (late, [own[1], others[1]])):
        commit([one], two)
    assert alike(*[{k: v for k, (_, v) in done(one, work(2)).buckets.items() if k != BUFFERS} for one in (early, late)])


@pytest.mark.parametrize("what", ["generation", "shard", "restored", "another state"])
def test_steps_of_another_attempt_are_not_gone_on_with(pair: Any, what: str) -> None:
    replica, other, handed = pair
    replica.begin_early(work(1))
    if what == "restored":
        replica.restore()
        handed = [done(replica, work(0)), handed[1]]
    commit([replica, other], handed)
    if what == "another state":
        replica.load_state(other.state())
    asked = work(1, int(what == "shard"), generation=int(what == "generation"))
    fresh = made()
    fresh.load_state(replica.state())
    fresh._away = replica._away
    assert alike(*[{k: v for k, (_, v) in done(one, asked).buckets.items()} for one in (replica, fresh)])
    assert not replica.can_begin_early or replica._early is None


def test_an_error_in_an_early_step_leaves_the_open_round(pair: Any) -> None:
    replica, other, handed = pair
    bad = work(1)
    bad.parts[1][1][0] = 99  # no such class
    before = replica.state()
    with pytest.raises((IndexError, RuntimeError)):
        replica.begin_early(bad)
    assert alike(replica.state(), before)
    commit([replica, other], handed)
    assert replica.steps == STEPS and replica.parameter_hash() == other.parameter_hash()
    with pytest.raises((IndexError, RuntimeError)):  # it is told in its turn
        done(replica, bad)


def test_nothing_is_begun_early_without_a_delay_alone_or_without_an_open_round() -> None:
    at_once = made(replace(DELAYED, rounds=RoundSpec("average", 1.0, 0.0)))
    done(at_once, work(0))
    alone = made()
    alone.run_shard(work(0))
    assert not any(one.can_begin_early for one in (at_once, alone, made()))


def test_a_worker_that_got_the_state_or_had_no_samples_begins_with_the_common_weights(pair: Any) -> None:
    one, idle, handed = pair
    idle.restore()
    commit([one, idle], handed)
    got = made()
    got.load_state(one.state())
    plain = made(replace(DELAYED, rounds=RoundSpec("nesterov", 0.7, 0.9)))
    plain.load_state(one.state())
    assert one._away is not None and idle._away is None
    assert alike(*[{k: v for k, (_, v) in done(each, work(1)).buckets.items()} for each in (got, plain)])


def test_a_short_round_mixes_before_its_last_step(pair: Any) -> None:
    one, other, handed = pair
    commit([one, other], handed)
    handed = [done(one, work(1, steps=1)), done(other, work(1, 1, steps=1))]
    assert one.begin_early(work(2, steps=1)) == 0.0  # of one step none comes before
    commit([one, other], handed)
    assert one.parameter_hash() == other.parameter_hash()
