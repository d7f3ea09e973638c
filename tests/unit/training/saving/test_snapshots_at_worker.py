"""How much a difference sends: bounded by the steps, in messages that are worth it, and none later than five minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.saving.snapshots_at_worker import SnapshotsAtWorker, difference_count
from guava_nb.wire_formats.held_tensors import CHUNK
from guava_nb.wire_formats.top_k import TopK

GPT2 = 124_439_808  # parameters


@given(st.integers(10_000, 10**9), st.integers(0, 3000), st.floats(0, 1000))
def test_no_difference_takes_more_than_its_steps_may(elements: int, steps: int, seconds: float) -> None:
    count = difference_count(elements, steps, seconds)
    assert 0 <= count <= 1024
    if count:
        assert TopK(count, CHUNK).encoded_bytes(elements) <= 2.2e-4 * elements * steps
        assert count >= 512 or seconds >= 300


@given(st.floats(0.001, 60), st.floats(10, 600))
def test_two_thousand_steps_of_124_million_parameters_take_60_megabytes_at_most(step_s: float, period_s: float) -> None:
    every = max(1, round(period_s / step_s))  # steps from one snapshot to the next
    sent, last = 0, 0
    for step in range(every, 2001, every):
        if count := difference_count(GPT2, step - last, (step - last) * step_s):
            sent, last = sent + TopK(count, CHUNK).encoded_bytes(GPT2), step
    assert sent <= 55e6


def test_a_fast_run_sends_long_messages_and_a_slow_one_a_short_one_after_five_minutes() -> None:
    assert difference_count(GPT2, 100, 20.0) == 0
    assert difference_count(GPT2, 520, 100.0) >= 512
    assert difference_count(GPT2, 100_000, 100.0) == 1024
    assert 1 <= difference_count(GPT2, 30, 300.0) < 64
    assert difference_count(GPT2, 0, 1000.0) == 0


class _Forgetful(SnapshotsAtWorker):
    """Forgets what lies on the disk right after it was looked at, as the job may while a status is made."""

    def __init__(self) -> None:
        self._left: list[Any] = [SimpleNamespace(state=SimpleNamespace(step=7))]

    @property
    def _known(self) -> Any:  # type: ignore[override]
        return self._left.pop() if self._left else None


def test_a_status_may_be_made_while_the_job_forgets() -> None:
    there = _Forgetful()
    assert (there.step_on_disk, there.step_on_disk) == (7, None)
