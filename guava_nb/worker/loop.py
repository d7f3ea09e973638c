"""The worker's loop: one for every mode. Takes messages, does shards, exchanges buckets, applies commits.

Runs on one thread (the process's main thread where we started the process); the session's own threads keep the connection
alive meanwhile, so a long compile or a long step is never taken for a death.
"""

# over budget: what a worker does with each message stands in one place.

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Union

import torch

from guava_nb.data.codec import class_resolver, pack, tensor_bytes, tensor_from, unpack
from guava_nb.errors import ConfigError, GuavaError, PreparationError
from guava_nb.protocol.messages import (
    Abort,
    Accept,
    AskData,
    Commit,
    CommitStep,
    Committed,
    DataFacts,
    EndRun,
    Evaluate,
    Failure,
    FailureKind,
    FetchState,
    FlatTensor,
    FormGroup,
    GradientBucket,
    GroupFormed,
    Leave,
    ListRows,
    LoadState,
    Message,
    ParameterBucket,
    Predict,
    Prepare,
    Prepared,
    Ready,
    Refused,
    RunSpec,
    Shard,
    State,
    StateLoaded,
    StepInfo,
    SumBucket,
    TensorInfo,
    Tick,
)
from guava_nb.replica.batch import cut
from guava_nb.replica.flops import FlopCount
from guava_nb.replica.replica import Replica
from guava_nb.replica.resident import OWN_MODEL, ResidentParts, describe_model
from guava_nb.replica.rng import shard_seed
from guava_nb.replica.shard import ShardResult, ShardWork
from guava_nb.row_cache.reader import Load, RowReader
from guava_nb.spec import cells as source
from guava_nb.telemetry import BACKWARD, EXCHANGE, FORWARD, UPDATE, WAITING, PhaseBook
from guava_nb.telemetry.energy_reporter import EnergyReporter
from guava_nb.worker.device_prefetch import DevicePrefetch, copier_for
from guava_nb.worker.error_text import error_text, trace_text
from guava_nb.worker.evaluate import Evaluator
from guava_nb.worker.pending_steps import LocalStep, PendingSteps
from guava_nb.worker.process_group import GroupSeat
from guava_nb.worker.worker_datasets import OwnData

if TYPE_CHECKING:  # loading torch's parallel libraries costs a second, and the star needs none of them
    from guava_nb.replica.sharded_replica import ShardedReplica

__all__ = ["Arrival", "WorkerLoop"]

log = logging.getLogger(__name__)

Send = Callable[[Message, Sequence[memoryview]], None]
AnyReplica = Union[Replica, "ShardedReplica"]
Mean = tuple[bytes, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message in the loop's queue; `done` gives its bytes back to the sender's window."""

    message: Message
    payload: memoryview
    done: Callable[[], None]


#: What a user's code may raise without ending this worker: leaving is not its business.
USER_ERRORS = (Exception, SystemExit)
#: Seconds in which the orchestrator asks a worker that leaves for its state, if it needs it; and in which that may arrive.
HANDOVER_S = 60.0
TRANSFER_S = 600.0
#: Why a loop ends whose session is over.
_ENDED = "ended"
#: Seconds without work after which a worker counts as idle, and between two reports of work.
SHOW_S = 0.25


def _nothing() -> None:
    pass


def _key(message: Shard) -> tuple[str, int, int, int]:
    return message.run_id, message.generation, message.step, message.shard


class _End(Exception):  # noqa: N818 - the way out of the loop, not an error
    pass


class WorkerLoop:
    """State and behaviour of one worker.

    Args:
        send: queues a message for the orchestrator; never blocks.
        device: where the replica lives.
        own: what lives in the calling process; its model is trained in place (program "worker").
        on_state: called with (state, step) for the worker's own display; at most a few times a second.
        on_commit: called with (generation, step) after each commit, for the session's resume record.
        accept_source: run the orchestrator's cells; False refuses runs that need them.
        seat: takes this worker's place in process groups; None refuses runs that need one.
        energy: gets told what this loop does when; None tells nobody.
    """

    def __init__(
        self,
        send: Send,
        device: torch.device,
        own: ResidentParts | None = None,
        on_state: Callable[[str, int], None] = lambda state, step: None,
        on_commit: Callable[[int, int], None] = lambda generation, step: None,
        accept_source: bool = True,
        seat: GroupSeat | None = None,
        energy: EnergyReporter | None = None,
    ) -> None:
        """Make a loop that has no run yet."""
        self._energy, self._flops = energy, FlopCount(False)
        self._phases = PhaseBook() if energy is None else energy.phases
        self._seat = seat
        self._send = send
        self._device = device
        self._own = own
        self._on_state, self._on_commit_done = on_state, on_commit
        self._shown = ("", 0.0)
        self._last_step = -1  # of the run that is over, for the worker's own display
        self._accept_source = accept_source
        self._queue: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._run_id = ""
        self._default_dtype = torch.get_default_dtype()
        self._replica: AnyReplica | None = None
        self._module: ModuleType | None = None
        self._prepare: Prepare | None = None
        self._answering: Evaluator | None = None
        self._generation = 0
        self._steps: PendingSteps[Mean] = PendingSteps()
        self._leaving = ""
        self._goes_by: float | None = None  # a leave was said; until then the orchestrator may ask for the state
        self._reader = RowReader(send)
        self._data = OwnData()
        self._ahead = DevicePrefetch(copier_for(device))
        self._pieces = 1  # into how many pieces a shard is cut so that it fits the memory
        self._idle_since = time.monotonic()
        self.name = ""

    # ---------------------------------------------------------------------------------------------------- from outside

    def post(self, message: Message, payload: memoryview, done: Callable[[], None] = lambda: None) -> None:
        """Hand in a message; from any thread."""
        if isinstance(
            message, Shard
        ):  # how many of them wait here is bounded by the orchestrator's own credit, in bytes
            done()
            done = _nothing
        self._queue.put(Arrival(message, payload, done))

    def leave(self, reason: str) -> None:
        """Leave after the step in work, when the orchestrator has what is only here; from any thread."""
        self._leaving = reason
        self._queue.put(None)

    def end(self) -> None:
        """End the loop as soon as it looks at its queue; from any thread."""
        self._queue.put(Arrival(Refused(_ENDED, ""), memoryview(b""), lambda: None))

    # -------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> bool:
        """Work until the orchestrator ends the session or `leave` is called.

        Returns:
            Whether it left because `leave` was called.

        Raises:
            GuavaError: the orchestrator refused this worker.
        """
        try:
            while not self._may_go():
                self._take()
                self._advance()
                if self._leaving and self._goes_by is None and not self._mid_step():
                    # From here on it begins nothing: what it holds stays that of its last committed step.
                    self._goes_by = time.monotonic() + (HANDOVER_S if self._replica is not None else 0)
                    self._send(Leave(self._leaving), ())
            return True
        except _End:
            return self._goes_by is not None
        finally:
            self._show("ready")  # once more: steps since the last report would never be seen
            self._ahead.close()
            self._reader.close()
            self._release_own()

    def _may_go(self) -> bool:
        """Whether the orchestrator has had its time to release a worker that leaves, which it does by ending the session."""
        return self._goes_by is not None and time.monotonic() >= self._goes_by

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
            self._on_state(state, self._steps.committed if self._replica is not None else self._last_step)

    def _mid_step(self) -> bool:
        step = self._steps.current()
        return step is not None and bool(step.done) and self._replica is not None

    def _has_work(self) -> bool:
        if self._goes_by is not None:
            return False
        step = self._steps.current()
        leaves = bool(self._leaving) and not self._mid_step()
        return leaves or (step is not None and (bool(step.todo) or self._can_apply(step)))

    def _handle(self, message: Message, payload: memoryview) -> None:
        match message:
            case Accept():
                self.name = message.name
                self._show("ready")
            case Prepare():
                self._on_prepare(message)
            case AskData():
                self._on_ask_data(message)
            case Refused(code=code, reason=reason):
                if code == _ENDED:
                    raise _End
                raise PreparationError(f"the orchestrator refused this worker: {reason}")
            case _ if getattr(message, "run_id", None) == self._run_id and self._replica is not None:
                try:
                    self._handle_of_run(self._replica, message, payload)
                except USER_ERRORS as error:  # the user's optimizer or schedule, a state that does not fit
                    self._give_up_run(error)
            case Shard() | Evaluate() | Predict():
                self._read(message, payload)  # of a run that is over here: rows that it brings are held all the same

    def _handle_of_run(self, replica: AnyReplica, message: Message, payload: memoryview) -> None:
        match message:
            case Shard():
                self._on_shard(message, self._read(message, payload))
            case StepInfo():
                self._steps.announce(message.step, message.generation, message.want_hash)
            case SumBucket() | ParameterBucket():
                self._on_mean(message, payload)
            case CommitStep():
                self._on_commit(message)
            case FormGroup():
                self._on_form_group(replica, message, payload)
            case Abort():
                self._on_abort(message)
            case LoadState():
                self._on_load(replica, message, payload)
            case FetchState():
                self._on_fetch(replica, message)
            case Tick(metric=metric):
                replica.tick(metric)
            case Evaluate() | Predict():
                assert self._answering is not None
                self._on_ask(self._answering, message, self._read(message, payload))
                self._idle_since = time.monotonic()  # that was work, no waiting for the next shard
            case ListRows():
                self._reader.list_rows(message.run_id)
            case EndRun():
                self._forget()

    # ------------------------------------------------------------------------------------------------------ preparation

    def _release_own(self) -> None:
        """Give the user's model back as of the last commit, without our hooks."""
        if self._own is not None and isinstance(self._replica, Replica):
            self._replica.close()

    def _forget(self) -> None:
        self._ahead.close()
        self._release_own()
        if self._replica is not None:
            self._last_step = self._steps.committed
        self._steps = PendingSteps()
        self._replica = self._module = self._prepare = self._answering = None
        self._run_id = ""
        if self._seat is not None:
            self._seat.leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _on_prepare(self, message: Prepare) -> None:
        self._forget()
        self._show("preparing")
        try:
            replica = self._build(message)
            self._answering = Evaluator(replica, self._resolve, message.spec.metrics)
            self._replica = replica
        except USER_ERRORS as error:  # the orchestrator's cell must show it
            text = error_text(error)
            problem = text if isinstance(error, GuavaError) else f"{type(error).__name__}: {text}"
            missing, trace = source.cause_is_missing(error), trace_text(error)
            self._send(
                Prepared(
                    run_id=message.run_id, ok=False, layout="", missing_module=missing, problem=problem, traceback=trace
                ),
                (),
            )
        else:
            self._run_id, self._prepare = message.run_id, message
            # Of a model in parts each worker would count its own operations only.
            self._flops = FlopCount(message.spec.count_flops and message.spec.parallel is None)
            self._reader.open(message.run_id, message.spec.cache)
            self._send(
                Prepared(
                    run_id=message.run_id,
                    ok=True,
                    layout=self._replica.layout.digest(),
                    model=self._described(message.spec),
                ),
                (),
            )
            self._show("ready")

    def _build(self, message: Prepare) -> AnyReplica:
        if message.cells and not self._accept_source:
            raise PreparationError("this worker does not run source code of the orchestrator")
        if message.spec.threads is not None:
            torch.set_num_threads(message.spec.threads)
        torch.use_deterministic_algorithms(message.spec.deterministic)
        torch.set_default_dtype(self._default_dtype)  # an earlier run's code may have left others
        torch.set_grad_enabled(True)
        self._module = source.build_module(message.cells) if message.cells else None
        self._data.open(message.cells, message.spec.data, self._module)
        if message.spec.parallel is not None:
            return self._build_group_replica(message.spec)
        own_model = None if self._own is None else self._own.model
        return Replica(message.spec, self._resolve, self._device, model=own_model)

    def _on_ask_data(self, message: AskData) -> None:
        self._show("preparing")
        try:
            if message.cells and not self._accept_source:
                raise PreparationError("this worker does not run source code of the orchestrator")
            module = source.build_module(message.cells) if message.cells else None
            facts = self._data.facts(message.cells, message.data, module)
        except USER_ERRORS as error:  # the orchestrator's cell must show it
            # A sentence of ours needs no traceback, the user's own code does.
            trace = "" if isinstance(error, ConfigError) else trace_text(error)
            problem = error_text(error) or type(error).__name__
            self._send(DataFacts(message.request_id, (), source.cause_is_missing(error), problem, trace), ())
        else:
            self._send(DataFacts(message.request_id, tuple(facts)), ())
        self._show("ready")

    def _resolve(self, name: str) -> object:
        """Return what a run's record names: shared, importable, or with @ what lives in this process."""
        if not name.startswith("@"):
            found: object = source.resolve(name, self._module)
            return found
        if self._own is None:
            raise PreparationError(
                f"this run's {name[1:]} lives in a worker's own process (GPUTrainer, or NetworkWorker with model_ctor=), and "
                "this worker is not one of those"
            )
        return self._own.find(name)

    def _described(self, spec: RunSpec) -> tuple[TensorInfo, ...]:
        """Describe a model that the orchestrator cannot build; others it knows."""
        if self._own is None or spec.model is None or spec.model.name != OWN_MODEL:
            return ()
        return describe_model(self._own.model)

    def _build_group_replica(self, spec: RunSpec) -> ShardedReplica:
        from guava_nb.replica.sharded_replica import ShardedReplica

        if self._seat is None or self._own is not None:
            raise PreparationError(
                "a worker inside the user's own process trains whole replicas in data mode only: start it with "
                "%guava_worker or guava worker to take part in other modes"
            )
        return ShardedReplica(spec, self._resolve, self._device)

    def _on_form_group(self, replica: AnyReplica, message: FormGroup, payload: memoryview) -> None:
        seat = self._seat
        assert seat is not None and not isinstance(replica, Replica)
        self._show("preparing")
        try:
            resolve = class_resolver(self._module)
            example = None if message.example is None else unpack(message.example, payload, resolve)
            seat.form(message)
            replica.spread(len(message.members), example, message.machines)
            seat.complete()
            answer = GroupFormed(
                run_id=message.run_id, generation=message.generation, ok=True, layout=replica.layout_text
            )
        except USER_ERRORS as error:
            text, trace = error_text(error), trace_text(error)
            problem = text if isinstance(error, GuavaError) else f"{type(error).__name__}: {text}"
            answer = GroupFormed(
                run_id=message.run_id,
                generation=message.generation,
                ok=False,
                problem=problem,
                traceback=trace,
                broken=seat.broken_by(error),
            )
        self._send(answer, ())
        self._show("ready")

    def _on_load(self, replica: AnyReplica, message: LoadState, payload: memoryview) -> None:
        replica.load_state(unpack(message.state, payload))
        self._steps.reset(message.step)
        self._generation = message.generation
        self._idle_since = time.monotonic()  # what came before was preparing, no waiting for data
        digest = replica.parameter_hash() if message.want_hash else ""
        kind = f"{self._device.type}, torch {torch.__version__.split('+')[0]}{replica.kind}"
        self._send(StateLoaded(message.run_id, message.step, digest, kind), ())

    def _on_fetch(self, replica: AnyReplica, message: FetchState) -> None:
        tree, buffers = pack(replica.state(model=message.model, optimizer=message.optimizer))
        self._send(State(message.request_id, message.run_id, self._steps.committed, tree), buffers)
        if self._goes_by is not None:
            self._goes_by = time.monotonic() + TRANSFER_S

    def _on_ask(self, answering: Evaluator, message: Evaluate | Predict, load: Load | None) -> None:
        if load is None:
            return  # rows are lacking: it comes again
        self._show("validating" if isinstance(message, Evaluate) else "predicting")
        try:
            answer = answering.evaluate if isinstance(message, Evaluate) else answering.predict
            reply, buffers = answer(message, load())  # type: ignore[arg-type]  # each takes its own
        except USER_ERRORS as error:  # the user's model, metric or data; shown in the orchestrator's cell
            self._fail(error, message.run_id, request=message.request_id)
            return
        self._send(reply, buffers)

    def _read(self, message: Shard | Evaluate | Predict, payload: memoryview) -> Load | None:
        load = self._reader.read(message, payload, class_resolver(self._module))
        if not message.source or load is None:
            return load
        ids = load()
        return lambda: self._own_batches(message, ids)

    def _own_batches(self, message: Shard | Evaluate | Predict, ids: Any) -> Any:
        """Batches of data that lies here; a shard that is issued again draws the same random numbers elsewhere."""
        seed = self._prepare.spec.seed if self._prepare is not None else 0
        if not isinstance(message, Shard):
            return self._data.batch(message.source, ids.tolist(), shard_seed(seed, -1 - message.source, int(ids[0])))
        return [
            self._data.batch(
                message.source, part.tolist(), shard_seed(seed, -1 - message.step, (place << 32) + message.shard)
            )
            for place, part in enumerate(ids)
        ]

    # ------------------------------------------------------------------------------------------------------------ steps

    def _on_shard(self, message: Shard, load: Load | None) -> None:
        if self._own is not None and self._own.service:
            raise PreparationError(
                f"this worker serves {self._own.service} and is not trained: start_training() there does"
            )
        step = self._steps.announce(message.step, message.generation, message.want_hash)
        if step is not None and message.shard not in step.done and load is not None:
            step.todo.append((message, load))

    def _on_mean(self, message: SumBucket | ParameterBucket, payload: memoryview) -> None:
        step = self._steps.find(message.step, message.generation)
        if step is not None:
            tensor = tensor_from(message.tensor.dtype, (message.tensor.numel,), payload)
            step.means[message.bucket] = (message.present, tensor)
            step.has_parameters = isinstance(message, ParameterBucket)
            step.commit = message.commit or step.commit

    def _on_commit(self, message: CommitStep) -> None:
        step = self._steps.find(message.step, message.generation)
        if step is not None:
            step.commit = message.commit

    def _on_abort(self, message: Abort) -> None:
        self._generation = max(self._generation, message.generation)
        self._steps.abort(message.last_committed, message.generation)
        # Tells how far this worker is: a lone one may have committed a step that the orchestrator does not know of yet.
        self._send(Committed(run_id=message.run_id, generation=message.generation, step=self._steps.committed), ())

    def _can_apply(self, step: LocalStep[Mean]) -> bool:
        if step.commit is None or not step.announced or self._replica is None:
            return False
        return len(step.means) == len(self._replica.layout.numbers) or not step.means

    def _advance(self) -> None:
        """Do one piece of work, so that messages are looked at in between."""
        replica, step = self._replica, self._steps.current()
        if replica is not None and self._steps.take_abandoned():
            replica.restore()
        if replica is None or step is None or self._goes_by is not None:
            return
        if self._can_apply(step):
            try:
                self._apply(replica, step)
            except USER_ERRORS as error:  # the user's optimizer or schedule
                self._give_up_run(error)
        elif step.todo:
            message, load = step.todo.pop(0)
            if message.shard not in step.done:
                self._work(replica, step, message, load)

    def _work(self, replica: AnyReplica, step: LocalStep[Mean], message: Shard, load: Load) -> None:
        started = time.monotonic()
        wait_s = started - self._idle_since
        self._phases.add(WAITING, self._idle_since, started)
        self._show("working")
        try:
            parts = self._ahead.take(_key(message), load)
            self._look_ahead()
            result = self._run_shard(replica, message, parts)
        except USER_ERRORS as error:  # the user's model or loss; shown in the orchestrator's cell
            replica.restore()
            self._fail(error, message.run_id)
            return
        step.done.add(message.shard)
        forward_ended = started + result.forward_s
        self._phases.add(FORWARD, started, forward_ended)
        self._phases.add(BACKWARD, forward_ended, forward_ended + result.backward_s)
        ready = Ready(
            run_id=message.run_id,
            generation=message.generation,
            step=message.step,
            shard=message.shard,
            loss_sum=result.loss_sum,
            count=result.count,
            finite=result.finite,
            rows=message.rows,
            forward_s=result.forward_s,
            backward_s=result.backward_s,
            wait_s=wait_s,
            culprit=result.culprit,
            gradient_square=result.gradient_square,
            tokens=result.tokens,
        )
        scaled = self._prepare is not None and self._prepare.spec.precision == "fp16"
        if message.solo and (result.finite or scaled):
            # Nobody waits for this report, so it travels with the commit: one message a step instead of two.
            scale = message.global_rows / result.count if result.count else 0.0
            step.ready, step.commit = ready, Commit(scale, skip=not result.finite)
        else:
            self._send(ready, ())
        self._idle_since = time.monotonic()

    def _look_ahead(self) -> None:
        """Let the next shard, if it is here, come to the device while this one computes."""
        following = self._steps.following()
        if following is not None:
            message, load = following
            self._ahead.begin(_key(message), load)

    def _run_shard(self, replica: AnyReplica, message: Shard, parts: list[Any]) -> ShardResult:
        """Run the shard; on lack of memory cut it into smaller pieces, whose gradients add up to the same."""

        def on_bucket(bucket: int, present: bytes, flat: torch.Tensor) -> None:
            spec = FlatTensor(str(flat.dtype).removeprefix("torch."), flat.numel())
            head = GradientBucket(
                run_id=message.run_id,
                generation=message.generation,
                step=message.step,
                shard=message.shard,
                bucket=bucket,
                present=present,
                tensor=spec,
            )
            self._send(head, [tensor_bytes(flat)])

        while True:
            pieces = parts if self._pieces == 1 else [p for part in parts for p in cut(part, self._pieces)]
            work = ShardWork(
                message.step, message.shard, pieces, message.rows, message.global_rows, message.part_rows or None
            )
            try:
                with self._flops.around(message.rows):
                    result = replica.run_shard(work, None if message.solo else on_bucket)
                if self._energy is not None:
                    self._energy.flops = self._flops.per_sample
                return result
            except torch.OutOfMemoryError:
                if self._pieces >= message.rows or message.part_rows:  # a group's members must do the same operations
                    raise
                self._pieces *= 2
                log.warning("out of memory with %d rows: cutting shards into %d pieces", message.rows, self._pieces)
                replica.restore()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()

    def _apply(self, replica: AnyReplica, step: LocalStep[Mean]) -> None:
        assert step.commit is not None
        started = time.monotonic()
        self._phases.add(EXCHANGE, self._idle_since, started)
        if isinstance(replica, Replica) and step.has_parameters and not step.commit.skip:
            replica.take_parameters(step.means)
        elif self._seat is not None and not isinstance(replica, Replica):
            with self._seat.applying():
                replica.apply(None, step.commit)
        else:
            replica.apply(step.means or None, step.commit)
        self._steps.advance()
        self._generation = step.generation
        self._send(
            Committed(
                run_id=self._run_id,
                generation=step.generation,
                step=self._steps.committed,
                parameter_hash=replica.parameter_hash() if step.want_hash else "",
                learning_rate=replica.learning_rate,
                skipped=step.commit.skip,
                ready=step.ready,
            ),
            (),
        )
        self._idle_since = time.monotonic()
        self._phases.add(UPDATE, started, self._idle_since)
        self._on_commit_done(self._generation, self._steps.committed)

    def _give_up_run(self, error: BaseException) -> None:
        """Nobody knows any more what the replica holds: tell, and wait for another run."""
        self._fail(error, self._run_id, FailureKind.INTERNAL)
        self._forget()

    def _fail(self, error: BaseException, run_id: str, kind: FailureKind = FailureKind.USER, request: int = 0) -> None:
        text, trace = error_text(error), trace_text(error)
        if self._seat is not None and self._seat.broken_by(error):
            kind = FailureKind.GROUP if kind is FailureKind.USER else FailureKind.TORN
        elif isinstance(error, torch.OutOfMemoryError | MemoryError) and kind is FailureKind.USER:
            kind = FailureKind.MEMORY
            text += ". One sample alone does not fit here: use a smaller model, lower precision or another device"
        self._send(
            Failure(
                run_id=run_id,
                kind=kind,
                type_name=type(error).__name__,
                text=text,
                traceback=trace,
                request_id=request,
            ),
            (),
        )
