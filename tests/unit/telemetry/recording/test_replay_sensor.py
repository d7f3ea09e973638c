"""A replay gives the joules that were recorded, second for second, and none beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.telemetry import EnergyMeter, EnergyRecording, ReplaySensor, SensorError
from guava_nb.telemetry.recording.energy_recording import Reading
from tests.support.sensors import Clock


def recording(*readings: tuple[float, ...]) -> EnergyRecording:
    return EnergyRecording("A card", "2026-01-31", "2.13.0", "NVML", tuple(Reading(*reading) for reading in readings))


LEAPING = recording((0.5, 100.0, 50.0), (1.5, 150.0, 60.0), (2.5, 350.0, 200.0))


def test_a_counter_is_played_by_straight_lines_and_ends_with_its_recording() -> None:
    clock = Clock()
    sensor = ReplaySensor(LEAPING, clock=clock)
    assert sensor.counts and sensor.power() == 50.0
    assert sensor.read() == 100.0
    clock.wait(0.5)
    assert sensor.read() == 125.0
    clock.wait(1.5)
    assert sensor.read() == 350.0
    clock.wait(0.1)
    with pytest.raises(SensorError, match=r"over after 2\.5 s"):
        sensor.read()
    assert sensor.power() is None


def test_power_is_played_where_nothing_counted() -> None:
    clock = Clock()
    sensor = ReplaySensor(recording((0.0, None, 50.0), (1.0, None, None), (2.0, None, 70.0)), clock=clock)
    assert not sensor.counts and sensor.read() == 50.0
    clock.wait(1.0)
    assert sensor.read() == 60.0


@given(
    st.lists(st.tuples(st.floats(0.01, 2), st.floats(1, 700)), min_size=2, max_size=30),
    st.floats(0, 0.9),
    st.floats(0.05, 3),
)
def test_a_meter_counts_the_joules_of_the_stretch_that_was_played(
    steps: list[tuple[float, float]], begin: float, seconds: float
) -> None:
    at_s, joules, made = 0.0, 0.0, [(0.0, 0.0, 0.0)]
    for pace_s, watts in steps:
        at_s, joules = at_s + pace_s, joules + pace_s * watts
        made.append((at_s, joules, watts))
    clock, begin_s = Clock(), begin * at_s
    sensor = ReplaySensor(recording(*made), begin_s, clock)
    meter = EnergyMeter(sensors=[sensor], clock=clock, background=False)
    meter.begin()
    seconds = min(seconds, at_s - begin_s) * 0.99
    clock.wait(seconds)
    board = meter.end().boards[0]
    probe = Clock()
    later = ReplaySensor(recording(*made), begin_s, probe)
    first = later.read()
    probe.wait(seconds)
    if board.joules is not None and not board.too_short:
        assert board.joules == pytest.approx(later.read() - first, rel=1e-6, abs=1e-6)
    assert board.name == "A card, recorded 2026-01-31" and "replayed: NVML of 2026-01-31" in board.method


def test_seconds_after_the_end_are_not_covered() -> None:
    clock = Clock()
    meter = EnergyMeter(sensors=[ReplaySensor(LEAPING, clock=clock)], clock=clock, background=False)
    meter.begin()
    for _ in range(5):
        clock.wait(1.0)
        meter.poll()
    board = meter.end().boards[0]
    assert board.joules == pytest.approx(250) and board.uncovered_s == pytest.approx(3)
    assert "the recording is over" in board.problem


def test_a_place_that_a_recording_has_not_is_refused() -> None:
    for begin_s in (-1.0, 2.5, float("nan")):
        with pytest.raises(ConfigError, match=r"plays from 0 to 2\.5 s"):
            ReplaySensor(LEAPING, begin_s)
    with pytest.raises(ConfigError, match="neither joules nor watts"):
        ReplaySensor(recording((0.0,), (1.0,)))
