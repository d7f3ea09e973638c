"""Sessions over real TCP and TLS on loopback: what arrives, what survives, and what is told."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from guava_nb import Orchestrator
from guava_nb.errors import JoinRefused, LinkBroken, LinkClosed
from guava_nb.link import listener
from guava_nb.link.dialler import IDENTITY_BYTES, dial, visit
from guava_nb.link.handshake import attach
from guava_nb.link.listener import Listener
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import (
    MessageArrived,
    SessionClosed,
    SessionOpened,
    SessionResumed,
    SessionSuspect,
    VisitArrived,
)
from guava_nb.protocol.messages import Attach, Channel, CrashReport
from tests.support.links import (
    CHANNELS,
    FOREVER,
    QUICK,
    Recorder,
    World,
    check_exactly_once,
    eventually,
    exchange,
    nothing_left_behind,
    number_of,
    numbered,
    own_port,
    send_all,
    sizes,
    world,
)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


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


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_a_second_connection_of_a_session_wins(lane: str) -> None:
    with world(FOREVER) as made:
        ours, theirs = made.dial()
        ours.send(*numbered(0, Channel.CONTROL, 0))
        ours.send(*numbered(0, Channel.GRADIENT, 10))
        made.here.wait_for(MessageArrived, 2)
        record = Attach(session_id=ours.session_id, identity=ours.identity, purpose=lane, incarnation=1, received={})
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
        record = Attach(session_id=ours.session_id, identity=ours.identity, purpose=lane, incarnation=0, received={})
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


def test_a_visit() -> None:
    report = CrashReport(-9, ("killed",) * 100)
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


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_session_at_an_ipv6_address_is_reached_by_its_code_and_by_the_other_family() -> None:
    with Orchestrator(tunnel="direct:[::1]") as orch:
        code = orch.join_code
        assert code.host == "::1"
        for host in ("::1", "127.0.0.1"):
            session = dial(code.with_address(host, code.port, "tls"), Recorder(), QUICK)
            assert session.state == "open"
            session.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_hold_the_session_open() -> None:
    with nothing_left_behind(), world(FOREVER, port=own_port()) as made:
        ours, _ = made.dial()
        hold, release = os.pipe()
        runs, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(release)
            os.write(tell, b"!")
            os.read(hold, 1)
            os._exit(0)
        os.close(tell)
        assert os.read(runs, 1) == b"!"  # until it runs, it has closed nothing
        os.close(runs)
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


def test_many_sessions_at_once_and_when_they_are_over_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = threading.Event()
    monkeypatch.setattr(listener, "_GIVE_BACK_EVERY", 16)
    monkeypatch.setattr(listener, "_give_back_memory", given_back.set)
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
        assert made.listener.stats.accepted == 32 and not given_back.is_set()
        for session in sessions:
            session.close("done")
        assert given_back.wait(20)
