"""A worker's share of a run's steps: shards are worked on, commits applied, one piece at a time.

Knows what has come of each step, the replica, and what to tell the orchestrator; knows nothing of the queue of messages.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from guava_nb.data.codec import pack, tensor_from, unpack
from guava_nb.errors import GuavaError
from guava_nb.protocol.messages import (
    Abort,
    BatchShard,
    CommitStep,
    Failure,
    FailureKind,
    FetchState,
    LoadState,
    ParameterBucket,
    ShardReport,
    State,
    StateLoaded,
    StepApplied,
    StepWithoutShard,
    SumBucket,
)
from guava_nb.replica.base_replica import BaseReplica
from guava_nb.replica.device_figures import FlopCount
from guava_nb.replica.gradient_buckets import bucket_sender
from guava_nb.replica.one_step_check.python_state import changed_since, digests
from guava_nb.replica.optimizer import ApplyFailed
from guava_nb.replica.replica import Replica
from guava_nb.replica.shard import LaunchedShard
from guava_nb.row_cache.reader import Load
from guava_nb.telemetry import EXCHANGE, UPDATE, WAITING, PhaseBook
from guava_nb.telemetry.energy_reporter import EnergyReporter
from guava_nb.worker.device_prefetch import DevicePrefetch, copier_for
from guava_nb.worker.early_steps import EarlySteps, key_of, note_work
from guava_nb.worker.error_text import NOTE, advised_text, lost_device, trace_text
from guava_nb.worker.pending_steps import LocalStep, PendingSteps
from guava_nb.worker.preparation import USER_ERRORS, PreparedRun, Send
from guava_nb.worker.process_group import GroupSeat
from guava_nb.worker.smaller_pieces import axes_for, memory_advice, refuse_coupled, work_of

__all__ = ["StepRunner"]

log = logging.getLogger(__name__)

#: What a worker did of a step when something was raised, and what helps where that was a lack of memory.
_IN, _APPLYING, _COPYING = "in {} {}", "while {} {} was applied", "while the state after {} {} was copied"
_MEMORY_ADVICE = {
    _APPLYING: "The optimizer's own step did not fit here: use an optimizer that keeps less, zero mode, or another device",
    _COPYING: "The copy of the state did not fit here; the state itself is as it was: free some memory there and ask again",
}
_MOST_KEPT = 8  # names of changed state that are sent

#: Presence bits and flat tensor of a bucket.
_Sum = tuple[bytes, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A lone worker's step that the device was given and whose figures were not read yet."""

    step: LocalStep[_Sum]
    message: BatchShard
    launched: LaunchedShard
    started: float
    wait_s: float


class StepRunner:
    """Works on the steps of one run after another.

    Args:
        send: queues a message for the orchestrator; never blocks.
        device: where replicas live.
        seat: this worker's place in process groups, if it may take one.
        energy: is told what is done when; None: no energy is measured.
        on_work: called when a shard begins.
        on_commit: called with (generation, step) after each commit.
    """

    def __init__(
        self,
        send: Send,
        device: torch.device,
        seat: GroupSeat | None,
        energy: EnergyReporter | None,
        on_work: Callable[[], None],
        on_commit: Callable[[int, int], None],
    ) -> None:
        """Have no run yet."""
        self._send, self._device, self._seat, self._energy = send, device, seat, energy
        self._on_work, self._on_commit = on_work, on_commit
        self._phases, self._flops = PhaseBook() if energy is None else energy.phases, FlopCount(False)
        self._prefetch = DevicePrefetch(copier_for(device))
        self._early = EarlySteps(self._prefetch, self._phases, on_work)
        self._run: PreparedRun | None = None
        self._pending: PendingSteps[_Sum] = PendingSteps()
        self._generation, self._built_in = 0, -1
        self._is_halted = False  # a step could not be applied: the orchestrator says how it goes on
        self._pieces = 1  # into how many pieces a shard is cut so that it fits the memory
        self._idle_since = time.monotonic()
        self._own_step = -1  # the last one that was decided here
        self._ahead: _Ahead | None = None  # applied on the device, and not yet known to be
        self.lost_device = ""  # what made this process lose its device
        self._kept_first: dict[str, bytes] | None = None  # digests of what the user's code keeps, as the run began

    def begin(self, run: PreparedRun, generation: int, step: int = -1) -> None:
        """Work on this run after this step; what is of an older generation is of an earlier attempt to build it."""
        self.go_on(run, generation)
        self._pending.reset(step, generation)
        self._kept_first = None if step < 0 else _kept(run.replica)

    def come_back(self, run: PreparedRun, generation: int) -> None:
        """Work on the run in work from its last committed step; `generation` as in `begin`."""
        self._built_in, self._is_halted = generation, False
        self._forget_pending(self.committed, generation)

    def go_on(self, run: PreparedRun, generation: int) -> None:
        """Work on this run from its first step on, with what the last one left; its steps may be of a group that stands."""
        self._built_in, self._run, self._pieces, self._is_halted = generation, run, 1, False
        self._pending = PendingSteps()
        # Of a model in parts each worker would count its own operations only.
        self._flops = FlopCount(run.spec.count_flops and run.spec.parallel is None)

    def end(self) -> None:
        """The run is over: forget what has come of it."""
        self.go_back_to_committed()
        self._run = None
        self.close()

    def go_back_to_committed(self) -> None:
        """Forget all steps that are not committed: the orchestrator that asked for them does not wait any more."""
        self.settle()
        self._forget_pending(self.committed)

    def _forget_pending(self, committed: int, *generation: int) -> None:
        self._pending = PendingSteps()
        self._pending.reset(committed, *generation)

    def close(self) -> None:
        """End the prefetch; a shard that comes later begins it anew."""
        self._prefetch.close()

    @property
    def committed(self) -> int:
        """The last step that was applied in this run or, between two, in the last one; -1 before the first."""
        return self._pending.committed - (self._ahead is not None)

    @property
    def mid_step(self) -> bool:
        """Whether shards of the present step were computed that are not committed."""
        step = self._pending.current()
        return step is not None and bool(step.done)

    @property
    def has_work(self) -> bool:
        """Whether `advance` has something to do."""
        step = self._pending.current()
        if self._ahead is not None or self._is_halted or step is None:
            return self._ahead is not None
        return bool(step.todo) or self._can_apply(step) or self._early.may_begin(self._run, self._pending)

    def restart_wait_clock(self) -> None:
        """Count the waiting for the next shard from now on."""
        self._idle_since = time.monotonic()

    # -------------------------------------------------------------------------------------------------------- messages

    def add(self, message: BatchShard, load: Load | None) -> None:
        """Take a shard; `load` gives its parts, None where it will come again."""
        step = self._pending.announce(message.step, message.generation, message.want_hash)
        if step is not None and message.shard not in step.done and load is not None:
            step.todo.append((message, load))

    def announce(self, message: StepWithoutShard) -> None:
        """A step has begun in which this worker may have no shard."""
        self._pending.announce(message.step, message.generation, message.want_hash)

    def add_sum(self, message: SumBucket | ParameterBucket, payload: memoryview) -> None:
        """Take the sum of a bucket, or its new values, `[numel]`; the tensor may be `payload` itself, now the run's."""
        step = self._pending.find(message.step, message.generation)
        if step is not None:
            step.has_parameters = isinstance(message, ParameterBucket)
            step.buckets[message.bucket] = (message.present, _values(message, payload, self._run))
            step.commit = message.commit or step.commit

    def commit(self, message: CommitStep) -> None:
        """Apply a step as soon as all of it has come."""
        if (step := self._pending.find(message.step, message.generation)) is not None:
            step.commit = message.commit

    def abort(self, message: Abort) -> None:
        """Give up what is not committed, and tell how far this worker is.

        One that decides by itself may be ahead. Another has in a group applied a step that failed elsewhere, and takes it back.
        """
        self._generation, self._is_halted = max(self._generation, message.generation), False
        ahead, run = self.committed - message.last_committed, self._run
        is_torn = ahead == 1 and self.committed != self._own_step
        if is_torn and run is not None and run.spec.parallel is not None and run.replica.undo_step():
            self._forget_pending(message.last_committed)
        self._pending.abort(message.last_committed, message.generation)
        self._send(StepApplied(run_id=message.run_id, generation=message.generation, step=self.committed), ())

    def load_state(self, replica: BaseReplica, message: LoadState, payload: memoryview, own: Any = None) -> None:
        """Become the state that came, with an own part that lay here, and say so; errors as in `BaseReplica.load_state`."""
        replica.load_state({**unpack(message.state, payload), **({"own": own} if own else {})})
        self._pending.reset(message.step, message.generation)
        self._generation, self._is_halted = message.generation, False
        self.restart_wait_clock()  # what came before was preparing, no waiting for data
        if self._kept_first is None:
            self._kept_first = _kept(replica)
        digest = replica.parameter_hash() if message.want_hash else ""
        kind = f"{self._device.type}, torch {torch.__version__.split('+')[0]}{replica.kind}"
        self._send(StateLoaded(message.run_id, message.step, digest, kind, message.generation, own is not None), ())

    def send_state(self, replica: BaseReplica, message: FetchState, ticks: int) -> None:
        """Send the state of the last commit, or only its schedule, after so many `ticks`; where it cannot be made, tell why."""
        try:
            is_whole = message.model or message.optimizer
            state = replica.state(message.model, message.optimizer) if is_whole else replica.schedule_state()
            tree, buffers = pack(state)
        except USER_ERRORS as error:  # memory for the copies, or what the user's optimizer keeps
            self.fail(error, message.run_id, request=message.request_id, at=(_COPYING, self.committed))
            return
        kept = changed_since(self._kept_first, _kept(replica)) if self._kept_first is not None else ()
        self._send(State(message.request_id, message.run_id, self.committed, tree, kept[:_MOST_KEPT], ticks), buffers)

    # ------------------------------------------------------------------------------------------------------------ work

    def advance(self, leaving: bool) -> BaseException | None:
        """Do one piece of work, so that messages are looked at in between; none when the worker is `leaving`.

        Returns:
            What the user's optimizer raised where what the replica holds is unknown.
        """
        run, step = self._run, self._pending.current()
        if run is not None and self._pending.take_abandoned():
            run.replica.restore()
        if self._ahead is not None and (leaving or step is None or not step.todo):
            self.settle()
            return None
        if run is None or step is None or leaving or self._is_halted:
            return None
        try:
            if self._can_apply(step):
                self._apply(run, step)
            elif step.todo:
                message, load = step.todo.pop(0)
                if message.shard not in step.done:
                    self._work(run, step, message, load)
            elif self._early.may_begin(run, self._pending):
                self._early.begin(run, self._pending, self._pieces)
                self.restart_wait_clock()
        except USER_ERRORS as error:
            return error
        return None

    def _can_apply(self, step: LocalStep[_Sum]) -> bool:
        run, came = self._run, len(step.buckets)
        return run is not None and bool(step.commit) and step.announced and came in (0, len(run.replica.layout.numbers))

    def _work(self, run: PreparedRun, step: LocalStep[_Sum], message: BatchShard, load: Load) -> None:
        started = time.monotonic()
        wait_s = started - self._idle_since
        self._phases.add(WAITING, self._idle_since, started)
        self._on_work()
        is_alone = message.solo and not run.spec.lockstep
        goes_ahead = is_alone and isinstance(run.replica, Replica) and run.replica.can_apply_ahead
        if not goes_ahead:
            self.settle()
        if self._ahead is None and self._pending.current() is not step:
            return  # the one before it does not count: it comes again
        try:
            parts = self._prefetch.take(key_of(message), load)
            self._look_ahead()
            launched = self._run_shard(run, message, parts, goes_ahead)
            result = None if goes_ahead else launched.read()
            commit = run.replica.own_commit(result, message) if result and is_alone else None
        except USER_ERRORS as error:  # the user's model or loss; shown in the orchestrator's cell
            self.settle()
            run.replica.restore()
            self._fail_in(run, message, error)
            return
        if result is None:
            self._apply_ahead(run, _Ahead(step, message, launched, started, wait_s))
            return
        step.done.add(message.shard)
        note_work(self._phases, result, started)
        ready = result.report(message, wait_s)
        self.restart_wait_clock()
        if commit is None:
            self._send(ready, ())
        else:  # in one message; and at once, since an abort that waits must not part ranks that have voted for the step
            step.ready, step.commit = ready, commit
            self._apply(run, step)
            self._own_step = self.committed

    def _fail_in(self, run: PreparedRun, message: BatchShard, error: BaseException) -> None:
        notes = _notes_on(error, run.replica, message)
        self.fail(error, message.run_id, at=(_IN, message.step), rows=message.rows, notes=notes)

    # -------------------------------------------------------------------------------------------------- a lone worker ahead

    def _apply_ahead(self, run: PreparedRun, ahead: _Ahead) -> None:
        """Give the device the step, once it is known that the one before it counts; its figures are read one step later."""
        replica = run.replica
        assert isinstance(replica, Replica)
        self.settle()
        if self._is_halted or self._pending.current() is not ahead.step:
            replica.restore()  # the step before it does not count, or its schedule failed: this one is not asked for any more
            return
        try:
            replica.apply_ahead(ahead.launched)
        except ApplyFailed as failed:
            self._halt(run, failed.__cause__, self.committed + 1)
            return
        self._pending.advance()
        self._generation, self._ahead = ahead.step.generation, ahead
        self.restart_wait_clock()

    def settle(self) -> None:
        """Wait for the step that the device was given last, and report it; does nothing where there is none."""
        ahead, run = self._ahead, self._run
        if ahead is None or run is None:
            return
        self._ahead, replica, failure, result = None, run.replica, None, None
        rate = replica.learning_rate  # its schedule moves on with the step
        assert isinstance(replica, Replica)
        try:
            result = replica.confirm(ahead.launched)
        except ApplyFailed as failed:
            failure, result = failed.__cause__, ahead.launched.read()
        except USER_ERRORS as error:
            self._pending.take_back(ahead.step)
            self._fail_in(run, ahead.message, error)
            return
        ahead.step.done.add(ahead.message.shard)
        note_work(self._phases, result, ahead.started)
        ready = result.report(ahead.message, ahead.wait_s)
        if result.finite:
            self._applied(run, ahead.step, ready, rate, failure)
            return
        self._pending.take_back(ahead.step)
        self._send(ready, ())

    def _look_ahead(self) -> None:
        """Let the next shard, if it is here, come to the device while this one computes."""
        if (following := self._pending.following()) is not None:
            self._prefetch.begin(key_of(following[0]), following[1])

    def _run_shard(self, run: PreparedRun, message: BatchShard, parts: list[Any], ahead: bool = False) -> LaunchedShard:
        """Run the shard; on lack of memory cut it into smaller pieces, whose gradients add up to the same.

        Raises:
            TrainingError: a lone worker's loss couples samples, so they would not.
        """
        replica = run.replica
        rows = message.part_rows or (message.rows,)
        while True:
            work = work_of(message, parts, rows, self._pieces)
            try:
                with self._flops.around(message.rows):
                    on_bucket = None if message.solo else bucket_sender(self._send, message, replica.wire)
                    launched = replica.launch_shard(work, on_bucket, ahead)
                if self._energy is not None:
                    self._energy.flops = self._flops.per_sample
                return launched
            except torch.OutOfMemoryError:
                # A group's members must do the same operations.
                axes = axes_for(message, parts, rows)
                if self._pieces >= message.rows or not isinstance(replica, Replica) or not axes:
                    raise
                self._pieces *= 2
                log.warning("out of memory with %d rows: cutting shards into %d pieces", message.rows, self._pieces)
                replica.restore()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()
                if message.solo and self._pieces == 2:  # with several workers this was looked at before the first step
                    refuse_coupled(run, parts[0], rows[0], axes[0])

    def _apply(self, run: PreparedRun, step: LocalStep[_Sum]) -> None:
        replica, commit, failure = run.replica, step.commit, None
        rate = replica.learning_rate if run.spec.optimizer_site == "workers" else None  # else the master's counts
        assert commit is not None
        started = time.monotonic()
        self._phases.add(EXCHANGE, self._idle_since, started)
        if isinstance(replica, Replica) and step.has_parameters and not commit.skip:
            replica.take_parameters(step.buckets, commit.frozen)
        else:
            try:
                if isinstance(replica, Replica) and not step.done and not commit.skip:
                    replica.stand_in(self.committed + 1)
                with contextlib.nullcontext() if self._seat is None else self._seat.applying():
                    replica.apply(step.buckets or None, commit, self.committed + 1)
            except ApplyFailed as failed:
                failure = failed.__cause__
                if not failed.applied:
                    if step.ready is not None and run.spec.parallel is not None:  # others may have applied it
                        self._send(step.ready, ())
                    self._halt(run, failure, self.committed + 1)
                    if self._seat is not None:
                        self._seat.leave()  # peers may wait for this rank's part in the midst of theirs (ZeRO 1)
                    return
        self._pending.advance()
        self._generation = step.generation
        self._applied(run, step, step.ready, rate, failure, skipped=commit.skip)
        self.restart_wait_clock()
        self._phases.add(UPDATE, started, self._idle_since)

    def _applied(
        self,
        run: PreparedRun,
        step: LocalStep[_Sum],
        ready: ShardReport | None,
        learning_rate: float | None,
        failure: BaseException | None,
        skipped: bool = False,
    ) -> None:
        """Tell of a step that counts here; `failure` is what its schedule raised."""
        replica = run.replica
        applied = StepApplied(
            run_id=run.run_id, generation=step.generation, step=self.committed, skipped=skipped, ready=ready,
            parameter_hash=replica.parameter_hash() if step.want_hash else "", learning_rate=learning_rate,
        )  # fmt: skip
        self._send(applied, ())
        self._on_commit(self._generation, self.committed)
        if failure is not None:
            self._halt(run, failure, self.committed)

    def _halt(self, run: PreparedRun, failure: BaseException | None, step: int) -> None:
        """Do nothing more by itself: the state is that of the last committed step, for those who ask."""
        assert failure is not None
        self._is_halted = True
        self._forget_pending(self.committed)
        self.fail(failure, run.run_id, at=(_APPLYING, step))

    def fail(
        self, error: BaseException, run_id: str, kind: FailureKind = FailureKind.USER, request: int = 0,
        at: tuple[str, int] = ("", -1), rows: int = 0, notes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Tell the orchestrator what the user's code, or the group, raised.

        Args:
            kind: `INTERNAL` where what the replica holds is unknown.
            request: number of the `Evaluate`, `Predict` or `FetchState`, if it was one.
            at: what it did, one of this module's phrases, and the step, counted from 0.
            rows: samples of the shard in work, if it was one.
            notes: what may have led to it.
        """
        (doing, step), generation, run = at, self._built_in, self._run
        if lost := lost_device(error):
            notes, self.lost_device = (NOTE,), lost
        text = ". ".join([self.lost_device or advised_text(error, None if run is None else run.spec), *notes])
        if self._seat is not None and self._seat.broken_by(error):
            kind = FailureKind.GROUP if kind is FailureKind.USER else FailureKind.TORN
            generation = self._seat.formed_in
        elif doing:
            unit = "step" if run is None or run.spec.rounds is None else "round"
            text += f" ({doing.format(unit, step + 1)})"
        if isinstance(error, torch.OutOfMemoryError | MemoryError) and kind is FailureKind.USER:
            kind = FailureKind.MEMORY
            text += f". {_MEMORY_ADVICE.get(doing) or memory_advice(self._run, request, rows, self._pieces)}"
        message = Failure(
            run_id=run_id, kind=kind, type_name=type(error).__name__, text=text, traceback=trace_text(error),
            request_id=request, generation=generation,
        )  # fmt: skip
        self._send(message, ())


def _values(message: SumBucket | ParameterBucket, payload: memoryview, run: PreparedRun | None) -> torch.Tensor:
    if run is None or isinstance(message, ParameterBucket):
        if run is not None and message.void:
            run.replica.wire.note_void(message)
        return tensor_from(message.tensor.dtype, (message.tensor.numel,), payload)
    return run.replica.wire.decode_sum(message, payload)


def _notes_on(error: BaseException, replica: BaseReplica, message: BatchShard) -> list[str]:
    is_known = isinstance(error, GuavaError | torch.OutOfMemoryError)
    is_odd = isinstance(error, RuntimeError | IndexError) and not is_known
    return replica.notes_on_error(message.rows < message.global_rows) if is_odd else []


def _kept(replica: BaseReplica) -> dict[str, bytes]:
    return digests(replica.module, replica.user_code, replica.optimizer)
