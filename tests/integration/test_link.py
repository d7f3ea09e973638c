"""Sessions over real TCP and TLS on loopback: what arrives, what survives, and what is told."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from guava_nb.errors import JoinRefused, LinkBroken, LinkClosed, LinkTimeout, LocalProtocolError
from guava_nb.link.dialler import IDENTITY_BYTES, dial, visit
from guava_nb.link.events import (
    MessageArrived,
    SessionClosed,
    SessionOpened,
    SessionResumed,
    SessionSuspect,
    VisitArrived,
)
from guava_nb.link.handshake import attach
from guava_nb.link.listener import Listener
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.messages import Attach, Channel, CrashReport
from tests.support.links import (
    QUICK,
    Recorder,
    World,
    check_exactly_once,
    eventually,
    nothing_left_behind,
    number_of,
    numbered,
    world,
)
from tests.support.relay import DOWN, UP, Relay

pytestmark = pytest.mark.timeout(90)
CHANNELS = [Channel.CONTROL, Channel.GRADIENT, Channel.BATCH, Channel.CHECKPOINT]
FOREVER = replace(QUICK, silence_s=60.0)


def sizes(number: int) -> int:
    """Payload sizes from nothing to several frames."""
    return [0, 1, 3000, 100_000, 1 << 20, 3_500_000][number % 6]


def send_all(session, count: int, nbytes=sizes) -> None:
    for number in range(count):
        for channel in CHANNELS:
            session.send(*numbered(number, channel, nbytes(number)))


def exchange(made: World, ours, theirs, count: int, nbytes=sizes) -> None:
    """Send both ways at once; check that each message came once, in order, whole."""
    with ThreadPoolExecutor(2) as pool:
        for sent in [pool.submit(send_all, session, count, nbytes) for session in (ours, theirs)]:
            sent.result()
    for recorder in (made.here, made.there):
        recorder.wait_for(MessageArrived, count * len(CHANNELS), 60)
        check_exactly_once(recorder, CHANNELS, count, nbytes)


@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
def test_exchange_both_ways_on_several_channels(tls: bool) -> None:
    with nothing_left_behind(), world(FOREVER, tls) as made:
        ours, theirs = made.dial()
        exchange(made, ours, theirs, 24)
        payload_bytes = sum(sizes(number) for number in range(24))
        for session in (ours, theirs):
            for channel in CHANNELS[1:]:
                overhead = 24 * 200 + 32 * (payload_bytes >> 20)
                assert payload_bytes < session.wire.out_bytes[channel] < payload_bytes + overhead
                assert session.wire.in_bytes[channel] == session.wire.out_bytes[channel]
            assert session.backlog_bytes() == 0
        assert made.here.of(SessionSuspect) == made.there.of(SessionSuspect) == []


def test_opening_and_round_trip() -> None:
    with world() as made:
        ours, theirs = made.dial()
        assert ours.session_id == theirs.session_id
        assert ours.state == theirs.state == "open"
        assert [event.resumed for event in made.here.of(SessionOpened)] == [False]
        eventually(lambda: ours.round_trip_s and theirs.round_trip_s)
        assert 0 < ours.round_trip_s < 5
        assert "secret" not in repr(ours).lower()
        assert ours.identity.hex() not in repr(ours)


def test_heartbeats_keep_an_idle_session() -> None:
    options = replace(QUICK, heartbeat_s=0.05, silence_s=0.6)
    with world(options) as made:
        ours, _ = made.dial()
        one_ping = ours.wire.out_bytes[Channel.HEARTBEAT] or 40
        eventually(lambda: ours.wire.in_bytes[Channel.HEARTBEAT] > 60 * one_ping, timeout_s=30)
        assert made.here.of(SessionSuspect) == made.there.of(SessionSuspect) == []


def test_silence_is_noticed_and_survived() -> None:
    with world() as made, Relay(made.listener.port) as relay:
        ours, theirs = made.dial(relay.port)
        for link in relay.links:
            link.stall()
        for recorder in (made.here, made.there):
            suspect = recorder.wait_for(SessionSuspect)[0]
            assert isinstance(suspect.cause, (LinkTimeout, LinkBroken))
        assert any(isinstance(r.of(SessionSuspect)[0].cause, LinkTimeout) for r in (made.here, made.there))
        for recorder in (made.here, made.there):
            recorder.wait_for(SessionResumed)
        exchange(made, ours, theirs, 3)


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


def exchange_the_rest(made: World, theirs, count: int) -> None:
    send_all(theirs, count)
    for recorder in (made.here, made.there):
        recorder.wait_for(MessageArrived, count * len(CHANNELS), 60)
        check_exactly_once(recorder, CHANNELS, count, sizes)


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("byte", [150_000, 2_000_000, 7_654_321])
def test_bulk_cut_in_the_middle_of_a_message(way: str, byte: int) -> None:
    with world(FOREVER) as made, Relay(made.listener.port) as relay:
        relay.plans = [{}, {way: byte}]  # the second connection is bulk
        ours, theirs = made.dial(relay.port)
        exchange(made, ours, theirs, 12)
        assert relay.links[1].is_cut.is_set()
        assert len(relay.links) == 3


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


def exchange_done(made: World, count: int) -> None:
    for recorder in (made.here, made.there):
        recorder.wait_for(MessageArrived, count * len(CHANNELS), 60)
        check_exactly_once(recorder, CHANNELS, count, sizes)


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


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_a_second_connection_of_a_session_wins(lane: str) -> None:
    with world(FOREVER) as made:
        ours, theirs = made.dial()
        ours.send(*numbered(0, Channel.CONTROL, 0))
        ours.send(*numbered(0, Channel.GRADIENT, 10))
        made.here.wait_for(MessageArrived, 2)
        record = Attach(ours.session_id, ours.identity, lane, 1, {})
        second = attach(made.listener.join_code(), record, QUICK, 5)
        assert second.attached.resumed
        assert second.attached.received == {(1 if lane == "control" else 4): 1}
        # The dialler's own connection was closed; it comes back with a higher number and wins in turn.
        made.there.wait_for(SessionResumed)
        made.here.wait_for(SessionResumed, 2)
        second.stream.set_deadline(10)
        while second.stream.recv_into(memoryview(bytearray(4096))):
            pass
        second.stream.close()
        assert made.here.of(SessionClosed) == []
        ours.send(*numbered(1, Channel.CONTROL, 0))
        ours.send(*numbered(1, Channel.GRADIENT, 10))
        made.here.wait_for(MessageArrived, 4)
        for number in (2, 3, 4):
            ours.send(*numbered(number, Channel.GRADIENT, 10))
        made.here.wait_for(MessageArrived, 7)
        check_exactly_once(made.here, [Channel.GRADIENT], 5, lambda number: 10)
        # An older number than the one that stands is refused.
        record = Attach(ours.session_id, ours.identity, lane, 0, {})
        with pytest.raises(JoinRefused, match="newer connection"):
            attach(made.listener.join_code(), record, QUICK, 5)


def test_a_second_process_with_the_same_identity_takes_the_place() -> None:
    identity = bytes(range(IDENTITY_BYTES))
    with nothing_left_behind(), world() as made:
        first, first_there = made.dial(identity=identity)
        second, second_there = made.dial(identity=identity)
        closed = made.there.wait_for(SessionClosed)[0]
        assert closed.session is first
        assert closed.by_peer
        assert "same identity" in str(closed.cause)
        assert made.here.wait_for(SessionClosed)[0].session is first_there
        assert [event.resumed for event in made.here.of(SessionOpened)] == [False, True]
        order = [event for event in made.here.events if isinstance(event, (SessionOpened, SessionClosed))]
        assert isinstance(order[1], SessionClosed)
        second.send(*numbered(0, Channel.CONTROL, 0))
        assert made.here.wait_for(MessageArrived)[0].session is second_there
        assert second.state == "open"


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


def test_goodbye_comes_after_all_that_was_sent() -> None:
    with nothing_left_behind(), world(replace(FOREVER, linger_s=30.0)) as made:
        ours, _ = made.dial()
        send_all(ours, 12)
        ours.close("done")
        made.here.wait_for(SessionClosed)
        check_exactly_once(made.here, CHANNELS, 12, sizes)
        closed = made.here.of(SessionClosed)[0]
        assert closed.by_peer
        assert "done" in str(closed.cause)
        assert not made.there.of(SessionClosed)[0].by_peer
        ours.close()
        with pytest.raises(LinkClosed):
            ours.send(*numbered(0, Channel.CONTROL, 0))


def test_a_closed_listener_says_goodbye_and_nobody_redials() -> None:
    with nothing_left_behind(), world() as made:
        sessions = [made.dial()[0] for _ in range(3)]
        made.listener.close("the orchestrator goes home")
        for closed in made.there.wait_for(SessionClosed, 3):
            assert closed.by_peer
            assert "goes home" in str(closed.cause)
        assert {session.state for session in sessions} == {"closed"}
        made.listener.close()


def test_close_from_within_an_event() -> None:
    with nothing_left_behind(), world() as made:
        recorder = Recorder()

        def close_at_once(event) -> None:
            recorder(event)
            if isinstance(event, MessageArrived):
                event.session.close("heard enough")

        ours = dial(made.listener.join_code(), close_at_once, replace(QUICK, linger_s=0.2))
        theirs = made.here.wait_for(SessionOpened)[0].session
        theirs.send(*numbered(0, Channel.CONTROL, 0))
        recorder.wait_for(SessionClosed)
        made.here.wait_for(SessionClosed)
        assert recorder.problems == []
        assert ours.state == "closed"


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


def test_a_slow_consumer_holds_the_sender_back() -> None:
    options = replace(FOREVER, window_bytes=1 << 20)
    with world(options, consume=False) as made:
        ours, _ = made.dial()
        for number in range(10):
            ours.send(*numbered(number, Channel.BATCH, 400_000))
        ours.send(*numbered(0, Channel.GRADIENT, 100))  # credit is per channel
        made.here.wait_for(MessageArrived, 3)
        eventually(lambda: len(made.here.of(MessageArrived)) == 3, "two batches and the gradient fit")
        assert ours.backlog_bytes(Channel.BATCH) > 7 * 400_000
        taken = 0
        while taken < 11:
            made.here.wait_for(MessageArrived, taken + 1)
            made.here.of(MessageArrived)[taken].done()
            made.here.of(MessageArrived)[taken].done()  # a second time means nothing
            taken += 1
        assert ours.backlog_bytes() == 0


def test_a_payload_outlives_done() -> None:
    with world(FOREVER) as made:
        ours, _ = made.dial()
        for number in range(30):
            ours.send(*numbered(number, Channel.BATCH, 1 << 20))
        made.here.wait_for(MessageArrived, 30)  # the recorder calls done() and keeps the event
        check_exactly_once(made.here, [Channel.BATCH], 30, lambda number: 1 << 20)


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


def test_a_visit() -> None:
    report = CrashReport("worker-1", -9, ("killed",) * 100)
    with nothing_left_behind(), world() as made:
        ours, _ = made.dial()
        visit(made.listener.join_code(), ours.identity, report, QUICK)
        visit(made.listener.join_code(), bytes(IDENTITY_BYTES), report, QUICK)
        known, unknown = made.here.wait_for(VisitArrived, 2)
        assert known.session_id == ours.session_id
        assert unknown.session_id == b""
        assert known.message == unknown.message == report


def test_a_failing_owner_does_not_stop_the_session(caplog: pytest.LogCaptureFixture) -> None:
    with world() as made:
        seen: list[int] = []

        def fail(event) -> None:
            if isinstance(event, MessageArrived):
                seen.append(number_of(event.message))
                event.done()
                raise RuntimeError("a bug of the owner")

        ours = dial(made.listener.join_code(), fail, QUICK)
        made.dialled.append(ours)
        theirs = made.here.wait_for(SessionOpened)[0].session
        for number in range(3):
            theirs.send(*numbered(number, Channel.CONTROL, 0))
        eventually(lambda: seen == [0, 1, 2])
        assert ours.state == "open"
    assert "a bug of the owner" in caplog.text


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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_localhost_on_both_families(host: str) -> None:
    try:
        made = World(QUICK, host=host)
    except Exception as problem:
        pytest.skip(f"no {host} here: {problem}")
    targets = {"localhost": ["localhost", "127.0.0.1", "::1"]}.get(host, [host])
    sessions = []
    for target in targets:
        try:
            sessions.append(dial(made.listener.join_code(target), made.there, QUICK))
        except LinkBroken:
            assert target == "::1"  # a machine without IPv6
    made.here.wait_for(SessionOpened, len(sessions))
    for session in sessions:
        session.close()
    made.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_hold_the_session_open() -> None:
    with nothing_left_behind(), world(FOREVER) as made:
        ours, _ = made.dial()
        hold, release = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        try:
            ours.send(*numbered(0, Channel.CONTROL, 0))
            made.here.wait_for(MessageArrived)
            ours.close("gone")
            closed = made.here.wait_for(SessionClosed)[0]
            assert closed.by_peer
            port = made.listener.port
            made.listener.close()
            again = Listener(QUICK, Recorder(), port=port)
            again.start()
            again.close()
        finally:
            os.close(release)
            os.waitpid(child, 0)
            os.close(hold)


def test_threads_are_daemons_with_our_name() -> None:
    before = set(threading.enumerate())
    with world() as made:
        made.dial()
        eventually(lambda: not any("guest" in thread.name for thread in threading.enumerate()))
        mine = set(threading.enumerate()) - before
        assert len(mine) == 9  # the listener, and on each side a reader and a writer for each lane
        assert all(thread.daemon and thread.name.startswith("guava-") for thread in mine)


def test_many_sessions_at_once() -> None:
    options = LinkOptions(heartbeat_s=0.2, silence_s=30, grace_s=10)
    with nothing_left_behind(), world(options, tls=False) as made:
        with ThreadPoolExecutor(8) as pool:
            sessions = list(pool.map(lambda _: dial(made.listener.join_code(), made.there, options), range(16)))
        made.dialled += sessions
        opened = made.here.wait_for(SessionOpened, 16)
        assert len({event.session.session_id for event in opened}) == 16
        for session in sessions:
            session.send(*numbered(0, Channel.GRADIENT, 100_000))
        made.here.wait_for(MessageArrived, 16)
        assert made.listener.stats.accepted == 32
