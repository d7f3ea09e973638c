"""A code holder that sends what it was not asked for, over real connections: its session ends by name, and others train on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from guava_nb import DistributedConfig, Orchestrator
from guava_nb.link.dialler import DialledSession, dial
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import Event, MessageArrived, SessionClosed
from guava_nb.protocol.messages import (
    Channel,
    GroupEnded,
    Hello,
    Message,
    OpenGroup,
    State,
    StoreAsk,
    StoreReply,
    TensorSpec,
    Tree,
    channel_of,
)
from tests.support.processes import eventually


class Peer:
    """A session that says hello and then what a test wants."""

    def __init__(self, orchestrator: Orchestrator, name: str) -> None:
        self.heard: list[Message] = []
        self.closed = threading.Event()
        self.session: DialledSession = dial(orchestrator.join_code, self.on_event, LinkOptions(compression="on"))
        self.say(
            Hello(
                name=name, program="spawned", versions={}, hostname="here", device="cpu", device_name="CPU", device_uuid=""
            )
        )  # fmt: skip
        eventually(lambda: self.heard, 20, "it has a seat")

    def on_event(self, event: Event) -> None:
        if isinstance(event, MessageArrived):
            self.heard.append(event.message)
            event.done()
        elif isinstance(event, SessionClosed):
            self.closed.set()

    def say(self, message: Message, payload: bytes = b"") -> None:
        self.session.send(message, channel_of(message), [memoryview(payload)] if payload else ())


@pytest.fixture
def orchestrator() -> Iterator[Orchestrator]:
    with Orchestrator(DistributedConfig()) as made:
        made.open()
        yield made


def test_a_state_that_was_not_asked_for_ends_its_senders_session_by_name(orchestrator: Orchestrator) -> None:
    good, bad = Peer(orchestrator, "good"), Peer(orchestrator, "bad")
    size = 32 << 20
    bad.say(State(1, "run-1", 0, Tree(b"", (TensorSpec("uint8", (size,), 0, size),))), bytes(size))
    assert bad.closed.wait(20)
    [lost] = eventually(lambda: [w for w in orchestrator.status().workers if w.state == "lost"], 20, "it is lost")
    assert lost.name == "bad" and f"announced a State of {size} bytes; it was asked for 0 at most" in lost.detail
    assert not good.closed.is_set()
    good.session.close()


def test_groups_and_keys_on_a_workers_word_are_bounded_and_refused_with_a_reason(orchestrator: Orchestrator) -> None:
    peer = Peer(orchestrator, "large")
    peer.say(OpenGroup("g", 0, 3_000_000, "large"))
    ended = eventually(lambda: [m for m in peer.heard if isinstance(m, GroupEnded)], 20, "it is refused")
    assert "rank 0 of 3000000 of group 'g' cannot be opened here" in ended[0].reason
    for number in range(18):
        peer.say(StoreAsk(number, "set", (f"k{number}",), (bytes(4 << 20),)))
    answers = eventually(
        lambda: len(found := [m for m in peer.heard if isinstance(m, StoreReply)]) == 18 and found, 30, "all"
    )
    assert [bool(answer.problem) for answer in answers] == [False] * 15 + [True] * 3
    peer.session.close()


def test_names_of_any_length_are_cut(orchestrator: Orchestrator) -> None:
    peer = Peer(orchestrator, "n" * 1_000_000)
    [worker] = orchestrator.status().workers
    assert worker.name == "n" * 100 and max(map(len, orchestrator.status().notes)) < 10_000
    assert channel_of(peer.heard[0]) == Channel.CONTROL
    peer.session.close()
