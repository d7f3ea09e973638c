"""A program's ranks: what they are told, whose error is the cause, and what ends the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.user_code import code_job
from guava_nb.cluster.user_code.code_on_workers import CodeOnWorkers
from guava_nb.errors import GroupBroken, RemoteError, WorkerLost
from guava_nb.protocol.messages import CodeRan, EndProgram, InterruptCode, Message, RunProgram
from tests.support.direct import DirectCluster, DirectWorker

#: What a rank does with its order: its answer, None for none before an interrupt; may end the worker.
Behaviour = Callable[["Rank", RunProgram], CodeRan | None]


class Rank(DirectWorker):
    """A worker whose program is played."""

    def __init__(self, cluster: Cluster, name: str, behave: Behaviour) -> None:
        super().__init__(cluster, name)
        self.behave, self.got = behave, list[Message]()
        self.order: RunProgram | None = None

    def take(self, message: Message, payload: memoryview) -> None:
        if isinstance(message, RunProgram | InterruptCode | EndProgram):
            self.got.append(message)
        if isinstance(message, RunProgram):
            self.order = message
            if (answer := self.behave(self, message)) is not None:
                self._send(answer, ())
        elif isinstance(message, InterruptCode):
            self._send(failed(message.request_id, "KeyboardInterrupt", ""), ())
        elif not isinstance(message, EndProgram):
            super().take(message, payload)


def failed(request: int, kind: str, text: str) -> CodeRan:
    return CodeRan(request_id=request, type_name=kind, text=text, traceback=f"trace of {kind}")


def ends(rank: Rank, order: RunProgram) -> CodeRan:
    return CodeRan(request_id=order.request_id)


def works_on(rank: Rank, order: RunProgram) -> None:
    """Nothing comes before it is interrupted."""


class Session(CodeOnWorkers):
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def _open_cluster(self) -> Cluster:
        return self._cluster


@contextmanager
def session(*behaviours: Behaviour) -> Iterator[tuple[Session, list[Rank]]]:
    cluster = DirectCluster()
    try:
        ranks = []
        for index, behave in enumerate(behaviours):
            ranks.append(Rank(cluster, f"w{index}", behave))
            ranks[-1].start()
            cluster.wait_for(index + 1, 20)
        yield Session(cluster), ranks
    finally:
        cluster.close()


def run(made: Session, told: list[str] | None = None, on: Sequence[str] | None = None) -> None:
    lines = [] if told is None else told
    made.run_program("1", "--lr", "3", on=on, path="relay", on_output=lambda worker, new: lines.extend(new))


def test_each_rank_gets_its_place_and_leaves_the_group_at_the_end() -> None:
    with session(ends, ends, ends) as (made, ranks):
        run(made, on=["w2", "w0"])
        first, second = ranks[2].order, ranks[0].order
        assert first is not None and second is not None and ranks[1].order is None
        assert (first.group.rank, second.group.rank, first.group.members) == (0, 1, ("w2", "w0"))
        assert (first.local_rank, first.local_size, first.seat, first.arguments) == (0, 1, 2, ("--lr", "3"))
        assert first.group.name == second.group.name and first.group.backend == "guava"
        run(made)
        assert ranks[0].order is not None and ranks[0].order.group.name != first.group.name
        assert [type(message) for message in ranks[0].got] == [RunProgram, EndProgram] * 2


def test_only_the_sessions_of_its_ranks_may_open_its_group() -> None:
    seen = []

    def looks(rank: Rank, order: RunProgram) -> CodeRan:
        relay = made._cluster.relay
        seen.append(relay._assigned[order.group.name].ranks[rank.session.session_id])
        return ends(rank, order)

    with session(looks, looks) as (made, _):
        run(made)
        assert sorted(seen) == [0, 1]
        assert made._cluster.relay._assigned == {}


def test_the_rank_that_failed_is_the_cause_and_ends_the_others_whatever_they_do() -> None:
    def fails(rank: Rank, order: RunProgram) -> CodeRan:
        return failed(order.request_id, "ValueError", "mine")

    def follows(rank: Rank, order: RunProgram) -> CodeRan:
        return failed(order.request_id, "GroupBroken", "w1 left the group")

    told: list[str] = []
    with session(follows, works_on, fails) as (made, ranks):
        with pytest.raises(RemoteError) as caught:
            run(made, told)
        assert str(caught.value) == "worker w2 raised ValueError: mine"
        assert caught.value.remote_traceback == "trace of ValueError"
        assert [type(message) for message in ranks[1].got] == [RunProgram, InterruptCode, EndProgram]
    assert told and told[-1].endswith("failed, so the program ends on w1 too.")


def test_a_lost_rank_is_named_and_not_those_whose_group_broke() -> None:
    def dies(rank: Rank, order: RunProgram) -> None:
        rank.die()

    def follows(rank: Rank, order: RunProgram) -> CodeRan:
        return failed(order.request_id, "GroupBroken", "w1 is gone")

    with session(follows, dies, works_on) as (made, ranks):
        with pytest.raises(WorkerLost, match=r"how it ended is not known: w1 \("):
            run(made)
        assert any(isinstance(message, InterruptCode) for message in ranks[2].got)


def test_where_all_only_follow_the_first_report_stands() -> None:
    def broken(rank: Rank, order: RunProgram) -> CodeRan:
        return failed(order.request_id, "GroupBroken", "rank 0 left the group before")

    with session(ends, broken) as (made, _), pytest.raises(GroupBroken, match="worker w1: rank 0 left the group"):
        run(made)


def test_an_interrupt_ends_all_and_one_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_job, "_INTERRUPT_S", 0.0)
    begun = threading.Barrier(2)

    def interrupts(rank: Rank, order: RunProgram) -> None:
        threading.Thread(target=lambda: (begun.wait(20), signal.raise_signal(signal.SIGINT)), daemon=True).start()

    def begins(rank: Rank, order: RunProgram) -> None:
        threading.Thread(target=begun.wait, args=(20,), daemon=True).start()

    told: list[str] = []
    with session(interrupts, begins) as (made, ranks):
        with pytest.raises(KeyboardInterrupt):
            run(made, told)
        assert told[0].startswith("Interrupting w0, w1; they stay in the session")
        assert sum(isinstance(message, InterruptCode) for rank in ranks for message in rank.got) == 2
