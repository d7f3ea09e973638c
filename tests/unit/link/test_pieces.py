"""The small parts of the link that need no socket: pool, seats, registry, log limit, pauses, options."""

from __future__ import annotations

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import ConfigError, JoinRefused
from guava_nb.link.dialler import _Backoff, dial
from guava_nb.link.guests import Guests
from guava_nb.link.loglimit import LogLimit
from guava_nb.link.options import LinkOptions
from guava_nb.link.pool import PayloadPool, _size_class
from guava_nb.link.registry import Registry
from guava_nb.link.session import Session
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach
from guava_nb.transport.memory import memory_pair

pytestmark = pytest.mark.timeout(30)
MIB = 1 << 20


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_the_pool_reuses_what_nobody_holds() -> None:
    pool = PayloadPool()
    view = pool.allocate(MIB)
    where = address(view)
    assert (view.nbytes, view.readonly, view.format, view.ndim) == (MIB, False, "B", 1)
    del view
    assert address(pool.allocate(MIB)) == where


@pytest.mark.parametrize("hold", [lambda v: v, lambda v: v[5:6], lambda v: np.frombuffer(v, np.uint8)[3:]])
def test_the_pool_leaves_alone_what_somebody_holds(hold) -> None:
    pool = PayloadPool()
    view = pool.allocate(MIB)
    where = address(view)
    held = hold(view)
    del view
    assert address(pool.allocate(MIB)) != where
    del held
    gc.collect()
    assert where in {address(view) for view in [pool.allocate(MIB) for _ in range(2)]}


def test_a_tensor_over_a_payload_holds_it() -> None:
    torch = pytest.importorskip("torch")
    pool = PayloadPool()
    view = pool.allocate(MIB)
    where = address(view)
    tensor = torch.frombuffer(view, dtype=torch.float32)[10:]
    del view
    assert address(pool.allocate(MIB)) != where
    del tensor
    gc.collect()
    assert where in {address(view) for view in [pool.allocate(MIB) for _ in range(2)]}


def test_the_pool_keeps_no_more_than_told() -> None:
    pool = PayloadPool(keep_bytes=4 * MIB)
    views = [pool.allocate(MIB) for _ in range(10)]
    assert pool.kept_bytes <= 4 * MIB
    assert len({address(view) for view in views}) == 10
    assert pool.allocate(64 * MIB).nbytes == 64 * MIB
    assert pool.kept_bytes <= 4 * MIB
    assert PayloadPool(0).allocate(MIB).nbytes == MIB
    assert pool.allocate(0).nbytes == 0


def test_the_pool_never_gives_one_buffer_to_two() -> None:
    pool = PayloadPool()

    def work(seed: int) -> None:
        for index in range(200):
            view = pool.allocate(MIB // 2)
            mark = bytes([seed, index % 251]) * 50
            view[:100] = mark
            view[-100:] = mark
            assert view[:100] == view[-100:] == mark

    with ThreadPoolExecutor(4) as workers:
        list(workers.map(work, range(4)))


@given(st.integers(256 << 10, 1 << 40))
@settings(max_examples=200, deadline=None)
def test_size_classes_fit_and_waste_at_most_a_quarter(nbytes: int) -> None:
    size = _size_class(nbytes)
    assert nbytes <= size <= nbytes * 1.25 + 1
    assert _size_class(size) == size


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
    return Attach(session_id, identity, purpose, number, {})


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
