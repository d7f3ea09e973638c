"""Compression over real sessions with TLS: both ends agree, bytes are counted as sent, everything arrives exactly."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from guava_nb.link import adaptive_compression as squeeze
from guava_nb.link import dialler, listener
from guava_nb.link.session import Session
from guava_nb.link.session_events import MessageArrived, SessionResumed
from guava_nb.protocol.messages import Channel, FlatTensor, SumBucket
from tests.support.links import QUICK, Recorder, nothing_left_behind, world
from tests.support.relay import Relay

TEXT = b"the same words come again and again in what people write; " * 50_000  # 2.9 MB


def bucket(number: int, payload: bytes) -> SumBucket:
    return SumBucket(
        run_id="run", generation=0, step=number, bucket=0, present=b"", tensor=FlatTensor("uint8", len(payload))
    )


def send(session: Session, numbers: range, payload: bytes = TEXT, channel: Channel = Channel.BATCH) -> None:
    for number in numbers:
        session.send(bucket(number, payload), channel, [memoryview(payload)])


def received(recorder: Recorder, count: int) -> list[bytes]:
    return [bytes(event.payload) for event in recorder.wait_for(MessageArrived, count)]


def test_on_compresses_both_ways_and_counts_what_was_sent() -> None:
    with nothing_left_behind(), world(replace(QUICK, compression="on")) as made:
        ours, theirs = made.dial()
        send(ours, range(4))
        send(theirs, range(4), channel=Channel.GRADIENT)
        assert received(made.here, 4) == received(made.there, 4) == [TEXT] * 4
        for out, back, channel in ((ours, theirs, Channel.BATCH), (theirs, ours, Channel.GRADIENT)):
            assert 0 < out.wire.out_bytes[channel] < len(TEXT)
            made.here.wait_until(lambda b=back, o=out, c=channel: b.wire.in_bytes[c] == o.wire.out_bytes[c])


def test_what_is_not_among_the_channels_or_small_travels_as_it_is() -> None:
    with world(replace(QUICK, compression="on")) as made:
        ours, _ = made.dial()
        send(ours, range(2), channel=Channel.ACTIVATION)
        send(ours, range(2), TEXT[:10_000])
        received(made.here, 4)
        assert ours.wire.out_bytes[Channel.ACTIVATION] > 2 * len(TEXT)
        assert ours.wire.out_bytes[Channel.BATCH] > 20_000


def test_off_at_one_end_is_off_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(replace(QUICK, compression="on")) as made:
        monkeypatch.setattr(dialler, "offered", lambda mode: ())
        ours, theirs = made.dial()
        send(theirs, range(2))
        received(made.there, 2)
        assert theirs.wire.out_bytes[Channel.BATCH] > 2 * len(TEXT)


def test_a_listener_of_an_older_version_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(replace(QUICK, compression="on")) as made:
        monkeypatch.setattr(listener, "offered", lambda mode: ())
        ours, _ = made.dial()
        send(ours, range(2))
        received(made.here, 2)
        assert ours.wire.out_bytes[Channel.BATCH] > 2 * len(TEXT)


def test_auto_finds_out_on_a_slow_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 MB/s: what compresses to a hundredth goes compressed once the line is measured, noise never does."""
    tried: list[bool] = []
    measured = squeeze.Payoff.measured

    def watch(payoff: squeeze.Payoff, *figures: object) -> None:
        measured(payoff, *figures)  # type: ignore[arg-type]
        tried.append(payoff.pays)

    monkeypatch.setattr(squeeze.Payoff, "measured", watch)
    with world(replace(QUICK, compression="auto")) as made, Relay(made.listener.port, rate_bytes_s=20e6) as relay:
        ours, _ = made.dial(relay.port)
        count = 0
        while not any(tried) and count < 60:
            send(ours, range(count, count + 4))
            count += 4
            made.here.wait_for(MessageArrived, count)
        assert any(tried), "compression was never found to pay"
        before = ours.wire.out_bytes[Channel.BATCH]
        send(ours, range(count, count + 4))
        assert received(made.here, count + 4)[-4:] == [TEXT] * 4
        assert ours.wire.out_bytes[Channel.BATCH] - before < len(TEXT)
        rate = ours.rate_bytes_s[0]
        assert rate is not None and 1e6 < rate < 60e6


def test_a_session_that_breaks_and_resumes_sends_compressed_messages_again() -> None:
    with world(replace(QUICK, compression="on")) as made, Relay(made.listener.port) as relay:
        ours, _ = made.dial(relay.port)
        standing = list(relay.links)
        for link in standing:
            link.cut_at("up", 1_000_000)  # in the middle of the bulk lane's compressed messages
        half = os.urandom(150_000) + bytes(2_000_000)
        send(ours, range(20), half)
        assert received(made.here, 20) == [half] * 20
        assert 20 * 150_000 < ours.wire.out_bytes[Channel.BATCH] < 2 * 20 * 150_000
        assert made.there.of(SessionResumed)
