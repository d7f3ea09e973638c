"""Ranks that meet at a hub again and again: each run has its own name, and a rank that is early waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.backend import rendezvous
from guava_nb.backend.endpoint import Endpoint
from guava_nb.backend.rendezvous import Rendezvous, meet
from guava_nb.errors import CollectiveTimeout, ConfigError, LinkBroken
from guava_nb.hub.relay import Relay
from guava_nb.link.session_events import MessageArrived, SessionClosed
from guava_nb.protocol.messages import channel_of

JOB = "program"


class Hub:
    """A relay whose clients are endpoints in this process: no sockets."""

    def __init__(self) -> None:
        self.relay, self.asked, self._number = Relay(), threading.Semaphore(0), 0
        self._pool = ThreadPoolExecutor(8)

    def dial(self, member: str) -> tuple[Endpoint, Callable[[], None]]:
        """A session; returns its endpoint, and what ends it."""
        self._number += 1
        session: Any = SimpleNamespace(session_id=bytes([self._number]) * 16, peer_address=member)

        def send(message: Any, buffers: Any) -> None:
            self.relay.on_event(MessageArrived(session, channel_of(message), message, b"", lambda: None))
            self.asked.release()

        endpoint = Endpoint(send, member)
        session.send = lambda message, channel, buffers: endpoint.post(message, b"", lambda: None)
        return endpoint, lambda: self.relay.on_event(SessionClosed(session, LinkBroken("it left"), True)) and None

    def meet(self, endpoint: Endpoint, rank: int, size: int = 2, timeout_s: float = 20.0) -> Future[Rendezvous]:
        return self._pool.submit(meet, endpoint, JOB, rank, size, timeout_s)

    def meet_both(self) -> tuple[list[Rendezvous], list[Callable[[], None]]]:
        """A run of two; returns what each rank found, and what ends its session."""
        pairs = [self.dial(f"w{rank}") for rank in range(2)]
        found = [self.meet(endpoint, rank) for rank, (endpoint, _) in enumerate(pairs)]
        return [one.result(20) for one in found], [leave for _, leave in pairs]

    def await_asks(self, count: int) -> None:
        for _ in range(count):
            assert self.asked.acquire(timeout=20)


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made._pool.shutdown()


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_comes_again_while_rank_0_is_still_in_the_last_run_waits_for_the_next_one(
    hub: Hub, size: int
) -> None:
    """Also one that is new, of a program with more ranks."""
    (first, again), (leave_0, leave_1) = hub.meet_both()
    assert first.name == again.name
    leave_1()
    early, _ = hub.dial("w1")
    while hub.asked.acquire(blocking=False):
        pass
    waiting = hub.meet(early, size - 1, size)
    hub.await_asks(5)  # it has looked more than once
    assert not waiting.done()
    leave_0()
    others = [hub.meet(hub.dial(f"w{rank}")[0], rank, size) for rank in range(size - 1)]
    found = [one.result(20) for one in [*others, waiting]]
    assert {one.name for one in found} == {found[0].name} != {first.name}
    assert [one.rank for one in found] == list(range(size))


def test_a_rank_that_reads_the_cards_when_another_has_left_already_finds_them(hub: Hub) -> None:
    """Two ranks are there at once, one of them is through with its program before the other has looked."""
    (first, _), (_, leave_1) = hub.meet_both()
    leave_1()
    endpoint, _ = hub.dial("late")
    reply = endpoint.ask("multi_get", [f"{first.name}/member/{rank}" for rank in range(2)], timeout_s=5)
    assert len(reply.values) == 2


def test_a_second_program_of_the_same_job_is_told_that_its_place_is_taken(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_PREDECESSOR_S", 0.0)
    hub.meet_both()
    for rank in range(2):
        endpoint, _ = hub.dial("another")
        with pytest.raises(
            ConfigError, match=rf"rank {rank} of job 'program' is taken by w{rank}: .* a job name of its own"
        ):
            meet(endpoint, JOB, rank, 2, 20.0)


def test_a_rank_that_waits_in_vain_for_the_end_of_the_last_run_is_told_so(hub: Hub) -> None:
    _, (_, leave_1) = hub.meet_both()
    leave_1()
    endpoint, _ = hub.dial("w1")
    with pytest.raises(
        CollectiveTimeout, match=r"rank 0 of job 'program' \(w0\) was still in an earlier run after 0.3 s"
    ):
        meet(endpoint, JOB, 1, 2, 0.3)


def test_a_rank_that_died_before_all_were_there_gives_its_place_to_the_next_one(hub: Hub) -> None:
    first, _ = hub.dial("w0")
    waiting = hub.meet(first, 0, 3)
    dies, leave = hub.dial("dies")
    lost = hub.meet(dies, 1, 3)
    hub.await_asks(5)  # both wait for rank 2
    leave()
    dies.closed(LinkBroken("killed"))
    assert isinstance(lost.exception(20), Exception)
    others = [hub.meet(hub.dial(f"w{rank}")[0], rank, 3) for rank in (1, 2)]
    assert {one.result(20).members for one in [waiting, *others]} == {("w0", "w1", "w2")}
