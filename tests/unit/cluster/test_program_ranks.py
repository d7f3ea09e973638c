"""Sessions that are no workers: what is said of them, and how long they may be away."""

from __future__ import annotations

import threading
from typing import Any

from guava_nb.cluster.program_ranks import Programs
from guava_nb.errors import GuavaError, LinkBroken
from guava_nb.link.session_events import SessionClosed, SessionResumed, SessionSuspect
from guava_nb.protocol.messages import OpenGroup, StoreAsk

BROKE = LinkBroken("it broke")
FOR_EVER_S = 3600.0


class FakeSession:
    session_id = b"id"

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.cause: GuavaError | None = None

    def end(self, cause: GuavaError, by_peer: bool, farewell: str) -> None:
        self.cause = cause
        self.ended.set()


def joined(patience_s: float = FOR_EVER_S) -> tuple[Programs, Any, list[str]]:
    said: list[str] = []
    programs, session = Programs(said.append, patience_s), FakeSession()
    programs.on_message(session, OpenGroup("g", 0, 2, "host:0"))  # type: ignore[arg-type]
    return programs, session, said


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "guava-away"]


def test_a_program_is_announced_once() -> None:
    programs, session, said = joined()
    programs.on_message(session, OpenGroup("g/sub", 0, 1, "host:0"))
    programs.on_change(SessionClosed(session, BROKE, False))
    assert said == [
        "a program joined as rank 0 of 2 (host:0)",
        "a program's rank 0 of 2 (host:0) was lost: it broke",
    ]


def test_who_stays_away_is_given_up() -> None:
    programs, session, _ = joined(patience_s=0.01)
    programs.on_change(SessionSuspect(session, BROKE))
    assert session.ended.wait(10)
    assert "did not come back within 0.01 s" in str(session.cause)
    programs.close()


def test_who_comes_back_is_not() -> None:
    programs, session, _ = joined()
    programs.on_change(SessionSuspect(session, BROKE))
    (timer,) = timers()
    programs.on_change(SessionResumed(session))
    timer.join(10)
    assert not timers() and not session.ended.is_set()


def test_a_session_that_said_nothing_yet_is_left_alone() -> None:
    said: list[str] = []
    programs, session = Programs(said.append, FOR_EVER_S), FakeSession()
    programs.on_change(SessionSuspect(session, BROKE))  # type: ignore[arg-type]
    assert not timers()
    programs.on_message(session, StoreAsk(1, "get", ("k",)))  # type: ignore[arg-type]
    programs.on_change(SessionSuspect(session, BROKE))  # type: ignore[arg-type]
    (timer,) = timers()
    programs.close()
    timer.join(10)
    assert not timers() and said == []
