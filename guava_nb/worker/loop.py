"""The worker's loop: one for every mode. It takes messages from a queue and says which one goes where.

Runs on one thread (the process's main thread where we started the process); the session's own threads keep the connection
alive meanwhile, so a long compile or a long step is never taken for a death.
"""

from __future__ import annotations

import gc
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from guava_nb.data.codec import class_resolver
from guava_nb.errors import LocalProtocolError, PreparationError
from guava_nb.protocol.messages import (
    Abort,
    Accept,
    AskData,
    BatchShard,
    CheckStep,
    CommitStep,
    EndProgram,
    EndRun,
    Evaluate,
    Failure,
    FailureKind,
    FetchState,
    FormGroup,
    InstallPackages,
    Leave,
    ListRows,
    LoadState,
    Message,
    ParameterBucket,
    PlaceFiles,
    Predict,
    Prepare,
    Prepared,
    Refused,
    RunCode,
    RunProgram,
    SchedulerStep,
    StepWithoutShard,
    SumBucket,
)
from guava_nb.replica.model.resident import ResidentParts
from guava_nb.row_cache.reader import Load, RowReader
from guava_nb.telemetry.energy_reporter import EnergyReporter
from guava_nb.worker.error_text import DeviceLost
from guava_nb.worker.pending_steps import ScheduleTicks
from guava_nb.worker.preparation import USER_ERRORS, Preparation, PreparedRun, Send, warm_up
from guava_nb.worker.process_group import GroupSeat
from guava_nb.worker.saving.state_keeper import StateKeeper
from guava_nb.worker.steps import StepRunner
from guava_nb.worker.token_teller import NobodyWaits, TokenTeller
from guava_nb.worker.user_code.cell_runner import CellRunner

__all__ = ["WorkerLoop"]


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A message in the loop's queue; `done` gives its bytes back to the sender's window."""

    message: Message
    payload: memoryview = memoryview(b"")
    done: Callable[[], None] = lambda: None


#: Seconds in which the orchestrator asks a worker that leaves for its state, if it needs it; and in which that may arrive.
HANDOVER_S = 60.0
TRANSFER_S = 600.0
#: Why a loop ends whose session is over.
_ENDED = "ended"
#: Seconds without work after which a worker counts as idle, and between two reports of work.
SHOW_S = 0.25


class _End(Exception):  # noqa: N818 - the way out of the loop, not an error
    pass


class WorkerLoop:
    """One worker: takes messages, and hands each to what builds runs, does their steps, evaluates or reads batches.

    Args:
        send: queues a message for the orchestrator; never blocks.
        device: where the replica lives.
        own: what lives in the calling process; its model is trained in place (program "worker").
        on_state: called with (state, step) for the worker's own display; at most a few times a second.
        on_commit: called with (generation, step) after each commit, for the session's resume record.
        seat: takes this worker's place in process groups; None refuses runs that need one.
        energy: is told what this loop does when; None: no energy is measured.
        states: folder for states that stay on this machine's disk; None keeps none.

    Attributes:
        keeper: of these states.
        tokens: tells what prompts in work have become so far.
    """

    def __init__(
        self,
        send: Send,
        device: torch.device,
        own: ResidentParts | None = None,
        on_state: Callable[[str, int], None] = lambda state, step: None,
        on_commit: Callable[[int, int], None] = lambda generation, step: None,
        seat: GroupSeat | None = None,
        energy: EnergyReporter | None = None,
        states: Path | None = None,
    ) -> None:
        """Make a loop that has no run yet."""
        self._send, self._device, self._own, self._seat = send, device, own, seat
        self._on_state = on_state
        self._shown = ("", 0.0)
        self._queue: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._preparation = Preparation(device, own, seat)
        self._steps = StepRunner(send, device, seat, energy, lambda: self._show("working"), on_commit)
        self._reader = RowReader(send)
        self.keeper = StateKeeper(send, states)
        self.user_code = CellRunner(send, device, seat)
        self.tokens = TokenTeller(send, lambda: self.is_leaving or self._is_ending)
        self._not_built: Prepared | None = None  # the newest order, where it failed
        self._run: PreparedRun | None = None
        self._ticks = ScheduleTicks()
        self._session_id = ""  # of the orchestrator's session: what is held is of its runs
        self._leaving = ""
        self._is_ending = False  # the session is over: no one waits for what is in work
        self._leave_deadline: float | None = None  # a leave was said; until then the orchestrator may ask for the state
        self.name = ""

    # ---------------------------------------------------------------------------------------------------- from outside

    def post(self, message: Message, payload: memoryview, done: Callable[[], None] = lambda: None) -> None:
        """Hand in a message; from any thread.

        Args:
            message: of the orchestrator.
            payload: its bytes.
            done: called when the message was handled; of a shard at once, since their number is bounded by bytes.
        """
        if isinstance(message, BatchShard):
            # How many of them wait here is bounded by the orchestrator's own credit, in bytes.
            done()
            self._queue.put(_Arrival(message, payload))
        else:
            self._queue.put(_Arrival(message, payload, done))

    def leave(self, reason: str) -> None:
        """Leave after the step in work, when the orchestrator has what is only here; from any thread."""
        self._leaving = reason
        self.user_code.interrupt()
        self._queue.put(None)

    @property
    def is_leaving(self) -> bool:
        """Whether it was asked to leave."""
        return bool(self._leaving)

    def end(self) -> None:
        """End the loop as soon as it looks at its queue; from any thread."""
        self._is_ending = True
        self.user_code.interrupt()
        self._queue.put(_Arrival(Refused(_ENDED, "")))

    # -------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> bool:
        """Work until the session ends or `leave` is called; what is held stays, and `run` may be called again.

        Returns:
            Whether it left because `leave` was called.

        Raises:
            GuavaError: the orchestrator refused this worker, or this process lost its device.
        """
        try:
            while not self._may_go():
                self._take()
                self._turn()
                if lost := self._steps.lost_device or self._preparation.lost_device:
                    raise DeviceLost(lost)
            return True
        except _End:
            return self._leave_deadline is not None
        finally:
            self._show("ready")  # once more: steps since the last report would never be seen

    def close(self) -> None:
        """Give back what was held."""
        self.keeper.close()
        self._steps.close()
        self._reader.close()
        self.user_code.close()
        self._release_own()

    def between_sessions(self) -> None:
        """Between two sessions: drop what came in the last one, keep the state of the last committed step."""
        self._is_ending = False
        while not self._queue.empty():
            arrival = self._queue.get()
            if arrival is not None:
                arrival.done()
        self._steps.go_back_to_committed()
        if self._seat is not None:
            self._seat.renew()

    def _may_go(self) -> bool:
        """Whether the orchestrator has had its time to release a worker that leaves, which it does by ending the session."""
        return self._leave_deadline is not None and time.monotonic() >= self._leave_deadline

    def _take(self) -> None:
        """Handle what has come; wait only when there is nothing to compute."""
        wait = not self._has_work()
        while True:
            try:
                arrival = self._queue.get(block=wait, timeout=SHOW_S)
            except queue.Empty:
                if not wait or self._may_go():
                    return
                self._show("ready")
                continue
            if arrival is None:
                return
            try:
                self._handle(arrival.message, arrival.payload)
            finally:
                arrival.done()
            wait = not self._has_work()

    def _show(self, state: str) -> None:
        """Report a change of state; during a run a few times a second are enough, and a report costs a system call."""
        now = time.monotonic()
        if state != self._shown[0] or (state == "working" and now > self._shown[1] + SHOW_S):
            self._shown = (state, now)
            self._on_state(state, self._steps.committed)

    def _has_work(self) -> bool:
        if self._leave_deadline is not None:
            return False
        return (bool(self._leaving) and not self._steps.mid_step) or self._steps.has_work

    def _turn(self) -> None:
        """Do one piece of work, and say a leave between two steps."""
        error = self._steps.advance(leaving=self._leave_deadline is not None)
        if error is not None:
            self._give_up_run(error)
        if self._leaving and self._leave_deadline is None:
            self._steps.settle()
        if self._leaving and self._leave_deadline is None and not self._steps.mid_step:
            # From here on it begins nothing: what it holds stays that of its last committed step.
            self._leave_deadline = time.monotonic() + (HANDOVER_S if self._run is not None else 0)
            self._send(Leave(self._leaving), ())

    def _handle(self, message: Message, payload: memoryview) -> None:
        match message:
            case Accept():
                self.name = message.name
                if self._session_id not in ("", message.session):
                    self.user_code.close()
                    self._forget()  # another session may have a run of the same name
                self._session_id = message.session
                self.keeper.open(message.session)
                self._show("ready")
                warm_up(self._device)
            case Prepare():
                self._on_prepare(message)
            case AskData():
                self._show("preparing")
                self._send(self._preparation.data_facts(message), ())
                self._show("ready")
            case EndProgram():
                self.user_code.end_program()
            case RunCode() | RunProgram() | InstallPackages() | PlaceFiles():
                self._steps.settle()
                self._show("working")
                self._steps.lost_device = self.user_code.answer(message, payload, self.name) or self._steps.lost_device
                self._steps.restart_wait_clock()
                self._show("ready")
            case Refused(code=code, reason=reason, next_step=next_step):
                if code == _ENDED:
                    raise _End
                advice = f"; {next_step}" if next_step else ""
                raise PreparationError(f"the orchestrator refused this worker: {reason}{advice}")
            case _ if self._run is not None and getattr(message, "run_id", None) == self._run.run_id:
                if not isinstance(message, BatchShard | StepWithoutShard):
                    self._steps.settle()  # what else is asked is asked of a state that is known
                try:
                    self._handle_of_run(self._run, message, payload)
                except USER_ERRORS as error:  # the user's optimizer or schedule, a state that does not fit
                    self._give_up_run(error)
            case FetchState():
                self._send(_holds_nothing(message), ())
            case BatchShard() | Evaluate() | Predict():
                self._read(message, payload)  # of a run that is over here: rows that it brings are held all the same

    def _handle_of_run(self, run: PreparedRun, message: Message, payload: memoryview) -> None:
        steps = self._steps
        match message:
            case BatchShard():
                self._refuse_training()
                steps.add(message, self._read(message, payload))
            case StepWithoutShard():
                steps.announce(message)
            case SumBucket() | ParameterBucket():
                steps.add_sum(message, payload)
            case CommitStep():
                steps.commit(message)
            case FormGroup():
                self._show("preparing")
                self._send(self._preparation.form_group(run, message, payload), ())
                self._show("ready")
            case Abort():
                steps.abort(message)
            case LoadState():
                self._ticks = ScheduleTicks(message.ticks)
                steps.load_state(run.replica, message, payload, self.keeper.own_part(message.own))
            case FetchState():
                if not self._ticks.waits(message):
                    self._send_state(run, message)
            case SchedulerStep():
                self._tick(run, message)
            case Evaluate() | Predict():
                self._on_evaluate(run, message, self._read(message, payload))
                steps.restart_wait_clock()
            case CheckStep():
                self._show("preparing" if steps.committed < 0 else "working")
                self._send(self._preparation.check_step(run, message, payload), ())
                steps.restart_wait_clock()
            case ListRows():
                self._reader.list_rows(message.run_id)
            case EndRun():
                self._forget()
            case _:  # an order that is lost without a word has the orchestrator wait for ever
                raise LocalProtocolError(f"no code of a worker takes a {type(message).__name__}")

    def _send_state(self, run: PreparedRun, message: FetchState) -> None:
        here = (self._steps.committed, self._ticks.done)
        if message.save is not None and (message.save.step, message.ticks) == here:
            try:
                self.keeper.keep(run, message, *here)
            except USER_ERRORS as error:  # memory for the copy, or what the user's optimizer keeps
                self._steps.fail(error, run.run_id, request=message.request_id)
            return
        if (
            message.save is not None
        ):  # steps came first, on another channel: a state of theirs is not the one that was meant
            message = msgspec.structs.replace(message, model=False, optimizer=False)
        self._steps.send_state(run.replica, message, self._ticks.done)
        if self._leave_deadline is not None:
            self._leave_deadline = time.monotonic() + TRANSFER_S

    def _tick(self, run: PreparedRun, message: SchedulerStep) -> None:
        if self._ticks.begins(message):
            try:
                run.replica.tick(message.metric)
            except USER_ERRORS as error:  # the user's schedule: weights and optimizer are as they were
                self._steps.fail(error, run.run_id)
        for question in self._ticks.due():
            self._send_state(run, question)

    def _refuse_training(self) -> None:
        if self._own is not None and self._own.service:
            raise PreparationError(
                f"this worker serves {self._own.service} and is not trained: start_training() there does"
            )

    # ---------------------------------------------------------------------------------------------------- runs and data

    def _on_prepare(self, message: Prepare) -> None:
        before, stands_at = self._run, self._steps.committed
        comes_back = message.after == message.run_id
        if before is not None and before.is_of(message) and (comes_back or stands_at == message.after_step):
            before.replica.restore()
            self._run = run = replace(before, run_id=message.run_id)
            (self._steps.come_back if comes_back else self._steps.go_on)(run, message.generation)
            self._reader.open(run.run_id, run.spec.cache)
            answer = self._preparation.built(message, run, stands_at, self._ticks.done)
            is_behind = (
                comes_back and stands_at < message.after_step
            )  # built for a state that never came, or missed steps
            self._send(self._from_disk(run, message, answer) if is_behind else answer, ())
            return
        self._forget()
        failed, self._not_built = self._not_built, None
        was_begun = failed is not None and (failed.run_id, failed.generation + 1) == (
            message.run_id,
            message.generation,
        )
        if failed is not None and was_begun and comes_back:  # it is asked how that went
            self._send(msgspec.structs.replace(failed, generation=message.generation), ())
            return
        self._show("preparing")
        try:
            run = self._preparation.build(message)
        except USER_ERRORS as error:
            self._not_built = self._preparation.failed(
                message, error
            )  # the answer: the error would keep the model's memory
            self._send(self._not_built, ())
            return
        self._run, self._ticks = run, ScheduleTicks()
        self._reader.open(run.run_id, run.spec.cache)
        self._steps.begin(run, message.generation)
        self._send(self._from_disk(run, message, self._preparation.built(message, run)), ())
        self._show("ready")

    def _from_disk(self, run: PreparedRun, message: Prepare, answer: Prepared) -> Prepared:
        """Go on with a state of the run that lies on the disk, where one is asked for and there; returns the answer then."""
        answer = msgspec.structs.replace(answer, own=self.keeper.own_parts(message.own))
        found = self.keeper.find(run, message.saved)
        if found is None:
            return answer
        step, ticks = found.record.step, found.record.ticks
        run.replica.load_state(found.state)  # of the same code and options, so it fits
        self._ticks = ScheduleTicks(ticks)
        self._steps.begin(run, message.generation, step)
        return msgspec.structs.replace(
            answer, holds=False, saved=found.record.number, digest=found.digest, step=step, ticks=ticks
        )

    def _release_own(self) -> None:
        """Give the user's model back as of the last commit, without our hooks."""
        if self._own is not None and self._run is not None:
            self._run.replica.close()

    def _forget(self) -> None:
        self._steps.end()
        self.keeper.forget()
        self._release_own()
        in_group = self._seat is not None and self._seat.formed_in >= 0
        if self._run is not None and self._own is None and in_group:
            self._run.replica.close()
        is_spread = in_group or (self._run is not None and self._run.spec.parallel is not None)
        self._run = None
        if self._seat is not None:
            self._seat.leave()
        if is_spread:
            gc.collect()  # such a model is full of circles, and holds the group's sockets and threads
        if self._device.type == "cuda" and not self._steps.lost_device:
            torch.cuda.empty_cache()

    def _give_up_run(self, error: BaseException) -> None:
        """What the replica holds is unknown: tell, and wait for another run."""
        assert self._run is not None
        self._steps.fail(error, self._run.run_id, FailureKind.INTERNAL)
        self._forget()

    def _on_evaluate(self, run: PreparedRun, message: Evaluate | Predict, load: Load | None) -> None:
        if load is None:
            return  # rows are lacking: it comes again
        self._show("validating" if isinstance(message, Evaluate) else "predicting")
        try:
            if isinstance(message, Evaluate):
                reply, buffers = run.evaluator.evaluate(message, load())
            else:
                with self.tokens.during(message):
                    reply, buffers = run.evaluator.predict(message, load())
        except NobodyWaits:
            return
        except USER_ERRORS as error:  # the user's model, metric or data; shown in the orchestrator's cell
            self._steps.fail(error, message.run_id, request=message.request_id)
            return
        self._send(reply, buffers)

    def _read(self, message: BatchShard | Evaluate | Predict, payload: memoryview) -> Load | None:
        """Return what gives a message's batch; None when rows are lacking and it comes again."""
        run = self._run
        load = self._reader.read(message, payload, class_resolver(None if run is None else run.module))
        if not message.source or load is None:
            return load
        ids, seed = load(), 0 if run is None else run.spec.seed
        return lambda: self._preparation.datasets.batches(message, ids, seed)


def _holds_nothing(message: FetchState) -> Failure:
    """The answer to an orchestrator that asks for the state of a run of a process before it, of which nothing is here."""
    return Failure(
        run_id=message.run_id, kind=FailureKind.INTERNAL, type_name="PreparationError",
        text=f"this worker holds nothing of {message.run_id}", traceback="", request_id=message.request_id,
    )  # fmt: skip
