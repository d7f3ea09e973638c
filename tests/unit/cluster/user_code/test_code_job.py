"""What is told of large values on their way, and how long interrupted code is waited for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from guava_nb.cluster.user_code import code_job
from guava_nb.cluster.user_code.code_job import Answer, CodeJob
from guava_nb.protocol.messages import CodeRan, InterruptCode, Message, RunCode, Tree
from tests.support.direct import DirectCluster, DirectWorker

ORDER = RunCode(request_id=7, cell="px", text="", values=Tree(b""), wanted=(), rank=0, most_bytes=1 << 30)


class Counted:
    """A cluster of which only bytes and names are asked."""

    def __init__(self) -> None:
        self.moved, self.seats = (0, 0), self

    def total_bytes(self, rank: int) -> tuple[int, int]:
        return self.moved

    def name(self, rank: int) -> str:
        return f"w{rank}"


def test_large_values_are_told_on_their_way_and_small_ones_are_not() -> None:
    cluster: Any = Counted()
    job = CodeJob(cluster, {0: (ORDER, [memoryview(bytes(1))])}, lambda worker, lines: None)
    job.answers, job._bytes = {0: Answer()}, {0: (0, 0)}
    assert job._progress(0) == ""
    job.orders = {0: (ORDER, [memoryview(bytearray(40 << 20))])}
    cluster.moved = (10_000_000, 0)
    assert job._progress(0) == "10.0 MB of 41.9 MB to w0"
    job.answers[0].ran = CodeRan(request_id=7, nbytes=100_000_000)
    cluster.moved = (50_000_000, 25_000_000)
    assert job._progress(0) == "25.0 MB of 100.0 MB from w0"
    cluster.moved = (50_000_000, 100_000_000)
    assert job._progress(0) == ""


def test_code_that_does_not_end_is_waited_for_a_while_and_then_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_job, "_INTERRUPT_S", 0.0)
    cluster, told, deaf = DirectCluster(), [], threading.Event()

    class Deaf(DirectWorker):
        def take(self, message: Message, payload: memoryview) -> None:
            if isinstance(message, RunCode):
                signal.raise_signal(signal.SIGINT)
            if not isinstance(message, RunCode | InterruptCode):
                super().take(message, payload)
            if isinstance(message, InterruptCode):
                deaf.set()

    try:
        Deaf(cluster, "w0").start()
        cluster.wait_for(1, 20)

        def take(worker: str, lines: Sequence[str]) -> None:
            told.extend(lines)

        job = CodeJob(cluster, {0: (ORDER, ())}, take)
        job.run()
        assert job.was_interrupted and job.missing() == [0] and deaf.is_set()
        assert told[0].startswith("Interrupting w0;") and len(cluster.roster.ready()) == 1
    finally:
        cluster.close()
