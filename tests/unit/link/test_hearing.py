"""How often a line was silent, by a clock of the test."""

from __future__ import annotations

import pytest

from guava_nb.link import hearing as hearings
from guava_nb.link import line_measurement
from guava_nb.link.hearing import Hearing, Silences


def test_a_gap_longer_than_heartbeats_leave_is_a_silence_whichever_connection_hears_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hearings.time, "monotonic", lambda: 100.0)
    hearing = Hearing(2.0)
    for now in (102.0, 104.5, 108.0):  # late by a loaded machine, no more
        hearing.heard(now)
    assert hearing.silences(110.0) == Silences(0, 0.0, 10.0)
    hearing.heard(112.0)
    hearing.heard(112.1)  # of the other connection, for which as much time passed
    hearing.heard(122.1)
    assert hearing.silences(123.0) == Silences(2, pytest.approx(3.0 + 9.0), 23.0)
    assert hearing.silences(123.0).rate == (2 / 23, 6.0) and Silences(0, 0.0, 9.0).rate == (0.0, 0.0)
    assert hearing.heard_at == 122.1


@pytest.mark.parametrize("stood_s", [[], [3.0], [3.0, 5.0], [0, 3.0], [0, 0, 3.0], [0, 0, 3.0, 3.0]])
def test_a_break_of_the_line_while_it_is_measured_does_not_make_it_slow(
    stood_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, bursts, breaks = 0.0, list[int](), list(stood_s)

    def burst(nbytes: int) -> None:
        nonlocal now
        bursts.append(nbytes)
        now += nbytes / 1.25e6 + 0.08 + (breaks.pop(0) if breaks else 0.0)

    monkeypatch.setattr(line_measurement.time, "monotonic", lambda: now)
    assert line_measurement._rate(burst, 0.08, 1 << 20) == pytest.approx(1.25e6)
    assert bursts[-1] == 1 << 20 and len(bursts) == 3 + sum(map(bool, stood_s)) + bool(stood_s and stood_s[0])


def test_a_slow_line_is_measured_by_two_short_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, bursts = 0.0, list[int]()

    def burst(nbytes: int) -> None:
        nonlocal now
        bursts.append(nbytes)
        now += nbytes / 1e4

    monkeypatch.setattr(line_measurement.time, "monotonic", lambda: now)
    assert line_measurement._rate(burst, 0.08, 1 << 20) == pytest.approx(1e4, rel=0.06)
    assert bursts == [1 << 16, 1 << 14]
