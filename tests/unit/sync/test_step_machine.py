"""The step machine under every order of events that hypothesis finds, losses included."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.config.mesh import Mesh
from guava_nb.protocol.messages import ShardReport
from guava_nb.sync.step_machine import Add, Decided, Halt, Reissue, SendBucket, ShardTask, StepMachine


def ready(shard: int, loss: float = 1.0, count: float = 4.0, finite: bool = True, generation: int = 0) -> ShardReport:
    return ShardReport(
        run_id="run",
        generation=generation,
        step=0,
        shard=shard,
        loss_sum=loss,
        count=count,
        finite=finite,
        rows=4,
        forward_s=0.0,
        backward_s=0.0,
        wait_s=0.0,
    )


def machine(num_shards: int, buckets: tuple[int, ...] = (0, 1, -1), **options: object) -> StepMachine:
    return StepMachine(0, 0, [ShardTask(k, 4, k) for k in range(num_shards)], buckets, **options)  # type: ignore[arg-type]


def test_two_workers_in_step_send_each_bucket_once_and_commit_last() -> None:
    m = machine(2)
    out = []
    for bucket in (0, 1, -1):
        for shard in (1, 0):
            out += m.on_bucket(shard, 0, shard, bucket, True)
    out += m.on_ready(0, ready(0))
    out += m.on_ready(1, ready(1, loss=3.0))
    sends = [i for i in out if isinstance(i, SendBucket)]
    assert [s.bucket for s in sends] == [0, 1, -1]
    assert [s.commit is None for s in sends] == [True, True, False]
    decided = [i for i in out if isinstance(i, Decided)]
    assert len(decided) == 1 and decided[0].loss_sum == 4.0 and decided[0].count == 8.0
    assert decided[0].commit.scale == 1.0


def test_scale_carries_the_true_denominator() -> None:
    m = machine(2, buckets=(0,))
    for shard in (0, 1):
        m.on_bucket(shard, 0, shard, 0, True)
    m.on_ready(0, ready(0, count=1.0))
    (send, decided) = m.on_ready(1, ready(1, count=3.0))
    assert isinstance(decided, Decided) and decided.commit.scale == 8 / 4
    assert isinstance(send, SendBucket) and send.commit == decided.commit


def test_a_batch_whose_targets_are_all_ignored_changes_nothing() -> None:
    m = machine(1, buckets=(0,))
    m.on_bucket(0, 0, 0, 0, True)
    decided = m.on_ready(0, ready(0, loss=0.0, count=0.0))[-1]
    assert isinstance(decided, Decided) and decided.commit.scale == 0.0


def test_not_finite_halts_and_names_the_worker_unless_a_scaler_can_skip() -> None:
    assert machine(2).on_bucket(1, 0, 1, 0, False) == [Halt(1, 1, 0)]
    assert machine(2).on_ready(1, ready(1, finite=False)) == [Halt(1, 1, None)]
    m = machine(1, buckets=(0,), scaled=True)
    assert m.on_bucket(0, 0, 0, 0, False) == [Add(0, 0)]
    decided = m.on_ready(0, ready(0))[-1]
    assert isinstance(decided, Decided) and decided.commit.skip


def test_frames_of_an_older_generation_and_unknown_numbers_are_dropped() -> None:
    m = StepMachine(0, 5, [ShardTask(0, 4, 0)], (0,))
    assert m.on_bucket(0, 4, 0, 0, True) == []
    assert m.on_ready(0, ready(0, generation=4)) == []
    assert m.on_bucket(0, 5, 7, 0, True) == [] and m.on_bucket(0, 5, 0, 9, True) == []
    assert m.on_ready(0, ready(3, generation=5)) == []


def test_a_report_on_a_shard_counts_only_of_a_worker_that_was_sent_it() -> None:
    m = machine(2, buckets=(0,))
    for rank, shard, generation in [(1, 0, 0), (0, -1, 0), (0, 2, 0), (0, 0, 1), (0, 0, 10**9)]:
        assert not m.was_asked(rank, shard, generation)
        assert m.on_bucket(rank, generation, shard, 0, False) == []
        assert m.on_ready(rank, ready(shard, finite=False, generation=generation)) == []
    assert m.on_away(0, [1]) == [Reissue(0, 1)]
    assert m.on_bucket(0, 0, 0, 0, True) == [Add(0, 0)], "it was sent the shard before"
    assert m.on_bucket(1, 0, 0, 0, True) == []


def test_a_lost_owner_s_open_shards_go_to_those_with_least_to_do() -> None:
    m = StepMachine(0, 0, [ShardTask(0, 8, 0), ShardTask(1, 2, 1), ShardTask(2, 4, 2)], (0,))
    assert m.on_away(2, [0, 1]) == [Reissue(2, 1)]
    assert m.on_away(1, [0]) == [Reissue(1, 0), Reissue(2, 0)]
    assert {task.owner for task in m.tasks if m.owed_by(task.owner)} == {0}


def test_a_finished_shard_is_not_issued_again() -> None:
    m = machine(2, buckets=(0,))
    m.on_bucket(1, 0, 1, 0, True)
    m.on_ready(1, ready(1))
    assert m.on_away(1, [0]) == []


def test_solo_commits_when_the_worker_says_so() -> None:
    m = StepMachine(0, 0, [ShardTask(0, 4, 0)], (), solo=True)
    assert m.on_solo_commit(0, 0, False) == []  # nothing was reported yet
    assert m.on_ready(0, ready(0)) == []
    (decided,) = m.on_solo_commit(0, 0, False)
    assert isinstance(decided, Decided)
    assert m.on_solo_commit(0, 0, False) == []


@settings(max_examples=200, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    num_buckets=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    num_losses=st.integers(0, 3),
    duplicates=st.booleans(),
)
def test_any_order_with_losses_sums_each_shard_once_and_commits_once(
    num_workers: int, num_buckets: int, seed: int, num_losses: int, duplicates: bool
) -> None:
    rng = random.Random(seed)
    m = machine(num_workers, tuple(range(num_buckets)))
    alive = set(range(num_workers))
    pending = [(shard, shard, what) for shard in range(num_workers) for what in [*range(num_buckets), "ready"]]
    losses = rng.sample(sorted(alive), min(num_losses, num_workers - 1))
    added: list[tuple[int, int]] = []
    out: list[object] = []

    def note(instructions: list[object]) -> None:
        for i in instructions:
            out.append(i)
            if isinstance(i, Add):
                added.append((i.bucket, i.shard))
            if isinstance(i, Reissue):
                assert i.rank in alive
                pending.extend((i.rank, i.shard, what) for what in [*range(num_buckets), "ready"])

    while pending or losses:
        if losses and (not pending or rng.random() < 0.2):
            lost = losses.pop()
            alive.discard(lost)
            pending = [p for p in pending if p[0] != lost]
            note(m.on_away(lost, alive))  # type: ignore[arg-type]
            continue
        rank, shard, what = pending.pop(rng.randrange(len(pending)))
        for _ in range(1 + duplicates):
            if what == "ready":
                note(m.on_ready(rank, ready(shard)))  # type: ignore[arg-type]
            else:
                note(m.on_bucket(rank, 0, shard, what, True))  # type: ignore[arg-type]

    assert sorted(added) == sorted((b, s) for b in range(num_buckets) for s in range(num_workers))
    sends = [i for i in out if isinstance(i, SendBucket)]
    assert sorted(s.bucket for s in sends) == list(range(num_buckets))
    assert [s.commit is not None for s in sends] == [False] * (num_buckets - 1) + [True]
    assert sum(isinstance(i, Decided) for i in out) == 1 and m.decided


NAN = float("nan")


def test_a_count_that_is_not_finite_halts_the_step() -> None:
    """The step's scale would be NaN, and with it all weights."""
    for odd in (ready(0, count=NAN), ready(0, count=float("inf")), ready(0, loss=NAN)):
        assert machine(2).on_ready(0, odd) == [Halt(0, 0, None)]


def voted(mesh: Mesh, *reports: ShardReport) -> list[object]:
    """What a group's step comes to, whose last rank reports first."""
    m = machine(mesh.size, (), mesh=mesh)
    out: list[object] = []
    for report in reversed(reports):
        assert out == []
        out += m.on_ready(report.shard, report)
    return out


def test_a_group_halts_when_all_have_reported_and_names_the_rank_whose_own_loss_is_not_finite() -> None:
    reports = [ready(0, finite=False), ready(1, loss=NAN, finite=False), ready(2, finite=False)]
    assert voted(Mesh(3, 1, 1), *reports) == [Halt(1, 1, None)]


def test_gradients_that_were_summed_before_name_all_who_may_have_had_it_first() -> None:
    assert voted(Mesh(3, 1, 1), *(ready(k, finite=False) for k in range(3))) == [Halt(0, 0, None, (1, 2))]


def test_of_stages_the_last_one_with_it_had_it_first_in_the_backward() -> None:
    reports = [ready(0, finite=False), ready(1, finite=False), ready(2)]
    assert voted(Mesh(1, 3, 1), *reports) == [Halt(1, 1, None)]
    assert isinstance(voted(Mesh(1, 2, 1), ready(0), ready(1))[0], Decided)
