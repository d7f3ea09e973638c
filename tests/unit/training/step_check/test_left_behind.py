from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.protocol.messages import ParallelSpec
from guava_nb.training.step_check.left_behind import LeftBehind


def told(batches: list[int], kept: bool, parallel: ParallelSpec | None = None, rounds: Any = None) -> list[str]:
    """What a session of two workers says of a step of batches with so many samples."""
    notices: list[str] = []
    spec = SimpleNamespace(parallel=parallel, sync_batchnorm=False, rounds=rounds)
    members: Any = SimpleNamespace(
        replica_set=SimpleNamespace(spec=spec, kept=()),
        available=lambda: [0, 1],
        cluster=SimpleNamespace(notice=notices.append),
    )
    plan: Any = SimpleNamespace(weights=lambda team: [1.0] * len(team))
    run: Any = SimpleNamespace(history=[])
    behind = LeftBehind(members, plan, run)
    behind.look([SimpleNamespace(rows=rows) for rows in batches], 3)  # type: ignore[misc]
    behind.note(["model.calls"] if kept else [], [] if kept else ["steps"])
    behind.note(["model.calls"] if kept else [], [] if kept else ["steps"])
    return notices


@pytest.mark.parametrize(
    ("batches", "parallel", "is_told"),
    [
        ([4, 1, 4], None, True),
        ([4, 1, 4], ParallelSpec(mode="zero", dp=2, zero_stage=3), True),  # its stand-in moves no buffer
        ([4, 4, 1], None, False),  # the step is over
        ([1, 1], None, False),  # the same one has no sample of either
        ([4, 2, 4], None, False),
    ],
)
def test_a_worker_that_is_behind_for_a_later_batch_of_a_step_is_told_once(
    batches: list[int], parallel: ParallelSpec | None, is_told: bool
) -> None:
    notices = told(batches, kept=False, parallel=parallel)
    assert len(notices) == is_told
    if is_told:
        assert (
            "step 4 has batches of 4 and 1 and 4 samples for 2 workers" in notices[0] and "steps, which" in notices[0]
        )


@pytest.mark.parametrize(("batches", "is_told"), [([1], True), ([1, 1], True), ([4, 1, 4], False), ([2], False)])
def test_a_worker_without_a_sample_of_a_step_is_told_once(batches: list[int], is_told: bool) -> None:
    notices = told(batches, kept=True)
    assert len(notices) == is_told
    assert not is_told or "step 4 has 1 samples for 2 workers: those without a sample make no forward" in notices[0]


def test_a_round_of_local_steps_has_no_whole_batch() -> None:
    assert told([4, 1, 4], kept=False, rounds=object()) == []
