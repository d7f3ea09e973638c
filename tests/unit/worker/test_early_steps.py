"""When a round may begin before the sum of the one before is here, and what is noted of it; with the real step runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from guava_nb.data.codec import pack
from guava_nb.protocol.messages import (
    BatchShard,
    Commit,
    Failure,
    GradientBucket,
    RoundSpec,
    ShardReport,
    StepApplied,
    SumBucket,
)
from guava_nb.replica.rounds.local_replica import whole_replica
from guava_nb.replica.shard import ShardResult
from guava_nb.telemetry import BACKWARD, FORWARD, PhaseBook
from guava_nb.worker.early_steps import note_work
from guava_nb.worker.preparation import PreparedRun
from guava_nb.worker.steps import StepRunner
from tests.support.star import resolver, spec
from tests.support.training import SmallNet, dataset

STEPS, ROWS = 3, 4
DELAYED = spec(precision="fp64", rounds=RoundSpec("average", 1.0, 0.0, sync_delay=2))


class Runner:
    """A step runner fed by hand, and what it sent."""

    def __init__(self, run_spec: Any = DELAYED) -> None:
        self.sent: list[tuple[Any, list[torch.Tensor]]] = []
        self.runner = StepRunner(self._send, torch.device("cpu"), None, None, lambda: None, lambda *_: None)
        torch.manual_seed(3)
        self.replica = whole_replica(run_spec, resolver(Net=SmallNet), torch.device("cpu"))
        run = PreparedRun("r", run_spec, None, str, self.replica, None)  # type: ignore[arg-type]
        self.runner.begin(run, 0)
        self.loaded: list[int] = []

    def _send(self, message: Any, buffers: Any) -> None:
        self.sent.append((message, [torch.frombuffer(bytearray(b), dtype=torch.float64) for b in buffers]))

    def shard(self, step: int, *, solo: bool = False, generation: int = 0, bad: bool = False) -> None:
        x, y = dataset(100).tensors
        parts = [(x[at : at + ROWS], y[at : at + ROWS].clone()) for at in range(step * 8, step * 8 + STEPS)]
        if bad:
            parts[0][1][0] = 99  # no such class

        def load() -> Any:
            self.loaded.append(step)
            return parts

        rows = STEPS * ROWS
        message = BatchShard(
            run_id="r", generation=generation, step=step, shard=0, rows=rows, global_rows=rows if solo else 2 * rows,
            batch=pack(None)[0], solo=solo, part_rows=(ROWS,) * STEPS, part_steps=tuple(range(STEPS)), num_steps=STEPS,
        )  # fmt: skip
        self.runner.add(message, load)

    def turns(self) -> int:
        """Work as long as there is something to do; returns how many pieces that were."""
        count = 0
        while self.runner.has_work:
            assert self.runner.advance(leaving=False) is None
            count += 1
        return count

    def sum(self, step: int, generation: int = 0) -> None:
        """Twice what this worker sent, as if another one had come to the same."""
        mine = [(m, b[0]) for m, b in self.sent if isinstance(m, GradientBucket) and m.step == step]
        for number, (message, flat) in enumerate(mine):
            commit = Commit(1.0, False, steps=STEPS) if number == len(mine) - 1 else None
            answer = SumBucket(
                run_id="r", generation=generation, step=step, bucket=message.bucket, present=message.present,
                tensor=message.tensor, commit=commit,
            )  # fmt: skip
            self.runner.add_sum(answer, memoryview((flat * 2).numpy()).cast("B"))  # type: ignore[arg-type]

    def kinds(self, kind: type[Any]) -> list[Any]:
        return [message for message, _ in self.sent if isinstance(message, kind)]


def test_the_next_round_is_begun_while_the_sum_travels_and_its_batches_are_loaded_once() -> None:
    early, late = Runner(), Runner()
    early.shard(0)
    early.shard(1)
    assert early.turns() == 2  # the round, and the first steps of the next one
    assert not early.replica.can_begin_early and early.loaded == [0, 1]  # type: ignore[attr-defined]
    early.sum(0)
    assert early.turns() == 2 and early.loaded == [0, 1]
    late.shard(0)
    assert late.turns() == 1
    late.sum(0)
    late.shard(1)
    assert late.turns() == 2
    assert [m.step for m in early.kinds(ShardReport)] == [0, 1] == [m.step for m in late.kinds(ShardReport)]
    ways = [[b[0] for m, b in one.sent if isinstance(m, GradientBucket)] for one in (early, late)]
    torch.testing.assert_close(*ways, rtol=0, atol=0)
    assert [m.step for m in early.kinds(StepApplied)] == [0]


def test_what_was_noted_of_early_steps_is_not_noted_again() -> None:
    result, book = ShardResult(0.0, 1.0, 4, True, forward_s=2.0, backward_s=6.0, early_s=4.0), PhaseBook()
    note_work(book, result, 10.0)
    assert book.totals() == {FORWARD: (1.0, None), BACKWARD: (3.0, None)}
    book.clear()
    note_work(book, replace(result, early_s=0.0), 10.0)
    assert book.totals() == {FORWARD: (2.0, None), BACKWARD: (6.0, None)}
    book.clear()
    note_work(book, replace(result, forward_s=0.0, backward_s=0.0), 10.0)
    assert book.totals() == {}


def test_early_steps_are_in_the_report_and_their_phases_are_noted_before_the_sum_is_here() -> None:
    runner = Runner()
    book: PhaseBook = runner.runner._phases
    runner.shard(0)
    runner.turns()
    before = book.totals()
    runner.shard(1)
    runner.turns()
    assert all(book.totals()[name][0] > before[name][0] for name in (FORWARD, BACKWARD))
    early_s = runner.replica._early.seconds  # type: ignore[attr-defined]
    runner.sum(0)
    runner.turns()
    last = runner.kinds(ShardReport)[-1]
    assert last.forward_s + last.backward_s > early_s > 0


def test_a_sum_that_is_here_comes_first() -> None:
    runner = Runner()
    runner.shard(0)
    runner.shard(1)
    assert runner.runner.advance(leaving=False) is None
    runner.sum(0)
    runner.turns()
    assert [type(m) for m, _ in runner.sent if isinstance(m, ShardReport | StepApplied)] == [
        ShardReport,
        StepApplied,
        ShardReport,
    ]


@pytest.mark.parametrize("run_spec", [spec(precision="fp64", rounds=RoundSpec("average", 1.0, 0.0)), DELAYED])
def test_a_worker_alone_or_without_a_delay_begins_nothing_early(run_spec: Any) -> None:
    runner, alone = Runner(run_spec), run_spec is DELAYED
    runner.shard(0, solo=alone)
    assert runner.runner.advance(leaving=False) is None
    runner.shard(1, solo=alone)
    assert not runner.runner._early.may_begin(runner.runner._run, runner.runner._pending)


def test_an_error_in_an_early_step_is_told_in_the_rounds_turn_and_costs_the_open_one_nothing() -> None:
    runner = Runner()
    runner.shard(0)
    runner.shard(1, bad=True)
    assert runner.turns() == 2 and not runner.kinds(Failure)
    assert not runner.runner.has_work  # it is not tried again and again
    runner.sum(0)
    runner.turns()
    assert [m.step for m in runner.kinds(StepApplied)] == [0]
    assert [m.text for m in runner.kinds(Failure)] and "in round 2" in runner.kinds(Failure)[0].text


def test_a_round_that_was_given_up_after_it_was_begun_early_is_begun_anew() -> None:
    runner, fresh = Runner(), Runner()
    for one in (runner, fresh):
        one.shard(0)
        one.turns()
    runner.shard(1)
    assert runner.turns() == 1
    for one in (runner, fresh):
        one.sum(0)
        one.turns()
        one.shard(1, generation=1)  # the same number, asked anew
        one.turns()
    ways = [
        [b[0] for m, b in one.sent if isinstance(m, GradientBucket) and m.generation == 1] for one in (runner, fresh)
    ]
    torch.testing.assert_close(*ways, rtol=0, atol=0)
    assert ways[0]
