"""A worker's end of one session: says hello, feeds the loop, and tells the loop when the session ends.

Who opened the session does not matter here: `run` dials one, `greet` and `work` take one that came to a listener.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from guava_nb.backend import Endpoint
from guava_nb.backend.stuck_watch import StuckWatch
from guava_nb.config.state_folder import state_folder
from guava_nb.errors import GuavaError, JoinCodeError, JoinRefused, LinkBroken, LinkClosed, LinkTimeout
from guava_nb.link.dialler import IDENTITY_BYTES, Backoff, DialledSession, dial
from guava_nb.link.line_measurement import measure_line
from guava_nb.link.options import LinkOptions
from guava_nb.link.registry import SESSION_OVER, SESSION_UNKNOWN
from guava_nb.link.session_events import (
    Event,
    MessageArrived,
    SessionClosed,
    SessionHandle,
    SessionResumed,
    SessionSuspect,
)
from guava_nb.protocol.joincode import JoinCode, check_same_session
from guava_nb.protocol.messages import (
    Abort,
    BatchShard,
    EndRun,
    Energy,
    InterruptCode,
    LineMeasured,
    MeasureLine,
    Message,
    Prepare,
    ShardReport,
    StepApplied,
    channel_of,
)
from guava_nb.replica.model.resident import ResidentParts
from guava_nb.status import NEW_CODE_NEEDED, OwnFigures
from guava_nb.telemetry.energy_reporter import EnergyReporter
from guava_nb.telemetry.hardware import describe
from guava_nb.telemetry.machine import device_now
from guava_nb.telemetry.waits import Waits
from guava_nb.worker.loop import WorkerLoop
from guava_nb.worker.path_probe import PathProbe
from guava_nb.worker.process_group import GroupSeat

__all__ = ["OwnWork", "WorkerSession"]

# What a worker can say of its own work, read off the messages that pass: nothing in its loop has to keep count.
#
# Pure: messages and the time are told. `figures` may be called from any thread.


class OwnWork:
    """One worker's count of its own work.

    Args:
        device: torch's name of it.
        device_name: its maker's.
    """

    def __init__(self, device: str, device_name: str) -> None:
        """Nothing was done yet."""
        self._on_cpu, self._blank = device == "cpu", OwnFigures(device_name=device_name)
        self._lock = threading.Lock()
        self._figures = self._blank
        self._waits = Waits()
        self._given: dict[tuple[int, int], tuple[int, float]] = {}  # (step, shard): rows, share
        self._done: dict[int, int] = {}  # rows of shards worked on, by step
        self._run_id = ""
        self._energy: Energy | None = None

    def arrived(self, message: Message) -> None:
        """Take note of a message of the orchestrator."""
        if not isinstance(message, Prepare | BatchShard | Abort | EndRun):
            return
        with self._lock:
            match message:
                case Prepare(run_id=run_id):
                    self._run_id, self._figures, self._waits, self._energy = run_id, self._blank, Waits(), None
                    self._given.clear()
                    self._done.clear()
                case BatchShard(run_id=self._run_id):
                    rows = sum(message.part_rows) or message.rows
                    share = rows / message.global_rows if message.global_rows else 0.0
                    self._given[message.step, message.shard] = (rows, share)
                case Abort(run_id=self._run_id, last_committed=last):
                    self._done = {step: rows for step, rows in self._done.items() if step <= last}
                    self._given = {at: given for at, given in self._given.items() if at[0] <= last}
                case EndRun(run_id=self._run_id):
                    self._run_id = ""

    def sent(self, message: Message, now_s: float) -> None:
        """Take note of a message of this worker's."""
        if not isinstance(message, ShardReport | StepApplied | Energy):
            return
        with self._lock:
            if message.run_id != self._run_id:
                return
            match message:
                case ShardReport():
                    self._worked(message, now_s)
                case StepApplied(step=step, ready=ready):
                    if ready is not None:
                        self._worked(ready, now_s)
                    self._committed(step)
                case Energy():
                    self._energy = message

    def _worked(self, ready: ShardReport, now_s: float) -> None:
        rows, share = self._given.pop((ready.step, ready.shard), (ready.rows, None))
        self._done[ready.step] = self._done.get(ready.step, 0) + rows
        self._waits.reported(now_s, ready.wait_s)
        self._figures = replace(
            self._figures, share=share, step_s=ready.forward_s + ready.backward_s, waits=self._waits.worker_waits,
            threads=torch.get_num_threads() if self._on_cpu else None,  # asked in the thread that computes
        )  # fmt: skip

    def _committed(self, step: int) -> None:
        rows = sum(self._done.pop(done) for done in [known for known in self._done if known <= step])
        self._given = {at: given for at, given in self._given.items() if at[0] > step}
        self._figures = replace(self._figures, samples=self._figures.samples + rows)

    def figures(self) -> OwnFigures:
        """Return what is known now, without the link, which has its own counters."""
        with self._lock:
            told = {} if self._energy is None else device_now(self._energy, self._on_cpu, bool(self._run_id))
            return replace(self._figures, **told)


# A worker's part in measuring its line: visits the orchestrator's listener when asked. On a thread of its own.


class LineProbe:
    """At most one visit at a time, each ended by the time that a visit has.

    Args:
        code: where the orchestrator listens now; None for a worker that is dialled.
        options: patience.
        send: queues a message for the orchestrator; never blocks.
    """

    def __init__(
        self,
        code: Callable[[], JoinCode | None],
        options: LinkOptions,
        send: Callable[[Message, Sequence[memoryview]], None],
    ) -> None:
        """Measure nothing yet."""
        self._code, self._options, self._send = code, options, send
        self._busy = threading.Lock()

    def post(self, message: Message) -> bool:
        """Take a message, in the thread that reads; returns True when it asks for a visit."""
        if not isinstance(message, MeasureLine):
            return False
        threading.Thread(target=self._answer, args=(message,), name="guava-line", daemon=True).start()
        return True

    def _answer(self, order: MeasureLine) -> None:
        self._send(self._measured(order), ())

    def _measured(self, order: MeasureLine) -> LineMeasured:
        code = self._code()
        if code is None:
            return LineMeasured(order.measuring_id, error="this worker listens and has no address to dial back to")
        if not self._busy.acquire(blocking=False):
            return LineMeasured(order.measuring_id, error="it is being measured already")
        try:
            found = measure_line(code, self._options, last_burst_bytes=order.burst_bytes)
        except (GuavaError, OSError) as error:
            return LineMeasured(order.measuring_id, error=str(error))
        finally:
            self._busy.release()
        return LineMeasured(order.measuring_id, found.up_bytes_s, found.down_bytes_s, found.used_bytes)


_ANY_GENERATION = 1 << 62
_ASKED_TO_LEAVE = "it was asked to leave"

#: state, last committed step (-1 before the first), one sentence.
Report = Callable[[str, int, str], None]


class WorkerSession:
    """One worker in one session.

    Args:
        code: where to go and what to prove; None for a session that comes to a listener.
        device: where the replica lives.
        name: wanted name; the orchestrator makes it unique.
        own: what lives in the calling process, its model trained in place; None for a worker that builds everything.
        report: called on every change of state; from any thread.
        on_stuck: ends this process, for this reason, where its loop is blocked for ever; None: it is not ours to end.
    """

    def __init__(
        self,
        code: JoinCode | None,
        device: torch.device,
        name: str = "",
        *,
        own: ResidentParts | None = None,
        identity: bytes | None = None,
        options: LinkOptions | None = None,
        report: Report = lambda state, step, detail: None,
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare; `run` dials."""
        self._code, self._options = code, options or LinkOptions()
        self._identity = secrets.token_bytes(IDENTITY_BYTES) if identity is None else identity
        self._hello = describe(
            device, name, "spawned" if own is None else "worker", own=() if own is None else own.names()
        )
        self._report = report
        self._session: SessionHandle | None = None
        self._earlier_bytes = (0, 0)  # sent and received in sessions before this one
        self._closed: tuple[GuavaError, bool] | None = None  # why the session ended, and whether the peer said so
        self._state, self._step = "ready", -1
        self._away = ""  # what it waits for while the orchestrator is away
        self._telling = threading.Lock()
        self._endpoint = Endpoint(self._send, self._hello.name)
        self._seat, self._on_stuck = GroupSeat(self._endpoint, device), on_stuck
        self._stuck_watch = StuckWatch(lambda: self._seat.is_woken, self._give_up)
        self._prober = PathProbe(self._send)
        self._lines = LineProbe(lambda: self._code, self._options, self._send)
        self._work = OwnWork(self._hello.device, self._hello.device_name)
        self._energy = EnergyReporter(device, self._send_noted, up_bytes_s=self._up_bytes_s)
        seat = self._seat if own is None else None
        self.loop = WorkerLoop(
            self._send_noted, device, own, self._on_state, self._on_commit, seat=seat, energy=self._energy,
            states=state_folder() / "states" if own is None else None,
        )  # fmt: skip

    def run(self) -> str:
        """Dial, and work until the session ends; returns why it ended.

        A session that was given up, because this process or the line stood still for long, is followed by another one: the
        worker joins again with the state that it holds. So it is when the orchestrator was started anew with the same code.

        Raises:
            GuavaError: the join failed, the orchestrator was lost for `rejoin_s`, or it sent this worker away.
        """
        assert self._code is not None
        self._report("joining", -1, f"dialling {self._code.address}")
        self.greet(dial(self._code, self.on_event, self._options, self._identity))
        try:
            while True:
                try:
                    return self._to_its_end()
                except GuavaError as cause:
                    if not _may_come_back(cause):
                        raise
                    session = self._join_again()
                    if session is None:
                        return _ASKED_TO_LEAVE
                    self.greet(session)
        finally:
            self._close()

    def _join_again(self) -> DialledSession | None:
        """Open another session with what this worker holds; None: it was asked to leave meanwhile.

        Raises:
            LinkTimeout: the orchestrator did not come back within `rejoin_s`.
            GuavaError: another session listens there, or it refused this worker.
        """
        assert self._session is not None
        self.loop.between_sessions()
        self._count_bytes()
        before, name = self._session.session_id.hex(), self.loop.name or self._hello.name
        self._hello = msgspec.structs.replace(self._hello, name=name, before=before)
        wait_s, pauses = self._options.rejoin_s, Backoff()
        until = time.monotonic() + wait_s
        while not self.loop.is_leaving:
            assert self._code is not None
            address = self._code.address
            with self._telling:
                self._tell(
                    f"{address} is away; this worker keeps what it holds, and joins again by itself for up to {wait_s:g} s"
                )
            self._closed = None
            try:
                session = dial(self._code, self.on_event, self._options, self._identity)
            except (LinkBroken, LinkTimeout) as last:
                if time.monotonic() > until:
                    raise LinkTimeout(
                        f"{address} was away for more than {wait_s:g} s, and this worker waits no longer (last try: {last})"
                    ) from last
                time.sleep(pauses.next_s(time.monotonic()))
                continue
            self._endpoint.reopened()
            with self._telling:
                self._tell("")
            return session
        return None

    def _count_bytes(self) -> None:
        assert self._session is not None
        wire, (out_bytes, in_bytes) = self._session.wire, self._earlier_bytes
        self._earlier_bytes = out_bytes + sum(wire.out_bytes.values()), in_bytes + sum(wire.in_bytes.values())

    def redirect(self, code: JoinCode) -> None:
        """Dial the same orchestrator by another code from now on; from any thread.

        Raises:
            JoinCodeError: the code belongs to another session, or this worker does not dial; nothing has changed.
        """
        if self._code is None:
            raise JoinCodeError("this worker listens: the other side dials it, and the new code is for that side")
        check_same_session(self._code, code)
        self._code = code
        session = self._session
        if isinstance(session, DialledSession):
            with self._telling:
                if self._away:
                    self._tell(f"dialling {code.address} for up to {session.waits_s:g} s")
            session.redirect(code)

    def greet(self, session: SessionHandle) -> None:
        """Take a session that stands, and say hello on it."""
        self._session = session
        self._send(self._hello, ())

    def work(self) -> str:
        """Work until the session ends; returns why it ended.

        Raises:
            GuavaError: the orchestrator was lost, or it sent this worker away.
        """
        try:
            return self._to_its_end()
        finally:
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a device that is lost to this process
            self.loop.close()
        self._prober.close()
        self._energy.close()

    def _give_up(self, reason: str) -> None:
        """The loop is blocked for ever: leave, so that the others do not wait for it."""
        if self._on_stuck is not None and self._session is not None:
            self._session.close(reason)
            self._on_stuck(reason)

    def _to_its_end(self) -> str:
        """Work until the session ends; where the orchestrator ended it, no state of it is needed on this disk any more."""
        reason = self._work_on()
        by_peer = self._closed is not None and self._closed[1]
        self.loop.keeper.close(remove=by_peer)
        return reason

    def _work_on(self) -> str:
        assert self._session is not None
        self._stuck_watch.works_here()
        try:
            left = self.loop.run()
        finally:
            closed = self._closed  # before our own close, which is one more end of the session
            self._session.close("the worker left")
        if left or closed is None:  # an orchestrator that hears of it ends the session at once
            return _ASKED_TO_LEAVE
        cause, by_peer = closed
        if not (by_peer and isinstance(cause, LinkClosed)):
            raise cause  # lost, or sent away: a newer process took this place, the session was given up there
        return str(cause)

    def send(self, message: Message) -> None:
        """Queue a message for the orchestrator; from any thread. Does nothing once the session is closed."""
        if self._session is not None:
            self._send(message, ())

    def figures(self) -> OwnFigures:
        """Return what this worker knows of its own work and link; from any thread."""
        figures, session = self._work.figures(), self._session
        if session is None:
            return figures
        out_rate, in_rate = session.rate_bytes_s
        return replace(
            figures,
            rate_out_bytes_s=out_rate,
            rate_in_bytes_s=in_rate,
            round_trip_s=session.round_trip_s,
            out_bytes=self._earlier_bytes[0] + sum(session.wire.out_bytes.values()),
            in_bytes=self._earlier_bytes[1] + sum(session.wire.in_bytes.values()),
        )

    def _up_bytes_s(self) -> float | None:
        return None if self._session is None else self._session.rate_bytes_s[0]

    def _send_noted(self, message: Message, buffers: Sequence[memoryview]) -> None:
        self._work.sent(message, time.monotonic())
        self._send(message, buffers)

    def _send(self, message: Message, buffers: Sequence[memoryview]) -> None:
        assert self._session is not None
        with contextlib.suppress(LinkClosed):  # the loop gets its SessionClosed in a moment
            self._session.send(message, channel_of(message), buffers)

    def on_event(self, event: Event) -> None:
        """Take an event of the session; from any thread."""
        if isinstance(event, MessageArrived):
            self._work.arrived(event.message)
            if self._endpoint.post(event.message, memoryview(event.payload), event.done):
                return
            if any(part.post(event.message) for part in (self._prober, self._lines, self._energy, self.loop.tokens)):
                event.done()
                return
            if isinstance(event.message, InterruptCode):
                event.done()
                self.loop.user_code.interrupt(event.message.request_id)
                return
            if isinstance(event.message, Abort):  # the loop may be blocked in the group: wake it first
                self._seat.abort(event.message.generation, event.message.reason)
                is_out, done = self._stuck_watch.begin(), event.done
                self.loop.post(event.message, memoryview(event.payload), lambda: (is_out(), done())[1])
                return
            self.loop.post(event.message, memoryview(event.payload), event.done)
        elif isinstance(event, SessionClosed):
            self._closed = self._closed or (event.cause, event.by_peer)
            self._endpoint.closed(event.cause)
            self._seat.abort(_ANY_GENERATION, str(event.cause))
            self.loop.end()
        elif isinstance(event, SessionSuspect):
            with self._telling:
                self._tell(_waiting(event.session, event.cause, self._options.rejoin_s))
        elif isinstance(event, SessionResumed):
            with self._telling:
                self._tell("")

    def _on_state(self, state: str, step: int) -> None:
        with self._telling:
            self._state, self._step = state, step
            self._tell(self._away)

    def _tell(self, away: str) -> None:
        """Report what it does; while the orchestrator is away, that it waits: the step in work may well go on."""
        self._away = away
        if away:
            self._report("reconnecting", self._step, self._away)
        else:
            self._report(self._state, self._step, self.loop.name)

    def _on_commit(self, generation: int, step: int) -> None:
        self._step = step
        if self._session is not None:
            self._session.progress.last_generation, self._session.progress.last_step = generation, step


def _waiting(session: SessionHandle, cause: GuavaError, rejoin_s: float) -> str:
    """What a worker waits for whose connection broke, and how long in all: for this session, and then to join again."""
    if not isinstance(session, DialledSession):
        return str(cause)
    sentence = f"{cause}; this worker keeps what it holds, and dials again for up to {session.waits_s + rejoin_s:g} s"
    return f"{sentence}; {NEW_CODE_NEEDED}" if session.is_tunnelled else sentence


def _may_come_back(cause: GuavaError) -> bool:
    """Whether a session ended because its two ends lost each other, and not because one of them wanted it."""
    return isinstance(cause, LinkTimeout) or (
        isinstance(cause, JoinRefused) and cause.code in (SESSION_OVER, SESSION_UNKNOWN)
    )
