"""The choice of a schedule and of micro-batches: what a step takes, what is chosen, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.forecast.pipeline_choice import StageLine, StagePace, choose_pipeline, step_seconds

TWO = [StagePace("w1", 1.2), StagePace("w2", 1.2)]
HOME = StageLine(3e6, 3e6, 2.5e6, 2.5e6, 0.06)
OFFICE = replace(HOME, forward_bytes_s=25e6, backward_bytes_s=25e6, delay_s=0.05)
NEAR = replace(HOME, forward_bytes_s=1e9, backward_bytes_s=1e9, delay_s=0.0002)


def test_a_step_takes_what_a_person_reckons() -> None:
    """Two stages, two parts: three turns of a forward, three of a backward, and twice the line in either direction."""
    line = StageLine(1000, 2000, 1000, 1000, 0.25)
    stages = [StagePace("a", 6.0), StagePace("b", 6.0)]  # a part: 1 s forward, 2 s backward; line: 0.5 and 1 s
    message = 0.003
    assert step_seconds("gpipe", 2, stages, [line]) == pytest.approx(
        (1 + 0.5 + 0.25 + 1 + 1) + (2 + 2) + (1 + 0.25) + 2 + 6 * message, abs=2 * message
    )
    assert step_seconds("gpipe", 1, [StagePace("a", 6.0)], []) == pytest.approx(6 + 2 * message)


def test_a_near_line_takes_few_parts_of_1f1b_and_a_far_one_has_gpipe_send_while_stages_compute() -> None:
    near, office = (choose_pipeline(TWO, [line], 32, 4) for line in (NEAR, OFFICE))
    assert near.schedule == "1f1b" and office.schedule == "gpipe" and office.micro_batches >= 4
    assert step_seconds("gpipe", office.micro_batches, TWO, [OFFICE]) < 0.8 * step_seconds("gpipe", 1, TWO, [OFFICE])
    assert office.sentence.startswith(
        "schedule auto: gpipe with 8 micro-batches, a step of about 1.53 s (1f1b at best 1.88 s)"
    )
    assert "3.0 MB of a batch pass from w1 to w2 at 25.0 MB/s, 100 ms there and back" in office.sentence


def test_where_the_line_is_the_limit_1f1b_uses_both_of_its_directions_at_once() -> None:
    quick = [replace(stage, compute_s=0.2) for stage in TWO]
    assert choose_pipeline(quick, [HOME], 32, 4).schedule == "1f1b"


@pytest.mark.parametrize(
    ("stages", "line", "why"),
    [
        ([TWO[0], StagePace("w2", None)], HOME, "how fast w2 computes is not known"),
        ([StagePace("w1", 0.0), StagePace("w2", None)], HOME, "how fast w1 and w2 compute is not known"),
        (TWO, replace(HOME, backward_bytes_s=None), "the rate of the line from w1 to w2 is not known"),
    ],
)
def test_what_is_not_known_is_said_and_the_settings_stay(stages: list[StagePace], line: StageLine, why: str) -> None:
    found = choose_pipeline(stages, [line], 32, 6)
    assert (found.schedule, found.micro_batches) == ("1f1b", 6)
    assert found.sentence == f"schedule auto: 1f1b with 6 micro-batches, because {why}"


positive = st.floats(0.01, 10)
lines = st.builds(
    StageLine, st.floats(0, 1e7), st.floats(0, 1e7), st.floats(1e4, 1e9), st.floats(1e4, 1e9), st.floats(0, 1)
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_step_is_faster_than_its_slowest_stage_or_line_and_a_better_line_makes_none_slower(
    data: st.DataObject,
) -> None:
    num, rows = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 40))
    stages = [StagePace(f"w{k}", data.draw(positive)) for k in range(num)]
    between = [data.draw(lines) for _ in range(num - 1)]
    found = choose_pipeline(stages, between, rows, 4)
    assert 1 <= found.micro_batches <= rows
    seconds = step_seconds(found.schedule, found.micro_batches, stages, between)
    assert seconds >= max(stage.compute_s or 0 for stage in stages)
    assert seconds >= max(
        max(one.forward_bytes / (one.forward_bytes_s or 1), one.backward_bytes / (one.backward_bytes_s or 1))
        for one in between
    )
    for schedule in ("gpipe", "1f1b"):
        for count in (1, 2, 4):
            better = [replace(one, delay_s=one.delay_s / 2) for one in between]
            assert (
                step_seconds(schedule, count, stages, better) <= step_seconds(schedule, count, stages, between) + 1e-9
            )
