from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.saving.snapshots import FIRST_S, mean_life_s, period_s, stall_s

SECONDS = st.floats(0, 1e5)


@given(stalled=SECONDS, transfer=SECONDS, life=st.floats(1, 1e6))
def test_a_loss_costs_five_minutes_or_two_transfers_and_the_stalls_two_percent(
    stalled: float, transfer: float, life: float
) -> None:
    period = period_s(stalled, transfer, life)
    assert stalled <= 0.02 * period * (1 + 1e-9) and period >= max(FIRST_S, transfer)
    assert period + transfer <= max(300.0, 2 * transfer, 50 * stalled + transfer, FIRST_S + transfer) * (1 + 1e-9)


@given(stalled=SECONDS, transfer=SECONDS, more=st.floats(0, 1e4))
def test_what_costs_more_comes_less_often_and_what_is_lost_more_often_comes_more_often(
    stalled: float, transfer: float, more: float
) -> None:
    assert period_s(stalled + more, transfer) >= period_s(stalled, transfer)
    assert period_s(stalled, transfer, 600.0) <= period_s(stalled, transfer, 600.0 + more)


@given(stalled=st.floats(0.02, 2), life=st.floats(1000, 10_000))
def test_between_its_limits_it_is_young_s(stalled: float, life: float) -> None:
    young = math.sqrt(2 * stalled * life)
    expected = min(max(young, FIRST_S, 50 * stalled), 300.0) if 50 * stalled <= 300 else 50 * stalled
    assert period_s(stalled, 0.0, life) == pytest.approx(expected)


def test_every_loss_shortens_the_life_that_is_expected() -> None:
    lives = [mean_life_s(3600.0, losses) for losses in range(4)]
    assert lives == sorted(lives, reverse=True) and lives[0] == 10_800.0


@given(
    step=st.floats(0.01, 100),
    before=st.integers(2, 20),
    during=st.integers(1, 20),
    stall=st.floats(0, 1000),
    at=st.floats(0, 1e4),
)
def test_a_stall_is_what_the_steps_took_beside_themselves(
    step: float, before: int, during: int, stall: float, at: float
) -> None:
    earlier = [at + step * number for number in range(before)]
    later = [earlier[-1] + stall + step * (number + 1) for number in range(during)]
    found = stall_s(earlier, later)
    assert found is not None and found == pytest.approx(stall, abs=1e-6)
    assert stall_s(earlier[:1], later) is None and stall_s(earlier, []) is None
