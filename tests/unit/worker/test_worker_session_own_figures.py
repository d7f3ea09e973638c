"""What a worker counts of its own work equals what the orchestrator would count."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.protocol.messages import (
    Abort,
    BatchShard,
    BoardEnergy,
    EndRun,
    Energy,
    Factory,
    Message,
    Prepare,
    RunSpec,
    ShardReport,
    StepApplied,
    Tree,
)
from guava_nb.status import OwnFigures
from guava_nb.worker.worker_session import OwnWork

SPEC = RunSpec(model=Factory("m"), criterion=Factory("MSELoss"), step=None, optimizer=Factory("SGD"), scheduler=None)


def new_run(work: OwnWork, run_id: str = "r") -> None:
    work.arrived(Prepare(run_id, (), SPEC))


def shard(step: int, rows: int, total: int, number: int = 0, **more: Any) -> BatchShard:
    return BatchShard(
        run_id="r",
        generation=1,
        step=step,
        shard=number,
        rows=rows,
        global_rows=total,
        batch=Tree(b""),
        **more,
    )


def ready(step: int, rows: int, number: int = 0, run_id: str = "r") -> ShardReport:
    return ShardReport(
        run_id=run_id,
        generation=1,
        step=step,
        shard=number,
        loss_sum=1.0,
        count=rows,
        finite=True,
        rows=rows,
        forward_s=0.01,
        backward_s=0.02,
        wait_s=0.5,
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), max_size=20), st.booleans())
def test_each_committed_row_counts_once_also_when_steps_are_aborted_and_done_again(
    steps: list[tuple[int, int, bool]], solo: bool
) -> None:
    work, counted = OwnWork("cpu", "CPU"), 0
    new_run(work)
    for step, (rows, others, aborted) in enumerate(steps):
        for _ in range(1 + aborted):
            work.arrived(shard(step, rows, rows + others))
            if aborted:
                work.sent(ready(step, rows), step)
                work.arrived(Abort("r", 2, step - 1, "somebody was lost"))
                aborted = False
        if solo:
            work.sent(StepApplied(run_id="r", generation=1, step=step, ready=ready(step, rows)), step)
        else:
            work.sent(ready(step, rows), step)
            assert work.figures().samples == counted, "not before the commit"
            work.sent(StepApplied(run_id="r", generation=1, step=step), step)
        counted += rows
        now = work.figures()
        assert (now.samples, now.share) == (counted, rows / (rows + others))
        assert now.step_s == 0.03


def test_of_a_group_only_true_rows_count() -> None:
    work = OwnWork("cpu", "CPU")
    new_run(work)
    work.arrived(shard(0, 4, 8, part_rows=(3, 0)))
    work.sent(ready(0, 4), 0.0)
    work.sent(StepApplied(run_id="r", generation=1, step=0), 0.0)
    assert work.figures().samples == 3


def test_a_new_run_starts_at_nothing_and_words_of_the_old_one_are_not_taken_for_its() -> None:
    work = OwnWork("cpu", "CPU")
    new_run(work, "old")
    new_run(work)
    late: list[Message] = [
        ready(0, 5, run_id="old"),
        StepApplied(run_id="old", generation=1, step=0),
        Energy(run_id="old", mark=0, seconds=1.0, power_w=9.0),
    ]
    for message in late:
        work.sent(message, 1.0)
    assert work.figures() == OwnFigures(device_name="CPU")


def test_when_a_run_is_over_its_energy_stays_and_what_the_device_did_then_says_nothing_of_now() -> None:
    work = OwnWork("cuda:0", "T4")
    new_run(work)
    boards = (
        BoardEnergy(key="a", name="T4", method="counter", joules=5.0),
        BoardEnergy(key="b", name="CPU", method="", joules=None),
    )
    work.sent(
        Energy(
            run_id="r", mark=0, seconds=1.0, boards=boards, busy=0.9, memory_used_bytes=1, memory_bytes=2, power_w=70.0
        ),
        1.0,
    )
    now = work.figures()
    assert (now.joules, now.busy, now.memory_bytes, now.power_w) == (5.0, 0.9, 2, 70.0)
    work.arrived(EndRun("r"))
    now = work.figures()
    assert (now.joules, now.busy, now.memory_bytes, now.power_w) == (5.0, None, None, None)
    new_run(work)
    assert work.figures().joules is None


def test_a_processor_s_load_is_that_of_its_machine() -> None:
    for device, expected in (("cpu", 0.25), ("cuda:0", None)):
        work = OwnWork(device, "x")
        new_run(work)
        work.sent(
            Energy(run_id="r", mark=0, seconds=1.0, cpu_busy=0.25, host_memory_used_bytes=3, host_memory_bytes=9), 1.0
        )
        assert work.figures().busy == expected  # a GPU without NVML shows neither: its machine's RAM is not its memory
        assert work.figures().memory_bytes == (9 if device == "cpu" else None)
