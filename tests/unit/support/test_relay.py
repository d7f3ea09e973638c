"""The link emulator's schedule, on a clock of its own: bytes / rate + delay, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.relay import Way

PIECES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50)


@given(PIECES, st.floats(1e3, 1e9), st.floats(0, 1))
def test_a_full_link_carries_its_rate(pieces: list[int], rate: float, delay_s: float) -> None:
    way = Way(rate, delay_s)
    last = [way.arrival(piece, 100.0) for piece in pieces][-1]
    assert last == pytest.approx(100.0 + sum(pieces) / rate + delay_s, rel=1e-9)


@given(PIECES, st.floats(1e3, 1e9), st.floats(0, 1))
def test_an_idle_link_has_saved_nothing_up(pieces: list[int], rate: float, delay_s: float) -> None:
    way = Way(rate, delay_s)
    for index, piece in enumerate(pieces):
        now = 10_000.0 * (index + 1)
        assert way.arrival(piece, now) == pytest.approx(now + piece / rate + delay_s, rel=1e-9)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1)), min_size=2), st.floats(1e3, 1e9), st.floats(0, 1))
def test_order_is_kept_and_jitter_is_within_its_bound(
    handed_in: list[tuple[int, float]], rate: float, jitter_s: float
) -> None:
    way, steady, now, arrivals = Way(rate, 0.05, jitter_s), Way(rate, 0.05), 0.0, []
    for piece, later in handed_in:
        now += later
        arrivals.append(way.arrival(piece, now))
        assert -1e-9 <= arrivals[-1] - steady.arrival(piece, now) <= jitter_s + 1e-9  # it takes nothing of the rate
    assert arrivals == sorted(arrivals)


def test_an_idle_line_s_delays_differ_by_its_jitter() -> None:
    way = Way(None, 0.03, 0.01)
    delays = [way.arrival(1, float(now)) - now for now in range(200)]
    assert 0.03 <= min(delays) < 0.031 and 0.039 < max(delays) <= 0.04


def test_without_a_rate_only_the_delay_counts() -> None:
    assert Way(None, 0.25).arrival(1 << 30, 1.0) == 1.25


@pytest.mark.parametrize("rate", [1e3, 25e6, 1e9])
def test_pieces_are_small_against_the_rate(rate: float) -> None:
    way = Way(rate, 0.05)
    assert way.piece_bytes <= max(1, rate * 0.0021)
    assert way.pieces_held * way.piece_bytes <= 2 * (0.15 * rate + 4 * (64 << 10))
