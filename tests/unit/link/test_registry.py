"""Which session an `Attach` belongs to."""

from __future__ import annotations

import pytest

from guava_nb.errors import JoinRefused
from guava_nb.link.options import LinkOptions
from guava_nb.link.registry import Registry
from guava_nb.link.session import Session
from guava_nb.protocol.messages import Attach

pytestmark = pytest.mark.timeout(30)


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
    assert len(registry._closed) == len(registry._past) == 1024
    assert registry.sessions() == [] and not registry._by_identity
    assert registry.session_id_of((2999).to_bytes(32, "big")) == (2999).to_bytes(16, "big")


def test_a_live_session_is_found_by_its_identity_however_many_come_and_go_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("guava_nb.link.registry._MAX_REMEMBERED", 8)
    registry: Registry[Session] = Registry()
    oldest = session()
    registry.add(oldest)
    assert registry.promote(oldest) is None
    live = []
    for number in range(30):
        one = session(number.to_bytes(16, "big"), number.to_bytes(32, "big"))
        registry.add(one)
        registry.promote(one)
        live.append(one)
    for one in live:
        registry.forget(one)
    assert registry.session_id_of(oldest.identity) == oldest.session_id  # its watcher's reports find it
    successor = session(b"t" * 16)
    assert registry.add(successor) and registry.promote(successor) is oldest
    registry.forget(oldest)  # closed after another took its place
    assert registry.session_id_of(oldest.identity) == successor.session_id


@pytest.mark.parametrize("bad", [attach(b"short"), attach(identity=b"short"), attach(purpose="shell")])
def test_registry_refuses_what_cannot_be_meant(bad: Attach) -> None:
    with pytest.raises(JoinRefused):
        Registry[Session]().check(bad)


def test_no_more_sessions_are_taken_than_a_listener_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guava_nb.link.registry.MOST_SESSIONS", 1)
    registry: Registry[Session] = Registry()
    known = session()
    registry.add(known)
    with pytest.raises(JoinRefused, match="1 workers and programs are connected here, and no more are taken"):
        registry.find(attach(b"t" * 16, b"j" * 32))
    assert registry.find(attach(number=1)) is known  # those that are here come back after a break
    registry.forget(known)
    assert registry.find(attach(b"t" * 16, b"j" * 32)) is None
