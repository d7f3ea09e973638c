"""Why a worker's session ended, as the worker tells it: whoever is first to end it, the reason is the same."""

from __future__ import annotations

import pytest
import torch

from guava_nb.errors import GuavaError, LinkBroken, LinkClosed
from guava_nb.link.session_events import SessionClosed
from guava_nb.protocol.messages import Leave, Message
from guava_nb.worker.worker_session import WorkerSession


class Session:
    """An orchestrator that ends the session as soon as it hears of a leave, before the worker looks up."""

    rate_bytes_s = (None, None)

    def __init__(self) -> None:
        self.member = WorkerSession(None, torch.device("cpu"), "w0")
        self.sent: list[Message] = []

    def send(self, message: Message, channel: int, buffers: object = ()) -> None:
        self.sent.append(message)
        if isinstance(message, Leave):
            self.end(LinkClosed(f"hub:9 ended the session: {message.reason}"), True)

    def end(self, cause: GuavaError, by_peer: bool) -> None:
        self.member.on_event(SessionClosed(self, cause, by_peer))  # type: ignore[arg-type]

    def close(self, reason: str) -> None: ...

    def work(self) -> str:
        self.member.greet(self)  # type: ignore[arg-type]
        return self.member.work()


def test_a_worker_that_was_asked_to_leave_says_so_however_fast_the_orchestrator_is() -> None:
    session = Session()
    session.member.loop.leave("asked to leave")
    assert session.work() == "it was asked to leave"
    assert [message.reason for message in session.sent if isinstance(message, Leave)] == ["asked to leave"]


def test_a_session_that_the_orchestrator_closed_ends_with_its_reason() -> None:
    session = Session()
    session.end(LinkClosed("hub:9 ended the session: closed"), True)
    assert session.work() == "hub:9 ended the session: closed"


@pytest.mark.parametrize("cause", [LinkBroken("cut"), LinkClosed("given up")])
def test_an_orchestrator_that_was_lost_is_an_error(cause: GuavaError) -> None:
    session = Session()
    session.end(cause, False)
    with pytest.raises(type(cause), match=str(cause)):
        session.work()
