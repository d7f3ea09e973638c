"""Time and energy by phase: whatever the intervals and readings, nothing is lost and nothing counted twice."""

from __future__ import annotations

import threading
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.telemetry import PHASES, MachineMeter, PhaseBook
from tests.support.sensors import Clock

lengths = st.lists(st.tuples(st.sampled_from(PHASES[:-1]), st.floats(0.001, 2)), min_size=1, max_size=40)
readings = st.lists(st.tuples(st.floats(0.01, 3), st.floats(0, 300)), min_size=1, max_size=40)


@given(lengths, readings)
def test_joules_and_seconds_add_up(parts: list[tuple[str, float]], increments: list[tuple[float, float]]) -> None:
    book, now, measured = PhaseBook(), 0.0, []
    at = 0.0
    for seconds, joules in increments:
        measured.append((at, at + seconds, joules))
        at += seconds
    for phase, seconds in parts:
        book.add(phase, now, now + seconds)
        now += seconds
        book.measured([m for m in measured if m[1] <= now])
        measured = [m for m in measured if m[1] > now]
    given_out = sum(j for j in (joules for _, joules in book.totals().values()) if j is not None)
    done, total = 0.0, 0.0
    for seconds, joules in increments:
        done += seconds
        if done <= now:
            total += joules
    assert given_out == pytest.approx(total, abs=1e-6)
    assert "other" not in book.totals()  # the phases leave no gap
    assert sum(seconds for seconds, _ in book.totals().values()) == pytest.approx(now)


def test_energy_goes_where_the_time_went() -> None:
    book = PhaseBook()
    book.add("forward", 0.0, 1.0)
    book.add("backward", 1.0, 3.0)
    book.measured([(0.0, 2.0, 200.0), (2.0, 3.0, 300.0), (3.0, 4.0, 50.0)])
    assert book.totals() == {"forward": (1.0, 100.0), "backward": (2.0, 400.0)}
    book.add("waiting", 3.5, 4.0)
    book.measured([])
    assert book.totals()["waiting"] == (0.5, 25.0)
    assert book.totals()["other"] == (0.0, 25.0)


def test_without_a_sensor_there_is_time_and_no_energy() -> None:
    book = PhaseBook()
    book.add("forward", 0.0, 1.0)
    assert book.totals() == {"forward": (1.0, None)}
    book.clear()
    assert book.totals() == {}


def test_rates_of_a_machine_are_of_the_time_between_two_looks() -> None:
    times = namedtuple("times", "user system idle iowait guest")
    clock, moved, cores = Clock(), SimpleNamespace(read_bytes=0, write_bytes=0), times(10.0, 5.0, 20.0, 1.0, 3.0)

    class Source:
        def cpu_times(self):
            return cores

        def virtual_memory(self):
            return SimpleNamespace(total=100, available=40)

        def disk_io_counters(self):
            return moved

        def net_io_counters(self):
            raise PermissionError("hidden here")

    meter = MachineMeter(clock, Source())
    first = meter.look()
    assert first.cpu_busy is None and first.disk_read_bytes_s is None and first.memory_used_bytes == 60
    clock.wait(2.0)
    moved.read_bytes, cores = 500, times(12.0, 6.0, 22.0, 2.0, 4.0)
    second = meter.look()
    assert (second.cpu_busy, second.disk_read_bytes_s, second.network_in_bytes_s) == (0.5, 250.0, None)
    clock.wait(2.0)  # no core's time went on, as in a container that hides it
    assert meter.look().cpu_busy is None


def test_a_look_of_another_thread_is_no_0_percent() -> None:
    """psutil's own percentage counts for each thread by itself, and says 0 to one that asks for the first time."""
    meter, seen = MachineMeter(Clock()), []
    meter.look()
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    meter._clock.wait(2.0)
    thread = threading.Thread(target=lambda: seen.append(meter.look().cpu_busy))
    thread.start()
    thread.join()
    assert 0 < seen[0] <= 1
