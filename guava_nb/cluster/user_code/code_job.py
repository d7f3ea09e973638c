"""Asks workers to run the user's code between runs, shows what it prints meanwhile, and interrupts it.

Knows the records of `code_records`, members and their output; knows no values and no cells.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.config.units import show_bytes
from guava_nb.errors import RemoteProtocolError
from guava_nb.processes.interrupts import interrupts_counted
from guava_nb.protocol.messages import CodeRan, CodeValues, InterruptCode, Message, Tree

__all__ = ["Answer", "CodeJob", "OnOutput"]

#: Gets a worker's name and lines that it printed; with "" as the name a sentence on how things stand.
OnOutput = Callable[[str, Sequence[str]], None]

_POLL_S = 0.2
#: Seconds that interrupted code gets to end; then it is left to itself.
_INTERRUPT_S = 15.0
#: Values larger than this are told how far they are, every so many seconds.
_LARGE_BYTES, _TOLD_EVERY_S = 32 << 20, 2.0


@dataclass
class Answer:
    """What came of one worker's request; `ran` None: it is not known how it ended."""

    ran: CodeRan | None = None
    values: tuple[Tree, memoryview] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all has come."""
        return self.ran is not None and (self.ran.nbytes < 0 or self.values is not None)


@dataclass
class CodeJob:
    """One request to each of some workers.

    Attributes:
        orders: by rank, what is sent: the record, which has a `request_id`, and its payload.
        on_output: called in the thread of `run`.
        on_wait: called there a few times a second meanwhile.
        answers: by rank.
        came: ranks in the order in which they told how their code ended.
        was_interrupted: the user interrupted while this ran.
    """

    cluster: Cluster
    orders: Mapping[int, tuple[Message, Sequence[memoryview]]]
    on_output: OnOutput
    on_wait: Callable[[], None] = lambda: None
    answers: dict[int, Answer] = field(default_factory=dict)
    came: list[int] = field(default_factory=list)
    was_interrupted: bool = False

    def run(self) -> None:
        """Ask all, and wait until each has answered or is lost; an interrupt stops their code, and is not raised.

        Raises:
            ClusterError: a run is in progress.
        """
        self.answers = {rank: Answer() for rank in self.orders}
        self._job = Job(self.cluster)
        self._job.on(CodeRan, self._on_ran)
        self._job.on(CodeValues, self._on_values)
        names = [self.cluster.name(rank) for rank in self.orders]
        self._seen = {name: self.cluster.output.count(name) for name in names}
        self._bytes = {rank: self.cluster.seats.total_bytes(rank) for rank in self.orders}
        self._told, self._deadline = time.monotonic(), float("inf")
        with self._job.attached(), interrupts_counted() as interrupts, contextlib.suppress(NobodyLeft):
            self._begin()
            for rank, (message, buffers) in self.orders.items():
                self.cluster.send(rank, message, buffers)
            counted = 0
            while not self._job.pump(self._is_over, _POLL_S) and time.monotonic() < self._deadline and counted < 2:
                self._show()
                self._look()
                self.on_wait()
                if interrupts.count > counted:
                    counted = interrupts.count
                    self._interrupt()
            self.was_interrupted = counted > 0 or interrupts.count > 0
        self.cluster.flush_output()
        self._show()

    def missing(self) -> list[int]:
        """Return the ranks whose answer has not come."""
        return [rank for rank, answer in self.answers.items() if not answer.is_whole]

    def _is_over(self) -> bool:
        here = self._job.ready | self._job.suspects
        return not any(rank in here for rank in self.missing())

    def _begin(self) -> None:
        """The job has begun, and nothing was sent yet."""

    def _look(self) -> None:
        """Nothing is over yet, and lines that came were shown."""

    def _stop(self) -> list[int]:
        """Have code end that has not, within a time limit; returns the ranks where it runs."""
        waiting, self._deadline = self.missing(), time.monotonic() + _INTERRUPT_S
        for rank in waiting:
            self.cluster.send(rank, InterruptCode(self._request(rank)))
        return waiting

    def _interrupt(self) -> None:
        waiting = self._stop()
        names = ", ".join(map(self.cluster.name, waiting))
        self.on_output(
            "", [f"Interrupting {names}; they stay in the session. Interrupt again to wait for them no longer."]
        )

    def _request(self, rank: int) -> int:
        return int(getattr(self.orders[rank][0], "request_id"))  # noqa: B009 - each of these records has one

    def _on_ran(self, rank: int, message: CodeRan, payload: memoryview) -> None:
        if rank not in self.answers or message.request_id != self._request(rank) or self.answers[rank].ran is not None:
            return
        most = getattr(self.orders[rank][0], "most_bytes", -1)
        if message.nbytes > most:
            raise RemoteProtocolError(
                f"it announces values of {message.nbytes} bytes, and at most {most} were asked for"
            )
        self.answers[rank].ran = message
        self.came.append(rank)

    def _on_values(self, rank: int, message: CodeValues, payload: memoryview) -> None:
        if rank in self.answers and message.request_id == self._request(rank) and self.answers[rank].values is None:
            self.answers[rank].values = message.values, payload

    def _show(self) -> None:
        for name, seen in self._seen.items():
            lines, self._seen[name] = self.cluster.output.since(name, seen)
            if lines:
                self.on_output(name, lines)
        now = time.monotonic()
        if now > self._told + _TOLD_EVERY_S and (moving := list(filter(None, map(self._progress, self.missing())))):
            self._told = now
            self.on_output("", ["; ".join(moving)])

    def _progress(self, rank: int) -> str:
        """How far large values are on their way; "" where there is nothing to say."""
        ran, name = self.answers[rank].ran, self.cluster.name(rank)
        total, way = sum(buffer.nbytes for buffer in self.orders[rank][1]), 0
        if ran is not None:
            total, way = ran.nbytes, 1
        done = self.cluster.seats.total_bytes(rank)[way] - self._bytes[rank][way]
        if total < _LARGE_BYTES or done >= total:
            return ""
        return f"{show_bytes(done)} of {show_bytes(total)} {'from' if way else 'to'} {name}"
