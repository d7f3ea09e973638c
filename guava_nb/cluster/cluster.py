"""The orchestrator's side of all sessions: seats newcomers, routes messages to the job, keeps each worker's output.

Session events come from reader threads. Job messages go straight to the job's mailbox; everything else is handled by one
dispatcher thread, so that no reader ever waits for another worker or for the user.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from guava_nb.cluster.group_path import Findings
from guava_nb.cluster.job_events import FromWorker, JobEvent, Joined, Leaving, Lost, Resumed, Suspected, Wake
from guava_nb.cluster.notices import LineBreaks, Standstill
from guava_nb.cluster.payload_bounds import PayloadBounds
from guava_nb.cluster.program_ranks import Programs
from guava_nb.cluster.report_checks import first_invalid_energy
from guava_nb.cluster.roster import MOST_CHARS, Member, Roster, shortened, version_notes
from guava_nb.cluster.seat_sessions import SeatSessions
from guava_nb.cluster.vitals import VitalsBook
from guava_nb.cluster.worker_output import OutputLog
from guava_nb.config.units import show_bytes
from guava_nb.errors import ClusterError, GuavaError, LinkClosed, LinkError, RendezvousTimeout
from guava_nb.hub.relay import Relay
from guava_nb.link.session_events import (
    Event,
    MessageArrived,
    SessionClosed,
    SessionHandle,
    SessionOpened,
    SessionResumed,
    SessionSuspect,
    VisitArrived,
)
from guava_nb.processes.pipe import ending_text
from guava_nb.protocol.messages import (
    FROM_WORKERS,
    Accept,
    CrashReport,
    Energy,
    FormGroup,
    Hello,
    Leave,
    Log,
    Message,
    RunProgram,
    Vitals,
    channel_of,
)
from guava_nb.protocol.shown_text import cleaned
from guava_nb.row_cache.policy import WorkerCaches
from guava_nb.telemetry.run_energy import EnergyBook
from guava_nb.telemetry.versions import local_versions
from guava_nb.telemetry.waits import Waits

__all__ = ["Cluster", "Mailbox"]

log = logging.getLogger(__name__)

Buffers = Sequence[memoryview]

_NOT_FOR_JOBS = (Hello, Log, Leave, Energy)


class Mailbox(Protocol):
    """What the cluster needs of a job."""

    def post(self, event: JobEvent) -> None:
        """Take an event; never blocks."""


class Cluster:
    """Members, their sessions and their output.

    Args:
        output: where the workers' lines are kept.
        on_notice: called with one sentence for a person when a worker joins, breaks or is lost; may be called from any
            thread and must be quick.
        record: takes what is for the session's diary alone.
        on_run_notice: likewise with what a run has to say, which is over when the next one begins; None: as all else.

    Attributes:
        tell: tells a person what concerns the session.
        notice: tells a person what a run has to say.
        expelled: members whose sessions were ended because they broke the protocol.
        least_wait_s: the shortest time after which a connected worker that does not answer counts as slow.
        silence_s: as the setting: a connection from which nothing comes for so long is broken.
        on_idle_leave: releases a member that leaves between two jobs, from any thread; called by the dispatcher.
        seats: the sessions of the members, and the bytes of those that are over.
        greetings: are sent to each newcomer before anything else.
        takes: gets each message before a job does, from reader threads, and returns whether it was for it: an answer that was
            asked for outside of any job.
    """

    def __init__(
        self,
        output: OutputLog,
        on_notice: Callable[[str], None] = log.info,
        on_run_notice: Callable[[str], None] | None = None,
        record: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Start the dispatcher thread; sessions are fed in through `on_event`."""
        self.roster = Roster()
        self.relay = Relay(on_violation=self._end_session)
        self.findings = Findings()
        self.caches, self.energy, self.bounds, self.vitals = WorkerCaches(), EnergyBook(), PayloadBounds(), VitalsBook()
        self.output = output
        self.notice = on_run_notice or on_notice
        self.tell, self._record = on_notice, record
        self._programs, self._breaks, self._standstill = Programs(on_notice), LineBreaks(), Standstill()
        self.greetings: tuple[Message, ...] = ()
        self._told_invalid: set[tuple[int, str]] = set()
        self.expelled: set[int] = set()
        self.session_id = secrets.token_hex(8)
        self.least_wait_s, self.silence_s = 30.0, 15.0
        self.seats = SeatSessions()
        self._leaving: dict[int, str] = {}  # members that were not released yet, and why they go
        self.on_idle_leave: Callable[[int], None] = self.release
        self.takes: Callable[[int, Message, memoryview], bool] = lambda rank, message, payload: False
        self._changed = threading.Condition()
        self._mailbox: Mailbox | None = None
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._dispatch, name="guava-cluster", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ events from sessions

    def on_event(self, event: Event) -> None:
        """Take a session's event; called from reader threads."""
        event = _cleaned(event)
        if isinstance(event, MessageArrived) and type(event.message) not in FROM_WORKERS:
            self._events.put(event)
            return
        if isinstance(event, MessageArrived) and self.seats.rank_of(event.session.session_id) is None:
            self._programs.on_message(event.session, event.message)
        if self.relay.on_event(event):
            return
        if isinstance(event, MessageArrived) and not isinstance(event.message, _NOT_FOR_JOBS):
            rank, mailbox = self.seats.rank_of(event.session.session_id), self._mailbox
            if rank is not None:
                self.bounds.came(rank, event.message)
            if rank is not None and self.takes(rank, event.message, memoryview(event.payload)):
                event.done()
                self._post(Wake())
                return
            if rank is None or mailbox is None:
                event.done()  # from a run that is over, or before the worker said hello
                return
            mailbox.post(FromWorker(rank, event.message, memoryview(event.payload), event.done))
        else:
            self._events.put(event)

    def _dispatch(self) -> None:
        while (event := self._standstill.next_of(self._events, self.tell)) is not None:
            if isinstance(event, threading.Event):
                event.set()
                continue
            try:
                self._handle(event)
            except GuavaError as error:
                log.warning("event of a session was dropped: %s", error)
            except Exception:  # without this thread no run would learn of a lost worker: it would wait for ever
                log.exception("event of a session was dropped")

    def _handle(self, event: Event) -> None:
        if isinstance(event, MessageArrived):
            try:
                self._on_message(event)
            finally:
                event.done()  # its memory is given back, also after an error
        elif isinstance(event, VisitArrived):
            self._on_visit(event)
        elif not isinstance(event, SessionOpened):
            rank = self.seats.rank_of(event.session.session_id)
            if rank is None:
                self._programs.on_change(event)
            elif self.seats.of(rank) is event.session:  # not an earlier one of a worker that came back
                self._on_session_change(rank, event)

    def _on_message(self, event: MessageArrived) -> None:
        message, rank = event.message, self.seats.rank_of(event.session.session_id)
        if type(message) not in FROM_WORKERS:
            self._end_session(event.session, f"a {type(message).__name__}, which no worker sends")
        elif isinstance(message, Hello):
            self._seat(event.session, shortened(message))
        elif isinstance(message, Log) and rank is not None:
            self.output.add(self.roster.members[rank].name, message.stream, message.lines, message.dropped)
        elif isinstance(message, Energy) and rank is not None:
            if invalid := first_invalid_energy(message):
                self.tell_invalid(rank, "energy", invalid)
            else:
                self.energy.take(rank, message)
        elif isinstance(message, Leave) and rank is not None:
            self._on_leave(rank, message.reason[:MOST_CHARS])

    def _end_session(self, session: SessionHandle, violation: str) -> None:
        if (rank := self.seats.rank_of(session.session_id)) is not None:
            self.expel(rank, violation)
        else:
            self._close_aside(session, f"it sent {violation}")

    def _close_aside(self, session: SessionHandle, reason: str) -> None:
        """Closing waits for a peer that may be gone; the others' events must not wait with it."""
        threading.Thread(target=self._close, args=(session, reason), name="guava-close", daemon=True).start()

    def _close(self, session: SessionHandle, reason: str) -> None:
        session.close(reason)
        self.seats.note_over(session)

    def _on_leave(self, rank: int, reason: str) -> None:
        """Release a member, or let the job do so, which may need what only this member holds."""
        with self._changed:
            mailbox = self._mailbox
            self._leaving[rank] = reason
            if mailbox is not None:
                mailbox.post(Leaving(rank))
        if mailbox is None:
            self.on_idle_leave(rank)

    def _seat(self, session: SessionHandle, hello: Hello) -> None:
        if self.seats.rank_of(session.session_id) is not None:
            return  # a hello sent again after a resume
        notes = version_notes(local_versions(), hello.versions)
        with self._changed:
            before = self._seat_before(session, hello.before)
            if before in self.expelled:
                self._close_aside(session, f"{self.name(before)} was sent away before: start the worker anew")
                return
            member = self.roster.join(hello) if before is None else self.roster.rejoin(before, hello)
            member.detail = "; ".join(notes)
            self.seats.sit(member.rank, session)
            self._forget(self.roster.prune())
        for message in (Accept(member.name, self.session_id), *self.greetings):
            self.send(member.rank, message)
        came = "joined" if before is None else "joined again"
        self.tell(f"{member.name} {came}: {hello.device_name} on {hello.hostname}" + "".join(f"; {n}" for n in notes))
        self._post(Joined(member.rank))

    def _seat_before(self, session: SessionHandle, before: str) -> int | None:
        """The seat of a process that was given up here and comes back; None for a newcomer, or a copy of its identity."""
        rank = self.seats.seat_before(before, session.identity)
        return rank if rank is not None and self.roster.members[rank].state == "lost" else None

    def _forget(self, ranks: Iterable[int]) -> None:
        """Let go of what is kept of seats that are long gone: one who has the code may take thousands."""
        for rank in ranks:
            self.seats.forget(rank)
            self.expelled.discard(rank)
            self.caches.pop(rank, None)
            for book in (self.energy, self.bounds, self._breaks):
                book.forget(rank)
            self._told_invalid = {told for told in self._told_invalid if told[0] != rank}

    def _on_visit(self, event: VisitArrived) -> None:
        report, rank = event.message, self.seats.rank_of(event.session_id)
        if rank is None:
            return
        member = self.roster.members[rank]
        if isinstance(report, Vitals) and member.alive and (news := self.vitals.take(rank, report, time.monotonic())):
            member.detail = self.vitals.text(rank, time.monotonic()) if report.quiet_s else ""
            self.tell(f"{member.name} {news}")
        if not isinstance(report, CrashReport):
            return
        self.output.add_tail(member.name, report.tail)
        cause = f"its process ended with {ending_text(report.exit_status, report.tail)}"
        if member.alive:
            # The process is known to be dead: its session will not be resumed, so do not wait for the grace to pass.
            self._end(rank, self.roster.lose, cause, f"was lost: {cause}")
        else:
            member.detail = cause
            self.tell(f"{member.name}: {cause}")

    def _on_session_change(self, rank: int, event: Event) -> None:
        name, now = self.roster.members[rank].name, time.monotonic()
        if isinstance(event, SessionSuspect) and self.roster.suspect(rank, str(event.cause)):
            self._announce(Suspected(rank), self._breaks.broke(rank, name, event.cause, bool(self.roster.ready()), now))
        elif isinstance(event, SessionResumed) and self.roster.resume(rank):
            self._announce(Resumed(rank), self._breaks.back(rank, name, now))
        elif isinstance(event, SessionClosed):
            move = self.roster.leave if event.by_peer else self.roster.lose
            self._end(rank, move, str(event.cause), f"{'left' if event.by_peer else 'was lost'}: {event.cause}")

    def _end(self, rank: int, move: Callable[[int, str], bool], detail: str, sentence: str) -> None:
        if not move(rank, detail):
            return
        session = self.seats.rise(rank)
        self.vitals.forget(rank)
        self._leaving.pop(rank, None)
        member, (out_bytes, in_bytes) = self.roster.members[rank], self.seats.total_bytes(rank)
        self._announce(Lost(rank), f"{member.name} {sentence}")
        self._record(
            f"{member.name} had done {member.samples} samples of the newest run, and took {show_bytes(out_bytes)} there and "
            f"{show_bytes(in_bytes)} back since it joined; workers left: {', '.join(map(self.name, self.roster.ready())) or 0}"
        )
        if session is not None:
            self._close_aside(session, detail)

    def _announce(self, event: JobEvent, sentence: str) -> None:
        if sentence:
            self.tell(sentence)
        self._post(event)

    def _post(self, event: JobEvent) -> None:
        with self._changed:
            self._changed.notify_all()
            mailbox = self._mailbox
        if mailbox is not None:
            mailbox.post(event)

    # --------------------------------------------------------------------------------------------------- for the job

    def attach(self, mailbox: Mailbox) -> None:
        """Make this the job whose mailbox gets the workers' messages.

        Raises:
            ClusterError: another job is running.
        """
        with self._changed:
            if self._mailbox is not None:
                raise ClusterError("another run is in progress: wait for it, or stop it with run.stop() or %guava_stop")
            self._mailbox = mailbox

    def detach(self, mailbox: Mailbox) -> None:
        """End the job's attachment."""
        with self._changed:
            if self._mailbox is mailbox:
                self._mailbox = None
            leaving = list(self._leaving)
        for rank in leaving:
            self.on_idle_leave(rank)

    def send(self, rank: int, message: Message, buffers: Buffers = ()) -> bool:
        """Queue a message for a member, and the buffers of its payload as they are; returns False when it is gone."""
        session = self.seats.of(rank)
        if session is None:
            return False
        self.bounds.sent(rank, message)
        if isinstance(group := message.group if isinstance(message, RunProgram) else message, FormGroup):
            self.relay.assign(group.name, session.session_id, group.rank, len(group.members))
        try:
            session.send(message, channel_of(message), buffers)
        except (LinkClosed, LinkError):
            return False
        return True

    def send_all(self, ranks: Iterable[int], message: Message, buffers: Buffers = ()) -> None:
        """Queue one message for several members; one that is gone is left out."""
        for rank in ranks:
            self.send(rank, message, buffers)

    def let_go(self, rank: int, reason: str) -> None:
        """End a member's session for good, so that nothing is sent to it or by it again."""
        if (session := self.seats.of(rank)) is not None:
            self._events.put(SessionClosed(session, LinkClosed(reason), False))

    def expel(self, rank: int, violation: str) -> None:
        """End the session of a member that broke the protocol; a run goes on without it, and its `Lost` event is on the way.

        Args:
            violation: what it sent, such as "a BatchShard, which no worker sends".
        """
        self.expelled.add(rank)
        self.let_go(rank, f"its session was ended, because it sent {violation}")

    def release(self, rank: int) -> None:
        """Let a member go that asked for it; its `Lost` event is on the way."""
        reason, session = self._leaving.pop(rank, None), self.seats.of(rank)
        if reason is not None and session is not None:
            self._events.put(SessionClosed(session, LinkClosed(reason), True))

    def count_anew(self) -> None:
        """Start a run's figures: samples and bytes per member count from here."""
        for member in self.roster:
            member.samples, member.tokens, member.waits, member.shards = 0, None, Waits(), 0
            member.bytes_before = self.seats.total_bytes(member.rank)

    def worked(self, rank: int) -> tuple[int, float | None]:
        """Return the samples and tokens that a member has done since then; tokens None where they are not counted."""
        member = self.roster.members[rank]
        return member.samples, member.tokens

    def tell_invalid(self, rank: int, of: str, invalid: str) -> None:
        """Tell a person, once for each worker and kind of report, that a value in it is invalid and was ignored.

        Args:
            of: what the report is about.
            invalid: name and value, such as "joules = -3".
        """
        if (rank, of) not in self._told_invalid:
            self._told_invalid.add((rank, of))
            self.notice(
                f"{self.name(rank)} reported an invalid {of} value ({invalid}); it is ignored. Training continues. Shown once."
            )

    def payload_of(self, session_id: bytes, message: Message) -> int:
        """Return the most payload bytes that a session may bring with this record; called before memory is taken for them."""
        return self.bounds.most_bytes(self.seats.rank_of(session_id), message)

    def flush_output(self) -> None:
        """Wait until the lines are kept that came before this call; at most 5 s."""
        done = threading.Event()
        self._events.put(done)
        done.wait(5.0)

    def session(self, rank: int) -> SessionHandle | None:
        """Return the session of a member that still holds its seat."""
        return self.seats.of(rank)

    def rates(self, rank: int) -> tuple[float | None, float | None]:
        """Bytes a second to a member and from it, where messages or a measurement have shown them, else None."""
        session, told = self.seats.of(rank), self.energy.newest(rank)
        out = None if session is None else session.rate_bytes_s[0]  # what came says how much there was to send
        asked = self.roster.members[rank].line
        return _higher(asked[0], out), _higher(asked[1], None if told is None else told.up_bytes_s)

    def name(self, rank: int) -> str:
        """Return a member's name."""
        return self.roster.members[rank].name

    def hello(self, rank: int) -> Hello:
        """Return what a member said of itself when it came."""
        return self.roster.members[rank].hello

    def members(self) -> list[Member]:
        """Return all seats."""
        return list(self.roster)

    # -------------------------------------------------------------------------------------------------- for the user

    def wait_for(self, count: int, timeout_s: float | None, on_wait: Callable[[int], None] | None = None) -> list[int]:
        """Wait until `count` workers are ready.

        Raises:
            RendezvousTimeout: too few came within `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                if len(ready := self.roster.ready()) >= count:
                    return ready
                left = 0.25 if deadline is None else min(0.25, deadline - time.monotonic())
                if left <= 0:
                    raise RendezvousTimeout(
                        f"{len(ready)} of {count} workers joined within {timeout_s:g} s. Run %guava_worker with the join "
                        "code on the other machines, or ask for fewer workers"
                    )
                self._changed.wait(left)
            if on_wait is not None:  # without the lock: slow drawing must not hold up workers that join
                on_wait(len(self.roster.ready()))

    def wait_for_seat(self, session: SessionHandle, timeout_s: float) -> int | None:
        """Wait until the worker at the other end of a session has said hello.

        Returns:
            Its rank; None when the session closed before, or no hello came in time.
        """
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while (rank := self.seats.rank_of(session.session_id)) is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or session.state == "closed":
                    return None
                self._changed.wait(min(0.05, left_s))
            return rank

    def close(self) -> None:
        """Stop the dispatcher. The owners of the sessions close them before this."""
        self._programs.close()
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def _cleaned(event: Event) -> Event:
    """Return an event whose message has nothing in its texts that a terminal would obey."""
    if isinstance(event, MessageArrived):
        event.message = cleaned(event.message)
    elif isinstance(event, VisitArrived):
        return replace(event, message=cleaned(event.message))
    return event


def _higher(one: float | None, other: float | None) -> float | None:
    return max((rate for rate in (one, other) if rate is not None), default=None)
