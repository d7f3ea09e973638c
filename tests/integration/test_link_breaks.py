"""Sessions over real TCP and TLS on loopback: what survives when a relay cuts, stalls or refuses."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from guava_nb.errors import JoinRefused, LinkBroken, LinkClosed, LinkTimeout, LocalProtocolError
from guava_nb.link import dialler
from guava_nb.link.dialler import IDENTITY_BYTES
from guava_nb.link.listener import Listener
from guava_nb.link.session_events import (
    MessageArrived,
    SessionClosed,
    SessionResumed,
    SessionSuspect,
)
from guava_nb.protocol.messages import Channel
from tests.support.links import (
    CHANNELS,
    FOREVER,
    QUICK,
    Recorder,
    World,
    check_exactly_once,
    eventually,
    exchange,
    exchange_done,
    exchange_the_rest,
    nothing_left_behind,
    numbered,
    send_all,
    sizes,
    world,
)
from tests.support.relay import DOWN, UP, Relay


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_silence_is_noticed_and_survived_and_another_address_is_no_matter(address: str) -> None:
    """What a machine's old address was sent gets no answer any more, as where it moved to another network."""
    with world() as made, Relay(made.listener.port) as relay:
        ours, theirs = made.dial(relay.port)
        relay.source = address
        for link in relay.links:
            link.stall()
        for recorder in (made.here, made.there):
            suspect = recorder.wait_for(SessionSuspect)[0]
            assert isinstance(suspect.cause, (LinkTimeout, LinkBroken))
        assert any(isinstance(r.of(SessionSuspect)[0].cause, LinkTimeout) for r in (made.here, made.there))
        for recorder in (made.here, made.there):
            recorder.wait_for(SessionResumed)
        exchange(made, ours, theirs, 3)
        assert theirs.peer_address.startswith(f"{address}:")


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("lane", [0, 1], ids=["control", "bulk"])
@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_a_cut_connection_resumes(lane: int, reset: bool, tls: bool) -> None:
    with nothing_left_behind(), world(FOREVER, tls) as made, Relay(made.listener.port) as relay:
        ours, theirs = made.dial(relay.port)
        sending = threading.Thread(target=send_all, args=(ours, 12))
        sending.start()
        relay.links[lane].cut(reset)
        sending.join()
        exchange_the_rest(made, theirs, 12)
        for recorder in (made.here, made.there):
            recorder.wait_for(SessionResumed)
            assert recorder.of(SessionClosed) == []
        assert len(relay.links) == 3


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("byte", [150_000, 2_000_000, 7_654_321])
def test_bulk_cut_in_the_middle_of_a_message(way: str, byte: int) -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as relay:
        relay.plans = [{}, {way: byte}]  # the second connection is bulk
        ours, theirs = made.dial(relay.port)
        exchange(made, ours, theirs, 12)
        assert relay.links[1].is_cut.is_set()
        assert len(relay.links) == 3


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_message_gets_through_a_line_that_passes_a_part_of_it_at_a_time(
    way: str, tls: bool, reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for a reader on a busy machine to read what came: what is unread when the next connection asks is sent again.
    monkeypatch.setattr(dialler, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(dialler, "_FIRST_PAUSE_S", 0.1)
    passes, nbytes = 700_000, 4_000_000  # less than one frame
    with world(FOREVER, tls) as made, Relay(made.listener.port, resets=reset) as relay:
        relay.plans = [{}, *({way: passes} for _ in range(60))]
        ours, theirs = made.dial(relay.port)
        sender, receiver = (ours, made.here) if way == UP else (theirs, made.there)
        sender.send(*numbered(0, Channel.CHECKPOINT, nbytes))
        receiver.wait_for(MessageArrived)
        check_exactly_once(receiver, [Channel.CHECKPOINT], 1, lambda number: nbytes)
        # Some of what a connection passed last may not be read before the next one asks where to go on.
        assert sum(link.bytes[way] for link in relay.links) < 2 * nbytes


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("lane", [0, 1], ids=["control", "bulk"])
def test_a_cut_within_the_handshake_fails_the_dial(lane: int, way: str) -> None:
    options = replace(QUICK, auth_timeout_s=0.3)
    with nothing_left_behind(), world(options) as made, Relay(made.listener.port) as relay:
        relay.plans = [{} for _ in range(lane)] + [{way: 420}]
        with pytest.raises((LinkBroken, LinkTimeout)):
            made.dial(relay.port)
        eventually(lambda: made.listener.sessions == [])
        assert made.here.events == made.there.events == []
        made.dial(relay.port)


@pytest.mark.parametrize("byte", [2_500, 3_000, 4_000, 5_000])
def test_control_cut_in_the_middle_of_a_message(byte: int) -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as relay:
        relay.plans = [{UP: byte}]
        ours, theirs = made.dial(relay.port)
        count = 150
        for number in range(count):
            ours.send(*numbered(number, Channel.CONTROL, 0))
        made.here.wait_for(MessageArrived, count)
        check_exactly_once(made.here, [Channel.CONTROL], count, sizes)
        assert relay.links[0].is_cut.is_set()


def test_all_connections_cut_again_and_again() -> None:
    with nothing_left_behind(), world(FOREVER) as made, Relay(made.listener.port) as relay:
        ours, theirs = made.dial(relay.port)
        with ThreadPoolExecutor(2) as pool:
            senders = [pool.submit(send_all, session, 30) for session in (ours, theirs)]
            for round_ in range(4):
                made.here.wait_until(lambda: len(made.here.of(MessageArrived)) >= 12 * (round_ + 1))  # noqa: B023
                relay.cut_all(reset=bool(round_ % 2))
                made.there.wait_for(SessionResumed, round_ + 1)
            for sender in senders:
                sender.result()
        for recorder in (made.here, made.there):
            recorder.wait_for(MessageArrived, 30 * len(CHANNELS), 60)
            check_exactly_once(recorder, CHANNELS, 30, sizes)
            assert len(recorder.of(MessageArrived)) == 30 * len(CHANNELS)


def test_what_is_sent_while_suspect_arrives_after_it() -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as relay:
        ours, theirs = made.dial(relay.port)
        relay.refuse()
        relay.cut_all()
        made.there.wait_for(SessionSuspect)
        made.here.wait_for(SessionSuspect)
        assert ours.state == theirs.state == "suspect"
        send_all(ours, 6)
        send_all(theirs, 6)
        assert ours.backlog_bytes() > 5_000_000
        assert ours.backlog_bytes(Channel.BATCH) > 1_000_000
        relay.admit()
        exchange_done(made, 6)
        assert ours.state == theirs.state == "open"


def test_grace_over_closes_both_sides() -> None:
    options = replace(QUICK, grace_s=0.5)
    with nothing_left_behind(), world(options) as made, Relay(made.listener.port) as relay:
        ours, theirs = made.dial(relay.port)
        relay.refuse()
        relay.cut_all()
        started = time.monotonic()
        for recorder in (made.here, made.there):
            closed = recorder.wait_for(SessionClosed)[0]
            assert isinstance(closed.cause, LinkTimeout)
            assert "away for more than 0.5 s" in str(closed.cause)
            assert not closed.by_peer
        assert time.monotonic() - started < 15
        with pytest.raises(LinkClosed, match="away for more than"):
            ours.send(*numbered(0, Channel.CONTROL, 0))
        assert made.listener.sessions == []


def test_a_listener_that_is_gone_is_given_up() -> None:
    options = replace(QUICK, grace_s=0.5)
    with nothing_left_behind():
        made = World(options)
        with Relay(made.listener.port) as relay:
            ours, _ = made.dial(relay.port)
        assert isinstance(made.there.wait_for(SessionClosed)[0].cause, LinkTimeout)
        assert "connection refused" in str(made.there.of(SessionClosed)[0].cause)
        made.close()


def test_a_listener_that_was_started_anew_says_so() -> None:
    with nothing_left_behind(), world() as made, world() as other, Relay(made.listener.port) as relay:
        ours, _ = made.dial(relay.port)
        anew = Listener(QUICK, Recorder(), secret=made.listener.join_code().secret)
        anew._tls, anew._fingerprint = made.listener._tls, made.listener._fingerprint
        anew.start()
        relay.target = ("127.0.0.1", anew.port)
        relay.cut_all()
        closed = made.there.wait_for(SessionClosed)[0]
        assert isinstance(closed.cause, JoinRefused)
        assert "started anew" in str(closed.cause)
        anew.close()
        other.dial()


def test_a_new_address_of_the_same_listener() -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as old, Relay(made.listener.port) as new:
        ours, theirs = made.dial(old.port)
        old.refuse()
        old.cut_all()
        made.there.wait_for(SessionSuspect)
        ours.redirect(made.listener.join_code("127.0.0.1", new.port))
        made.there.wait_for(SessionResumed)
        exchange(made, ours, theirs, 2)
        assert len(new.links) == 2


def test_the_place_of_a_dead_process_is_taken_while_it_is_suspect() -> None:
    identity = bytes(IDENTITY_BYTES)
    with world() as made, Relay(made.listener.port) as relay:
        first, first_there = made.dial(relay.port, identity)
        relay.refuse()
        relay.cut_all()
        made.here.wait_for(SessionSuspect)
        made.dial(identity=identity)
        assert made.here.wait_for(SessionClosed)[0].session is first_there
        relay.admit()
        closed = made.there.wait_for(SessionClosed)[0]
        assert closed.session is first
        assert isinstance(closed.cause, JoinRefused)
        assert "same identity" in str(closed.cause)


def test_send_never_waits_for_the_network() -> None:
    with world(replace(FOREVER, linger_s=0.1)) as made, Relay(made.listener.port) as relay:
        ours, _ = made.dial(relay.port)
        for link in relay.links:
            link.stall()
        big = numbered(0, Channel.GRADIENT, 8 << 20)
        slowest = 0.0
        for _ in range(40):
            started = time.monotonic()
            ours.send(*big)
            slowest = max(slowest, time.monotonic() - started)
        for number in range(3000):  # small ones fill the sockets too
            started = time.monotonic()
            ours.send(*numbered(number, Channel.CONTROL, 0))
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < 2.0
        assert ours.backlog_bytes() > 100 << 20
        for link in relay.links:
            link.flow()
        made.here.wait_for(MessageArrived, 3040, 60)


def test_urgent_messages_overtake_bulk() -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as relay:
        ours, _ = made.dial(relay.port)
        relay.links[1].stall()
        ours.send(*numbered(0, Channel.CHECKPOINT, 48 << 20))
        ours.send(*numbered(0, Channel.BATCH, 100))
        ours.send(*numbered(0, Channel.COLLECTIVE, 100))
        relay.links[1].flow()
        arrived = made.here.wait_for(MessageArrived, 3)
        assert [event.channel for event in arrived] == [Channel.COLLECTIVE, Channel.BATCH, Channel.CHECKPOINT]


def test_progress_is_exchanged_whenever_a_connection_is_attached() -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as relay:
        ours, theirs = made.dial(relay.port)
        assert theirs.peer_progress.last_step == -1
        ours.progress.last_generation, ours.progress.last_step, ours.progress.last_kind = 2, 17, 30
        theirs.progress.last_step = 18
        relay.cut_all()
        made.here.wait_for(SessionResumed)
        made.there.wait_for(SessionResumed)
        seen = theirs.peer_progress
        assert (seen.last_generation, seen.last_step, seen.last_kind) == (2, 17, 30)
        assert ours.peer_progress.last_step == 18


def test_a_released_payload_ends_the_session_with_a_sentence() -> None:
    with world() as made, Relay(made.listener.port) as relay:
        ours, _ = made.dial(relay.port)
        relay.refuse()
        relay.cut_all()
        made.there.wait_for(SessionSuspect)
        message, channel, buffers = numbered(0, Channel.GRADIENT, 5_000_000)
        ours.send(message, channel, buffers)
        for lane in ours._lanes.values():  # the owner breaks its promise
            for queue in lane.outbox._queues.values():
                for waiting in queue.waiting:
                    for view in waiting._buffers:
                        view.release()
        relay.admit()
        closed = made.there.wait_for(SessionClosed)[0]
        assert isinstance(closed.cause, LocalProtocolError)
        assert "released before the peer had it" in str(closed.cause)


def test_an_interrupt_while_sending_costs_only_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as relay:
        ours, _ = made.dial(relay.port)
        eventually(lambda: ours.round_trip_s)
        stream = ours._lanes["control"].connection._stream

        def interrupted(buffers) -> None:
            genuine([memoryview(buffers[0])[:20]])
            raise KeyboardInterrupt

        genuine = stream.send_all
        monkeypatch.setattr(stream, "send_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.send(*numbered(0, Channel.CONTROL, 0))
        ours.send(*numbered(1, Channel.CONTROL, 0))
        made.there.wait_for(SessionResumed)
        made.here.wait_for(MessageArrived, 2)
        check_exactly_once(made.here, [Channel.CONTROL], 2, sizes)


def outage(made: World, first: Relay, second: Relay) -> list:
    """A listener behind a tunnel, with a session through each relay; gives the dialled ends."""
    made.listener.patience.outage_s = 60.0
    return [made.dial(relay.port)[0] for relay in (first, second)]


def test_behind_a_tunnel_one_that_is_gone_is_given_up_after_its_grace() -> None:
    options = replace(QUICK, grace_s=0.5)
    with (
        nothing_left_behind(),
        world(options) as made,
        Relay(made.listener.port) as one,
        Relay(made.listener.port) as two,
    ):
        gone, stays = outage(made, one, two)
        one.refuse()
        one.cut_all()
        closed = made.here.wait_for(SessionClosed)[0]
        assert closed.session.session_id == gone.session_id and "away for more than 0.5 s" in str(closed.cause)
        assert stays.state == "open" and gone.state == "suspect", "who dials is patient: it may be the tunnel"


def test_behind_a_tunnel_all_are_kept_when_all_break_together_and_when_it_says_that_it_is_down() -> None:
    options = replace(QUICK, grace_s=0.5)
    with (
        nothing_left_behind(),
        world(options) as made,
        Relay(made.listener.port) as one,
        Relay(made.listener.port) as two,
    ):
        ours, theirs = outage(made, one, two), made.listener.sessions
        for relay in (one, two):
            relay.refuse()
            relay.cut_all()
        made.here.wait_for(SessionSuspect, 2)
        eventually(lambda: min(session.patience_s(time.monotonic()) or 0 for session in theirs) > 30, "both are kept")
        eventually(
            lambda: min(session.patience_s(time.monotonic()) or 0 for session in ours) > 30, "and so do they wait"
        )
        one.admit()
        made.here.wait_for(SessionResumed, 1)
        closed = made.here.wait_for(SessionClosed)[0]
        assert closed.session.session_id == ours[1].session_id, "one is back, so the other one is gone"
        made.listener.patience.went_down(time.monotonic())
        one.refuse()
        one.cut_all()
        made.here.wait_for(SessionSuspect, 3)
        (kept,) = made.listener.sessions
        assert (kept.patience_s(time.monotonic()) or 0) > 30
        ours[0].redirect(made.listener.join_code("127.0.0.1", made.listener.port))
        made.here.wait_for(SessionResumed, 2)
        made.listener.patience.came_up(time.monotonic(), moved=True)
