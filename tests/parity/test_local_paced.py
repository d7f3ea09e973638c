"""Rounds in which a faster worker takes more local steps: equal to a loop by hand, and even in time by their reports."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.roster import Member
from guava_nb.data.split import share_ranges
from guava_nb.protocol.messages import Factory, RoundSpec, RunSpec, ShardReport
from guava_nb.sync.exchange import StepExchange
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import difference, job_for, loader, losses_of, plain, plan_for, replica, spec

STEP_LR = Factory("StepLR", {"step_size": 3, "gamma": 0.5})


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


def train(cluster: Cluster, sample_s: list[float] | None, run_spec: RunSpec, data: Any, **changes: Any) -> Run:
    """Train with measured shares; `sample_s`: the workers' pace at the start, None: not known."""
    workers = [DirectWorker(cluster, f"w{k}").start() for k in range(len(sample_s or (0, 0)))]
    cluster.wait_for(len(workers), 10)
    for rank, seconds in enumerate(sample_s or ()):
        cluster.roster.members[rank].sample_s = seconds
    job = job_for(cluster, run_spec, plan_for(data, shares="measured", **changes))
    job.start()
    assert job.run.wait(60), job.run
    job.run.result()
    assert [worker.error for worker in workers] == [None] * len(workers)
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    return job.run


def by_hand(
    run_spec: RunSpec, data: Any, owners: list[list[int]], accumulate: int = 1, epochs: int = 2
) -> tuple[torch.nn.Module, list[float]]:
    """Local SGD as one would write it: `owners` says for each step of a round whose its local batches are."""
    model, workers, every = replica(run_spec).model, len(owners[0]), len(owners)
    locals_ = [copy.deepcopy(model) for _ in range(workers)]
    inner = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in locals_]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in inner]
    criterion, losses = torch.nn.CrossEntropyLoss(reduction="sum"), []
    for _ in range(epochs):
        batches = list(data)
        for start in range(0, len(batches), every * accumulate):
            mine = batches[start : start + every * accumulate]
            seen, total = [0] * workers, 0.0
            for step in range(every):
                group = mine[step * accumulate : (step + 1) * accumulate]
                for place, k in enumerate(owners[step]):
                    parts = []
                    for x, y in group:
                        first, last = share_ranges(len(x), [1.0] * workers)[place]
                        parts += [(x[first:last], y[first:last])] if last > first else []
                    count = sum(len(y) for _, y in parts)
                    if count:
                        inner[k].zero_grad()
                        loss = sum(criterion(locals_[k](x), y) for x, y in parts)
                        (loss / count).backward()
                        inner[k].step()
                        seen[k], total = seen[k] + count, total + float(loss.detach())
                for one in schedules:
                    one.step()
            losses.append(total / sum(seen))
            with torch.no_grad():
                for name, value in model.named_parameters():
                    each = [dict(one.named_parameters())[name] for one in locals_]
                    value.copy_(sum(w * n for w, n in zip(each, seen, strict=True)) / sum(seen))
                for one in locals_:
                    for (_, own), (_, common) in zip(one.named_parameters(), model.named_parameters(), strict=True):
                        own.copy_(common)
    return model, losses


OWNERS = {
    (1.0, 3.0): [[0, 0], [1, 0], [0, 0], [1, 0]],  # six local batches against two
    (1.0, 1.0): [[0, 1]] * 4,
    (2.0, 1.0, 2.0): [[1, 0, 2], [1, 1, 0], [2, 1, 1], [0, 2, 1]],  # six against three and three
}


@pytest.mark.parametrize("sample_s", list(OWNERS))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_uneven_rounds_equal_a_loop_by_hand(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, sample_s: tuple[float, ...], accumulate: int
) -> None:
    monkeypatch.setattr(Member, "note_pace", lambda self, samples, seconds: None)  # the pace stays what it is
    run_spec, rows = spec(scheduler=STEP_LR, rounds=RoundSpec("average", 1.0, 0.0, accumulate)), 8 * 12 * accumulate
    run = train(
        cluster, list(sample_s), run_spec, loader(rows, 12), sync_every=4, accumulation_steps=accumulate
    )  # two rounds of four steps an epoch
    model, losses = by_hand(run_spec, loader(rows, 12), OWNERS[sample_s], accumulate)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


def test_a_worker_of_a_third_of_the_pace_takes_a_third_of_the_local_steps(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reports say 1 and 3 seconds a sample, and all that follows is the run's own doing."""
    sound, local_steps = StepExchange._sound, list[Counter[int]]()

    def slower(self: Any, rank: int, message: ShardReport) -> ShardReport:
        message = sound(self, rank, message)
        return replace(message, forward_s=message.rows * (1.0, 3.0)[rank], backward_s=0.0)

    plan = StepExchange._send_shard

    def sent(self: Any, in_flight: Any, shard: int, rank: int) -> None:
        message, _ = in_flight.shards[shard]
        while len(local_steps) <= message.step:
            local_steps.append(Counter())
        local_steps[message.step][rank] += len(set(message.part_steps))
        plan(self, in_flight, shard, rank)

    monkeypatch.setattr(StepExchange, "_sound", slower)
    monkeypatch.setattr(StepExchange, "_send_shard", sent)
    run = train(cluster, None, spec(rounds=RoundSpec("average", 1.0, 0.0)), loader(8 * 16, 8), epochs=4, sync_every=8)
    assert len(local_steps) == len(run.history) == 8
    assert local_steps[0] == {0: 8, 1: 8}  # nothing is known yet
    assert [dict(one) for one in local_steps[-3:]] == [{0: 12, 1: 4}] * 3  # of 4 rows each: 48 s and 48 s
    assert sum(sum(one.values()) for one in local_steps) == 8 * 16


def test_a_lone_worker_with_measured_shares_trains_as_plain_pytorch(cluster: Cluster) -> None:
    run_spec = spec(rounds=RoundSpec("average", 1.0, 0.0))
    run = train(cluster, [1.0], run_spec, loader(101, 16), sync_every=3)
    model, losses = plain(run_spec, loader(101, 16))
    assert difference(run.model(), model) <= 1e-9 and run.status().step == len(losses)
