"""The small parts of the link that need no socket: seats, registry, log limit, pauses, options."""

from __future__ import annotations

import logging
import threading

import pytest

from guava_nb.errors import ConfigError, JoinRefused
from guava_nb.link.dialler import _Backoff, dial
from guava_nb.link.loglimit import LogLimit
from guava_nb.link.options import LinkOptions
from guava_nb.link.registry import Registry
from guava_nb.link.session import Session
from guava_nb.link.unauthenticated import Guests
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach
from guava_nb.transport.memory import memory_pair

pytestmark = pytest.mark.timeout(30)


def test_the_longest_seated_guest_leaves_first() -> None:
    guests = Guests(2)
    seats = [guests.sit(1), guests.sit(1)]
    pairs = [memory_pair() for _ in seats]
    for seat, pair in zip(seats, pairs, strict=True):
        guests.name(seat, pair[0])
    assert guests.sit(0.01) is None  # asked to leave, but not gone yet
    assert pairs[0][1].recv_into(memoryview(bytearray(1))) == 0
    pairs[1][0].send_all([b"still here"])
    waiting = threading.Timer(0.01, guests.leave, [seats[0]])
    waiting.start()
    assert guests.sit(10) is not None
    waiting.join()
    assert len(guests) == 2
    guests.leave(seats[0])  # twice is harmless
    assert len(guests) == 2


def session(session_id: bytes = b"s" * 16, identity: bytes = b"i" * 32) -> Session:
    return Session(session_id, identity, "somewhere", LinkOptions(), lambda event: None)


def attach(
    session_id: bytes = b"s" * 16, identity: bytes = b"i" * 32, purpose: str = "control", number: int = 0
) -> Attach:
    return Attach(session_id=session_id, identity=identity, purpose=purpose, incarnation=number, received={})


def test_registry_finds_by_id_and_identity() -> None:
    registry: Registry[Session] = Registry()
    known = session()
    assert registry.find(attach()) is None
    assert not registry.add(known)
    assert registry.find(attach()) is known
    assert registry.find(attach(purpose="bulk")) is known
    with pytest.raises(JoinRefused, match="another identity"):
        registry.find(attach(identity=b"x" * 32))
    with pytest.raises(JoinRefused, match="not known here"):
        registry.find(attach(b"t" * 16, purpose="bulk"))
    with pytest.raises(JoinRefused, match="not known here"):
        registry.find(attach(b"t" * 16, number=1))
    known._lanes["control"].incarnation = 3
    assert registry.find(attach(number=3)) is known
    with pytest.raises(JoinRefused, match="newer connection"):
        registry.find(attach(number=2))


def test_registry_knows_successors_and_the_dead() -> None:
    registry: Registry[Session] = Registry()
    first, second = session(), session(b"t" * 16)
    registry.add(first)
    assert registry.promote(first) is None
    assert registry.add(second)
    assert registry.session_id_of(b"i" * 32) == first.session_id
    assert registry.promote(second) is first
    assert registry.session_id_of(b"i" * 32) == second.session_id
    first.close_cause = JoinRefused("taken over")
    registry.forget(first)
    assert registry.sessions() == [second]
    with pytest.raises(JoinRefused, match="over: taken over"):
        registry.find(attach(number=4))
    assert registry.session_id_of(b"nobody" * 5 + b"xx") == b""


def test_registry_remembers_a_bounded_number() -> None:
    registry: Registry[Session] = Registry()
    for number in range(3000):
        one = session(number.to_bytes(16, "big"), number.to_bytes(32, "big"))
        registry.add(one)
        registry.promote(one)
        registry.forget(one)
    assert len(registry._closed) == len(registry._by_identity) == 1024
    assert registry.sessions() == []


@pytest.mark.parametrize("bad", [attach(b"short"), attach(identity=b"short"), attach(purpose="shell")])
def test_registry_refuses_what_cannot_be_meant(bad: Attach) -> None:
    with pytest.raises(JoinRefused):
        Registry[Session]().check(bad)


def test_log_lines_are_limited_and_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr("guava_nb.link.loglimit.time.monotonic", lambda: now[0])
    limit = LogLimit(logging.getLogger("test"), lines=3, window_s=10)
    for number in range(100):
        limit.warning("line %d", number)
    assert [record.message for record in caplog.records] == ["line 0", "line 1", "line 2"]
    now[0] = 11.0
    limit.warning("later")
    assert [record.message for record in caplog.records[3:]] == [
        "97 more lines like the ones before were left out",
        "later",
    ]


def test_pauses_between_attempts_grow_and_are_forgotten() -> None:
    backoff = _Backoff()
    now, attempts = 1000.0, 0
    assert backoff.next_s(now) == 0
    while now < 1060.0:
        pause_s = backoff.next_s(now)
        assert 0.04 < pause_s <= 3.0
        now += pause_s
        attempts += 1
    assert 20 < attempts < 100  # a tunnel counts connections per minute
    assert backoff.next_s(now + 60) == 0


@pytest.mark.parametrize(
    "bad", [{"heartbeat_s": 0}, {"window_bytes": 0}, {"max_unauthenticated": 0}, {"heartbeat_s": 5, "silence_s": 8}]
)
def test_options_that_cannot_work(bad: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LinkOptions(**bad)


def test_an_identity_of_another_length() -> None:
    with pytest.raises(ConfigError, match="32 bytes, not 3"):
        dial(JoinCode.new("127.0.0.1", 9), lambda event: None, identity=b"abc")
