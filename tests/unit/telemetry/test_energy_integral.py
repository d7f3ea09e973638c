"""From readings to joules: any readings, any times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.telemetry.energy_integral import CURVE_POINTS, EnergyIntegral

steps = st.lists(st.tuples(st.floats(0.001, 10), st.floats(0, 500)), min_size=2, max_size=50)


@given(steps)
def test_power_is_the_area_under_straight_lines(parts: list[tuple[float, float]]) -> None:
    total, now, area, last = EnergyIntegral(counts=False), 0.0, 0.0, None
    for seconds, watts in parts:
        now += seconds
        if last is not None:
            area += (last + watts) / 2 * seconds
        total.add(now, watts)
        last = watts
    assert total.total().joules == pytest.approx(area)
    assert total.total().uncovered_s == 0


@given(steps)
def test_a_counter_gives_its_growth(parts: list[tuple[float, float]]) -> None:
    total, now, count = EnergyIntegral(counts=True), 0.0, 77.0
    for seconds, joules in parts:
        now, count = now + seconds, count + joules
        total.add(now, count)
    assert total.total().joules == pytest.approx(count - 77.0 - parts[0][1], abs=1e-6)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50), st.booleans())
def test_whatever_is_read_the_sum_never_falls(values: list[float], counts: bool) -> None:
    total, before = EnergyIntegral(counts, wrap_j=1000.0 if counts else None), 0.0
    for k, value in enumerate(values):
        total.add(float(k), value)
        assert total.total().joules >= before
        before = total.total().joules


@given(st.floats(501, 999), st.floats(0, 499))
def test_a_wrap_is_bridged(before: float, after: float) -> None:
    total = EnergyIntegral(counts=True, wrap_j=1000.0)
    total.add(0.0, before)
    total.add(1.0, after)
    assert total.total().joules == pytest.approx(1000.0 - before + after)


def test_a_counter_that_goes_backwards_is_a_gap_and_no_negative_energy() -> None:
    total = EnergyIntegral(counts=True)
    for at_s, joules in ((0.0, 5000.0), (1.0, 5200.0), (2.0, 100.0), (3.0, 300.0)):
        total.add(at_s, joules)
    assert total.total().joules == 400.0
    assert total.total().uncovered_s == 1.0


def test_power_that_could_not_be_read_is_a_gap_and_a_counter_has_gone_on() -> None:
    power, counter = EnergyIntegral(counts=False), EnergyIntegral(counts=True)
    for one, value in ((power, 200.0), (counter, 0.0)):
        one.add(0.0, value)
        one.fail(1.0)
        one.add(2.0, 200.0 if one is power else 400.0)
        one.add(3.0, 200.0 if one is power else 600.0)
    assert (power.total().joules, power.total().uncovered_s) == (200.0, 2.0)
    assert (counter.total().joules, counter.total().uncovered_s) == (600.0, 0.0)


def test_the_curve_stays_short_and_spans_everything() -> None:
    total = EnergyIntegral(counts=False)
    for second in range(10 * CURVE_POINTS):
        total.add(float(second), 100.0)
    curve = total.curve()
    assert len(curve) <= CURVE_POINTS + 1
    assert curve[0][0] < 40 and curve[-1][0] > 9.9 * CURVE_POINTS
    assert total.total().joules == pytest.approx(100.0 * (10 * CURVE_POINTS - 1))
