"""Numbers with their units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.render.values import (
    short_rate,
    show_bytes,
    show_bytes_pair,
    show_float,
    show_joules,
    show_operations,
    show_percent,
    show_rate,
    show_seconds,
    show_watts,
)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_bytes(None), "not measured"),
        (show_bytes(0), "0 B"),
        (show_bytes(999), "999 B"),
        (show_bytes(1500), "1.5 kB"),
        (show_bytes(999_999), "1.0 MB"),
        (show_bytes(2**40), "1.1 TB"),
        (show_seconds(None), "not measured"),
        (show_seconds(0.0), "0 s"),
        (show_seconds(0.00034), "340 µs"),
        (show_seconds(0.0123), "12.3 ms"),
        (show_seconds(0.99999), "1 s"),
        (show_seconds(59.99), "1 min 00 s"),
        (show_seconds(185), "3 min 05 s"),
        (show_seconds(7260), "2 h 01 min"),
        (show_rate(None, "samples"), "not measured"),
        (show_rate(12.345, "samples"), "12.3 samples/s"),
        (show_rate(12_345, "samples"), "12,345 samples/s"),
        (show_float(None), "not measured"),
        (show_float(0.123456), "0.1235"),
        (show_float(123_456.0), "123,456"),
        (show_float(0.000012), "0.000012"),
        (show_float(3e-05), "0.00003"),
        (show_float(99_999.6), "100,000"),
        (show_float(float("nan")), "nan"),
        (show_float(0.0), "0"),
        (show_float(-2.5), "-2.5"),
        (show_rate(999.7, "samples"), "1,000 samples/s"),
        (show_joules(2.5e12), "2,500,000 MJ"),
        (show_joules(999.6), "1 kJ"),
        (show_watts(None), "not measured"),
        (show_watts(1234.5), "1,234 W"),
        (show_operations(None, "s"), "not measured"),
        (show_operations(1.234e13, "s"), "12.3 TFLOP/s"),
        (show_operations(5.0, "J"), "5 FLOP/J"),
        (show_percent(1 / 3), "33 %"),
        (show_percent(None), "not measured"),
    ],
)
def test_values(shown: str, text: str) -> None:
    assert shown == text


@given(st.floats(0, 1e30))
def test_no_number_for_people_has_an_exponent(value: float) -> None:
    shown = [show_float(value), show_rate(value, "samples"), show_joules(value), show_watts(value), show_seconds(value)]
    assert not [text for text in shown if "e+" in text or "e-" in text]
    if value > 1e-3:
        assert float(show_float(value).replace(",", "")) == pytest.approx(value, rel=6e-4)


def test_sizes_in_pairs() -> None:
    pairs = [(5.1e9, 25.3e9), (12.0, 3.0), (999_600.0, 0.0), (1e3, 3e9), (123.4e6, 999.4e6)]
    assert [show_bytes_pair(*pair) for pair in pairs] == [
        "5.1/25.3 GB",
        "12/3 B",
        "1/0 MB",
        "<0.01/3 GB",
        "123/999 MB",
    ]
    assert [short_rate(rate) for rate in (0, 21.4, 999.6, 480_000.0, 3e20)] == [
        "0 B/s", "21.4 B/s", "1 kB/s", "480 kB/s", "300000 PB/s",
    ]  # fmt: skip
