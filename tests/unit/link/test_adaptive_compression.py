"""When compression pays, and how fast a line is: both pure, with times given."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.link.adaptive_compression import CHANNELS, MIN_BYTES, AdaptiveCompression, Frame, Payoff, offered
from guava_nb.link.rate import Delivery, RateMeter
from guava_nb.protocol.messages import Channel

MIB = 1 << 20


def test_nothing_is_tried_before_the_line_was_measured() -> None:
    payoff = Payoff()
    assert not any(payoff.wants(None) for _ in range(1000))
    assert payoff.wants(25e6)


def test_it_pays_on_a_slow_line_and_not_on_a_quick_one() -> None:
    slow, quick = Payoff(), Payoff()
    slow.measured(MIB, MIB // 2, 0.003, 25e6)  # 42 ms raw, 24 ms compressed
    quick.measured(MIB, MIB // 2, 0.003, 1e9)  # 1 ms raw, 3.5 ms compressed
    assert slow.pays and not quick.pays
    incompressible = Payoff()
    incompressible.measured(MIB, int(0.97 * MIB), 0.003, 25e6)
    assert not incompressible.pays


def test_what_does_not_pay_is_tried_ever_more_rarely_but_again() -> None:
    payoff, trials, chunks = Payoff(), [], 5000
    for chunk in range(chunks):
        if payoff.wants(25e6):
            trials.append(chunk)
            payoff.measured(MIB, MIB, 0.003, 25e6)
    gaps = [b - a for a, b in zip(trials, trials[1:], strict=False)]
    assert len(trials) < 20 and gaps == sorted(gaps) and max(gaps) <= 513
    payoff.measured(MIB, MIB // 10, 0.001, 25e6)  # other data now
    assert payoff.pays and payoff.wants(25e6)
    payoff.measured(MIB, MIB, 0.003, 25e6)
    assert not payoff.pays


@given(st.integers(1, MIB), st.integers(1, MIB), st.floats(0, 1), st.floats(1e3, 1e11))
def test_it_pays_only_if_it_arrives_sooner(raw: int, packed: int, seconds: float, rate: float) -> None:
    payoff = Payoff()
    payoff.measured(raw, packed, seconds, rate)
    if payoff.pays:
        assert seconds + packed / rate < raw / rate


def test_only_large_payloads_of_some_channels() -> None:
    squeezer = AdaptiveCompression("on")
    for channel in Channel:
        assert squeezer.wants(channel, MIB, None) == (channel in CHANNELS)
        assert not squeezer.wants(channel, MIN_BYTES - 1, 1e6)
    assert not any(AdaptiveCompression("off").wants(channel, MIB, 1e6) for channel in Channel)
    assert offered("off") == () and offered("on") == offered("auto") == ("zstd",)


def test_a_chunk_that_grows_goes_as_it_is() -> None:
    head, noise = b"h" * 40, os.urandom(MIB)
    assert list(AdaptiveCompression("on").squeeze(Frame(Channel.BATCH, [head, noise]), None)) == [head, noise]


def test_the_rate_is_that_of_the_busy_windows() -> None:
    meter = RateMeter()
    assert meter.bytes_s is None
    now = 0.0
    for _ in range(200):  # 25 MB/s in pieces of 1 MB
        meter.count(1_000_000, now)
        now += 0.04
    assert meter.bytes_s == pytest.approx(25e6, rel=0.01)
    now += 3600  # a pause is no slow line
    meter.count(1, now)
    for _ in range(20):
        now += 0.04
        meter.count(1_000_000, now)
    assert meter.bytes_s == pytest.approx(25e6, rel=0.01)


def test_what_arrived_is_counted_once_and_as_it_was_on_the_wire() -> None:
    delivery, now = Delivery(), 0.0
    for sequence in range(1, 100):
        delivery.finished(Channel.BATCH, sequence, now, delivery.position, 1_000_000)
        delivery.sent(500_000, 1_000_000)  # compressed
        now += 0.02
        delivery.acknowledged(Channel.BATCH, sequence, now)
        delivery.acknowledged(Channel.BATCH, sequence, now)  # repeated after a resume
    assert delivery.bytes_s == pytest.approx(25e6, rel=0.01)


def test_a_line_that_is_idle_in_between_is_as_fast_as_its_long_messages() -> None:
    delivery, now = Delivery(), 0.0
    assert delivery.bytes_s is None
    for sequence in range(1, 100):
        began_at, began_s = delivery.position, now
        for _ in range(4):  # of several frames
            delivery.sent(100_000)
            now += 0.005
        delivery.finished(Channel.GRADIENT, sequence, began_s, began_at)
        delivery.acknowledged(Channel.GRADIENT, sequence, now)
        now += 0.5
    assert delivery.bytes_s == pytest.approx(20e6, rel=0.01)  # and not 0.8e6


@given(
    rate=st.floats(1e4, 1e9),
    delay_s=st.floats(0.0, 0.3),
    messages=st.lists(st.tuples(st.integers(40_000, 1 << 20), st.floats(0.1, 1.0), st.floats(0.0, 2.0)), max_size=40),
)
def test_no_message_makes_a_line_look_faster_than_it_is(
    rate: float, delay_s: float, messages: list[tuple[int, float, float]]
) -> None:
    delivery, now, free_at = Delivery(), 0.0, 0.0
    waiting: list[tuple[float, int]] = []
    for sequence, (nbytes, packed, pause_s) in enumerate(messages, start=1):
        now += pause_s
        while waiting and waiting[0][0] <= now:
            at, known = waiting.pop(0)
            delivery.acknowledged(Channel.BATCH, known, at)
        delivery.finished(Channel.BATCH, sequence, now, delivery.position, nbytes)
        wire_bytes = int(nbytes * packed)
        delivery.sent(wire_bytes, nbytes)
        free_at = max(free_at, now) + wire_bytes / rate
        waiting.append((free_at + delay_s, sequence))
    for at, known in waiting:
        delivery.acknowledged(Channel.BATCH, known, at)
    assert delivery.bytes_s is None or max(delivery._messages) <= rate * 1.001
