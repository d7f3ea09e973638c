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
    FlatTensor,
    GroupEnded,
    Hello,
    Message,
    OpenGroup,
    Parcel,
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


def parcel(group: str, number: int, nbytes: int) -> Parcel:
    tensor = FlatTensor("uint8", nbytes)
    return Parcel(group=group, source=0, target=1, tag=0, number=number, offset=0, total=nbytes, tensor=tensor)


def test_a_rank_that_is_held_stays_its_own_and_its_traffic_with_it(orchestrator: Orchestrator) -> None:
    good, other, bad = (Peer(orchestrator, name) for name in ("good", "other", "bad"))
    good.say(OpenGroup("g", 0, 2, "good"))
    other.say(OpenGroup("g", 1, 2, "other"))
    relay = orchestrator._open_cluster().relay
    eventually(lambda: relay.sessions == 2, 20, "both are in the group")
    for rank, size in ((0, 2), (1, 2), (1, 3)):
        bad.say(OpenGroup("g", rank, size, "bad"))
    told = eventually(
        lambda: len(m := [m for m in bad.heard if isinstance(m, GroupEnded)]) == 3 and m, 20, "it is told"
    )
    assert "another session holds it (good)" in told[0].reason
    good.say(parcel("g", 1, 100), bytes(100))
    eventually(lambda: any(isinstance(m, Parcel) for m in other.heard), 20, "the parcel is there")
    heard = [*good.heard, *other.heard, *(m for m in bad.heard if isinstance(m, Parcel))]
    assert sum(isinstance(m, GroupEnded | Parcel) for m in heard) == 1
    for peer in (good, other, bad):
        peer.session.close()


def test_what_waits_for_a_rank_that_never_comes_is_bounded_and_ends_its_sender_by_name(
    orchestrator: Orchestrator,
) -> None:
    good, bad = Peer(orchestrator, "good"), Peer(orchestrator, "bad")
    relay = orchestrator._open_cluster().relay
    relay._most_waiting_bytes = 3 << 20
    bad.say(OpenGroup("g", 0, 2, "bad"))
    for number in range(1, 5):
        bad.say(parcel("g", number, 1 << 20), bytes(1 << 20))
    assert bad.closed.wait(20)
    [lost] = eventually(lambda: [w for w in orchestrator.status().workers if w.state == "lost"], 20, "it is lost")
    assert lost.name == "bad" and "3 MiB that wait for other ranks; the hub keeps 3 MiB" in lost.detail
    assert relay.sessions == 0 and not good.closed.is_set()
    good.session.close()


def test_names_of_any_length_are_cut(orchestrator: Orchestrator) -> None:
    peer = Peer(orchestrator, "n" * 1_000_000)
    [worker] = orchestrator.status().workers
    assert worker.name == "n" * 100 and max(map(len, orchestrator.status().notes)) < 10_000
    assert channel_of(peer.heard[0]) == Channel.CONTROL
    peer.session.close()
