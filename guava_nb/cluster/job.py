"""A job: a sequential procedure on a thread of its own, fed by a mailbox.

Written as straight code that waits (`pump`) until a condition holds; while it waits, every event is handled, so losses,
joins and interrupts are seen at any point. The view of who takes part changes only here, between two events.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from guava_nb import errors
from guava_nb.cluster import job_events as events
from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job_events import JobEvent
from guava_nb.cluster.owed_answers import OwedAnswer, OwedAnswers
from guava_nb.errors import GuavaError, RemoteError, RemoteProtocolError
from guava_nb.protocol.messages import Failure, FailureKind, Message

__all__ = ["Job", "NobodyLeft", "StopRequested"]

Handler = Callable[[int, Message, memoryview], None]
_Record = TypeVar("_Record", bound=Message)

#: The longest a pump sleeps without looking at its condition again: conditions on the clock need no event to come true.
_TICK_S = 0.25
#: A job that looks at what it waits for after so long stood still itself, or had other things to do.
_STOOD_STILL_S = 2.0


class StopRequested(Exception):  # noqa: N818 - not an error: the user asked for it
    """Unwinds a job after an interrupt."""


class NobodyLeft(Exception):  # noqa: N818 - not an error yet: a worker may come
    """No member is left, not even a suspect one."""


class Job:
    """Mailbox, view of the members, and the pump.

    Attributes:
        ready: members that are connected.
        suspects: members whose connections broke, or who are slow, and who may come back.
        slow: those of them that are connected and did not answer in time: others do their work until they do.
        on_slow: a member that is connected did not answer in time; others go on without it.
        spares: says whether a job goes on without a member that is slow.
        without: says what comes of ending that member's process, where a job does not go on without it; "" where that is unknown.
        run_id: the run whose replicas this job works with; set, like those that follow, by its replica set.
        forget: a member does not hold the run any more.
        was_asked: says whether the last order of a member to build the run was of this generation.
        on_group_failure: a member reports that its group broke.
        leaving: members that said they leave: they begin nothing more, so what they hold stays as it is.
        failed: members whose code of the user's raised; they hold the last state that is whole there.
        about_request: says what a request was about, None where it is of an earlier one; set by what asks.
        trains: a worker that lost its replica fails the job; a job that only asks turns to another.
    """

    trains = False
    _waits: OwedAnswers  # begins with `attached`

    def __init__(self, cluster: Cluster) -> None:
        """Make a job that is not attached yet."""
        self.cluster = cluster
        self.ready: set[int] = set()
        self.suspects: set[int] = set()
        self.slow: dict[int, float] = {}  # since when
        self.spares: Callable[[int], bool] = lambda rank: False
        self.without: Callable[[int], str] = lambda rank: ""
        self.on_slow: Callable[[int], None] = lambda rank: None
        self.interrupts = 0
        self.leaving: set[int] = set()
        self.failed: set[int] = set()
        self.run_id = ""
        self.forget: Callable[[int], None] = lambda rank: None
        self.was_asked: Callable[[int, int], bool] = lambda rank, generation: True
        self.on_group_failure: Callable[[int, Failure], None] = lambda rank, message: None
        self.about_request: Callable[[int], str | None] = lambda request: None
        self._mailbox: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
        self._set_aside: tuple[type[Message], ...] = ()
        self._backlog: deque[JobEvent] = deque()
        self._owed: list[Callable[[], Iterable[OwedAnswer]]] = []
        self._looked = 0.0
        self._handlers: dict[type[Message], Handler] = {Failure: self._on_failure}

    def post(self, event: JobEvent) -> None:
        """Take an event; called from any thread."""
        self._mailbox.put(event)

    def on(self, record: type[_Record], handler: Callable[[int, _Record, memoryview], None]) -> None:
        """Handle messages of this type with `handler(rank, message, payload)`.

        What the handler raises ends the job, but a `RemoteProtocolError` ends the session of the worker that sent it.
        """
        self._handlers[record] = cast(Handler, handler)

    def collect(
        self, record: type[_Record], ours: Callable[[_Record], bool], asked: Callable[[int], bool] = lambda rank: True
    ) -> dict[int, _Record]:
        """Return a dict that fills with the answers of this type that are `ours`, of members that were `asked`, by rank."""
        answers: dict[int, _Record] = {}

        def take(rank: int, message: _Record, payload: memoryview) -> None:
            if asked(rank) and ours(message):
                answers[rank] = message

        self.on(record, take)
        return answers

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Receive the cluster's messages inside the block."""
        self._waits = OwedAnswers(self.cluster.least_wait_s)
        self.cluster.attach(self)
        try:
            # Attached first, looked second: a change in between arrives twice, and every change is idempotent.
            for member in self.cluster.members():
                if member.state == "ready":
                    self.ready.add(member.rank)
                elif member.state == "suspect":
                    self.suspects.add(member.rank)
            yield
        finally:
            self.cluster.detach(self)
            self._return_credit()

    def _return_credit(self) -> None:
        while self._backlog:
            event = self._backlog.popleft()
            if isinstance(event, events.FromWorker):
                event.done()
        while not self._mailbox.empty():
            event = self._mailbox.get()
            if isinstance(event, events.FromWorker):
                event.done()

    def pump(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Handle events until the condition holds; returns False when `timeout_s` passed first."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not until():
            self.check()
            self._look_at_waits()
            left = _TICK_S if deadline is None else min(_TICK_S, deadline - time.monotonic())
            if left <= 0:
                return False
            self.take_one(left)
        return True

    @contextmanager
    def waiting_for(self, owed: Callable[[], Iterable[OwedAnswer]]) -> Iterator[None]:
        """In the block these answers are waited for too: who is late is named, and spared where the job goes on without it."""
        self.watch(owed)
        try:
            yield
        finally:
            self._owed.remove(owed)

    def watch(self, owed: Callable[[], Iterable[OwedAnswer]]) -> None:
        """From now on these answers are waited for, as in `waiting_for`."""
        self._owed.append(owed)

    def _look_at_waits(self) -> None:
        """Say who is late with what, a few times a second, and spare who is too late."""
        now = time.monotonic()
        if now < self._looked + _TICK_S or not self._owed:
            return
        stood_still = now > self._looked + _STOOD_STILL_S  # this process: what came meanwhile was not read yet
        self._looked, waits, name = now, self._waits, self.cluster.name
        if not stood_still:
            self._spare_silent(now)
        news, late = waits.look((answer for owed in self._owed for answer in owed() if answer.rank in self.ready), now)
        for answer in news:
            limit_s, spared = waits.limit_s(answer), self.spares(answer.rank)
            seen = self.cluster.vitals.text(answer.rank, now)
            seen = f" ({seen})" if seen else ""
            then = f"; after {limit_s:.0f} s the others go on without it" if spared else ""
            if not spared and (outcome := self.without(answer.rank)):
                then = f"; if it hangs, end its process: {outcome}"
            waited_s = waits.waited_s(answer, now)
            self.cluster.notice(f"waits for {name(answer.rank)} since {waited_s:.0f} s: {answer.what}{seen}{then}")
        for answer in late:
            if answer.rank in self.ready and self.spares(answer.rank):
                usual_s, waited_s = waits.usual_s(answer), waits.waited_s(answer, now)
                before = "" if usual_s is None else f" (it took {usual_s:.1f} s before)"
                self.spare(answer.rank, f"slow: no answer for {waited_s:.0f} s: {answer.what}{before}", waited_s)

    def _spare_silent(self, now: float) -> None:
        """Others do the work of a worker whose heartbeats stay away: that is known sooner than that it is gone."""
        silent = {rank for rank in self.ready if self.cluster.seats.silent_s(rank) >= self.cluster.silence_s / 2}
        if silent and silent < self.ready:
            for rank in {answer.rank for owed in self._owed for answer in owed()} & silent:
                if self.spares(rank):
                    seen = self.cluster.vitals.text(rank, now)
                    silent_s = self.cluster.seats.silent_s(rank)
                    self.spare(
                        rank, f"silent: nothing came from it for {silent_s:.0f} s{seen and f' ({seen})'}", silent_s
                    )

    def spare(self, rank: int, sentence: str, since_s: float) -> None:
        """Go on without a worker until it answers.

        Args:
            sentence: how it is, after "it is".
            since_s: for how long.
        """
        self.cluster.roster.members[rank].detail = sentence
        self.cluster.notice(
            f"{self.cluster.name(rank)} is {sentence}. Others do its work; it keeps its seat until it answers"
        )
        self.slow[rank] = time.monotonic() - since_s
        self.ready.discard(rank)
        self.suspects.add(rank)
        self.on_slow(rank)

    def _answers_again(self, rank: int) -> None:
        """A slow worker has answered: it takes part again, where its connection stands."""
        since, member = self.slow.pop(rank), self.cluster.roster.members[rank]
        if member.state != "ready":
            return
        member.detail = ""
        self.cluster.notice(
            f"{member.name} answers again, after {time.monotonic() - since:.0f} s, and takes part again"
        )
        self.suspects.discard(rank)
        self.ready.add(rank)
        self.on_resumed(rank)

    def take_one(self, timeout_s: float) -> None:
        """Handle the next event, if one comes in time."""
        if self._backlog and not self._set_aside:
            self.handle(self._backlog.popleft())
            return
        try:
            event = self._mailbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        if isinstance(event, events.FromWorker) and isinstance(event.message, self._set_aside):
            self._backlog.append(event)
        else:
            self.handle(event)

    @contextmanager
    def setting_aside(self, *records: type[Message]) -> Iterator[None]:
        """Leave messages of these types for later, in their order, while the block waits for others."""
        before, self._set_aside = self._set_aside, records
        try:
            yield
        finally:
            self._set_aside = before

    def check(self) -> None:
        """Raise what must unwind the job; called before each wait."""
        if self.interrupts:
            raise StopRequested
        if not self.ready and not self.suspects:
            raise NobodyLeft

    def handle(self, event: JobEvent) -> None:
        """Handle one event."""
        match event:
            case events.FromWorker(rank, message, payload, done):
                try:
                    handler = self._handlers.get(type(message))
                    if handler is not None and rank not in self.cluster.expelled:
                        handler(rank, message, payload)
                except RemoteProtocolError as error:  # it was asked, and this is no answer: the others go on without it
                    self.cluster.expel(rank, f"a {type(message).__name__} that cannot be used: {error}")
                finally:
                    done()
                if rank in self.slow and rank not in self.cluster.expelled:
                    self._answers_again(rank)
            case events.Joined(rank):
                self.slow.pop(rank, None)
                self.ready.add(rank)
            case events.Suspected(rank):
                self.ready.discard(rank)
                self.suspects.add(rank)
                self.on_suspected(rank)
            case events.Resumed(rank) if rank in self.slow:
                pass  # its connection is back; it has not answered yet
            case events.Resumed(rank):
                self.suspects.discard(rank)
                self.ready.add(rank)
                self.on_resumed(rank)
            case events.Lost(rank):
                self.ready.discard(rank)
                self.suspects.discard(rank)
                self.slow.pop(rank, None)
                self.on_lost(rank)
            case events.Leaving(rank):
                self.leaving.add(rank)
                self.on_leaving(rank)
            case events.Interrupted():
                self.interrupts += 1
                self.on_interrupt()
            case events.Wake():
                pass

    def _on_failure(self, rank: int, message: Message, payload: memoryview) -> None:
        assert isinstance(message, Failure)
        if message.run_id != self.run_id:
            return
        if message.kind in (FailureKind.GROUP, FailureKind.TORN):  # whose fault it was is known when the lost member is
            self.on_group_failure(rank, message)
            return
        if not self.was_asked(rank, message.generation):
            return  # of a replica that it was told to build anew since then, or not to build at all
        if message.kind is FailureKind.INTERNAL:  # that worker does not hold the run any more
            self.forget(rank)
            if not self.trains:
                return
        else:
            self.failed.add(rank)
        about = self.about_request(message.request_id) if message.request_id else ""
        if about is None or not (message.request_id or self.trains):
            return  # of a pass or a step that is over: others may have failed in the same way, and that was told
        said, ours = message.text, getattr(errors, message.type_name, None)
        if isinstance(ours, type) and issubclass(ours, GuavaError) and ours is not RemoteError:
            where = f" {about}" if about else ""
            raise ours(
                f"worker {self.cluster.name(rank)}{where}: {said}{self.reading_note()}"
            )  # a sentence of ours needs no traceback
        text = (f"{said} ({about})" if about else said) + self.reading_note()
        raise RemoteError(self.cluster.name(rank), message.type_name, text, message.traceback)

    # What a job does when the membership changes; the views above are already up to date.

    def reading_note(self) -> str:
        """Return what an error of the user's code should say of how its batches are read; "" for nothing."""
        return ""

    def on_suspected(self, rank: int) -> None:
        """A member's connections broke."""

    def on_resumed(self, rank: int) -> None:
        """A suspect member, or a slow one, is back."""

    def on_leaving(self, rank: int) -> None:
        """A member wants to go. Nothing that only it has is needed here."""
        self.cluster.release(rank)

    def on_lost(self, rank: int) -> None:
        """A member is gone."""

    def on_interrupt(self) -> None:
        """The user interrupted (again)."""
