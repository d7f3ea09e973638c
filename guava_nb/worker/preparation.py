"""What a worker builds before a run: the shared cells' module, data sets that lie here, the replica, its group."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from guava_nb.data.codec import class_resolver, pack, unpack
from guava_nb.data.split import RowSplitter
from guava_nb.errors import ConfigError, PreparationError
from guava_nb.parallel.loss_interface import Forward
from guava_nb.protocol.messages import (
    AskData,
    Cell,
    CheckStep,
    DataFacts,
    Evaluate,
    Evaluated,
    Finding,
    FormGroup,
    GroupFormed,
    Message,
    MetricSpec,
    Predict,
    Predicted,
    Prepare,
    Prepared,
    RunSpec,
    StepChecked,
    TensorInfo,
    Tree,
    Wanted,
)
from guava_nb.replica.base_replica import BaseReplica
from guava_nb.replica.metrics import Measure, build_metrics
from guava_nb.replica.model.resident import OWN_MODEL, ResidentParts, describe_model
from guava_nb.replica.objective import user_function
from guava_nb.replica.one_step_check.python_state import ModuleGlobals
from guava_nb.replica.one_step_check.whole_against_cut import compare
from guava_nb.replica.outputs import columns_of, inputs_of, joined
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.local_replica import whole_replica
from guava_nb.replica.state_dict import weights_digest
from guava_nb.spec.cells import build_module, cause_is_missing, resolve
from guava_nb.spec.factories import Resolve
from guava_nb.spec.loading import loading_without_collections
from guava_nb.spec.own_facts import facts_of, module_of, roots_of
from guava_nb.worker.error_text import error_text, lost_device, problem_text, sendable, trace_text
from guava_nb.worker.process_group import GroupSeat
from guava_nb.worker.worker_datasets import OwnData

__all__ = ["USER_ERRORS", "Evaluator", "Preparation", "PreparedRun", "Send", "warm_up"]

# A worker's answers in a pass over data: validation and prediction of one batch at the last committed state.

Reply = tuple[Message, Sequence[memoryview]]


class Evaluator:
    """Answers for one replica; metrics are made once and used for every batch.

    Args:
        replica: of the run.
        resolve: finds shared and importable objects by name.
        metrics: of the run's own validations, made at once so that what is missing here is told before training.
    """

    def __init__(self, replica: BaseReplica, resolve: Resolve, metrics: Sequence[MetricSpec] = ()) -> None:
        """Make the run's metrics; raises as `guava_nb.replica.metrics.build_metric`."""
        self._replica, self._resolve = replica, resolve
        self._specs: tuple[MetricSpec, ...] = tuple(metrics)
        self._measures: list[Measure] = build_metrics(metrics, resolve, replica.device)
        self._wanted: Wanted | None = None
        self._forward: Forward = _call

    def evaluate(self, message: Evaluate, batch: Any) -> Reply:
        """Return the sums over a batch, and the states of its metrics."""
        if message.metrics != self._specs:
            self._measures = build_metrics(message.metrics, self._resolve, self._replica.device)
            self._specs = message.metrics
        for measure in self._measures:
            measure.begin()
        observer = self._see if self._measures else None
        sums = self._replica.evaluate(batch, message.rows, observer, message.axes)
        rows = sums.rows if message.grouped else message.rows
        tree = Tree(b"")
        buffers: Sequence[memoryview] = ()
        if self._measures and sums.rows:  # a rank whose figures do not count has 0 rows
            tree, buffers = pack([measure.state() for measure in self._measures])
        reply = Evaluated(
            run_id=message.run_id,
            request_id=message.request_id,
            loss_sum=sums.loss_sum,
            count=sums.count,
            correct=sums.correct,
            scored=sums.scored,
            nll=sums.nll,
            rows=rows,
            metrics=tree,
        )
        return reply, buffers

    def _see(self, outputs: Any, targets: Any, rows: int) -> None:
        for measure in self._measures:
            measure.see(outputs, targets, rows)

    def predict(self, message: Predict, batch: Any) -> Reply:
        """Return what was asked for of the outputs on a batch."""
        if message.wanted != self._wanted:
            step = message.wanted.step
            self._forward = _call if step is None else user_function("predict_step", step, self._resolve)
            self._wanted = message.wanted
        parts = self._replica.predict(batch, message.rows, self._forward, message.axes)
        if not parts:
            return Predicted(message.run_id, message.request_id, 0), ()
        columns = [columns_of(outputs, rows, message.wanted, self._replica.torch_loss) for outputs, rows in parts]
        tree, buffers = pack(joined(columns))
        return Predicted(message.run_id, message.request_id, message.rows, tree), buffers


def _call(model: nn.Module, batch: Any) -> Any:
    return model(inputs_of(batch))


Send = Callable[[Message, Sequence[memoryview]], None]
#: Characters of what a check raised, and buffers that it names, at most.
_MOST_TEXT, _MOST_NAMES, _MOST_NUMBERS = 2000, 8, 32
#: What a user's code may raise without ending this worker: leaving is not its business.
USER_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """What a worker has of one run.

    Attributes:
        run_id: of the run.
        spec: its record.
        module: of the shared cells; None where there are none.
        resolve: finds shared and importable objects by name.
        replica: trains.
        evaluator: validates and predicts with the replica.
        cells: that the module was built of.
        facts: of the user's code, as it was when the run was built.
    """

    run_id: str
    spec: RunSpec
    module: ModuleType | None
    resolve: Resolve
    replica: BaseReplica
    evaluator: Evaluator
    cells: tuple[Cell, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, message: Prepare) -> bool:
        """Whether a run that goes on from this one finds here what it would build."""
        return (self.run_id, self.cells, self.spec) == (message.after, message.cells, message.spec)


def warm_up(device: torch.device) -> None:
    """Start a GPU, with its library of matrix products, on a thread, and load what a group of GPUs needs.

    A first run would wait for both. On processors workers rarely form a group, and load what it needs when they do.
    """

    def start() -> None:
        with contextlib.suppress(RuntimeError):  # no memory, a lost device: the first run says so
            square = torch.ones(16, 16, device=device)
            square @ square

    if device.type == "cpu":
        return
    threading.Thread(target=start, name="guava-warm-device", daemon=True).start()
    with loading_without_collections():
        importlib.import_module("guava_nb.replica.group_replica")


class Preparation:
    """Builds what runs need, on one device.

    Args:
        device: where replicas live.
        own: what lives in the calling process; its model is trained in place.
        seat: takes this worker's place in process groups; None refuses runs that need one.

    Attributes:
        datasets: that lie here; the newest run's are open.
    """

    def __init__(self, device: torch.device, own: ResidentParts | None, seat: GroupSeat | None) -> None:
        """Build nothing yet."""
        self._device, self._own, self._seat = device, own, seat
        self._default_dtype, self._threads = torch.get_default_dtype(), torch.get_num_threads()
        self.datasets = OwnData()
        self._first_facts: dict[str, str] = {}
        self._globals = ModuleGlobals()
        self.lost_device = ""  # what made this process lose its device while it prepared

    def build(self, message: Prepare) -> PreparedRun:
        """Build what a run needs; raises what the user's code raises.

        Raises:
            ConfigError: a name, an argument or a setting is wrong.
            PreparationError: the run needs what this worker lacks, or the user's factory raised.
            ImportError: a module that the user's code imports is missing here.
        """
        spec = message.spec
        if torch.get_num_threads() != (threads := spec.threads or self._threads):  # of an earlier run
            torch.set_num_threads(threads)
        if (
            spec.deterministic or torch.are_deterministic_algorithms_enabled()
        ):  # of an earlier run; the call loads the compiler
            torch.use_deterministic_algorithms(spec.deterministic)
        torch.set_default_dtype(self._default_dtype)  # an earlier run's code may have left others
        torch.set_grad_enabled(True)
        module = _module_of(message.cells)
        self.datasets.open(message.cells, spec.data, module)

        def resolve(name: str) -> object:
            return self._resolve(name, module)

        if self._own is None:  # else the modules are the user's own process's
            self._globals.restore()
        replica = self._replica(spec, resolve)
        self._globals.note(roots_of(spec, resolve).values())
        evaluator, facts = Evaluator(replica, resolve, spec.metrics), self._facts_of(spec, resolve, module)
        return PreparedRun(message.run_id, spec, module, resolve, replica, evaluator, message.cells, facts)

    def _replica(self, spec: RunSpec, resolve: Resolve) -> BaseReplica:
        if spec.parallel is None:
            return whole_replica(spec, resolve, self._device, None if self._own is None else self._own.model)
        if self._seat is None or self._own is not None:
            raise PreparationError(
                "a worker inside the user's own process trains whole replicas in data mode only: start it with "
                "%guava_worker or guava worker to take part in other modes"
            )
        # Loading torch's parallel libraries costs a second, and the star needs none of them.
        from guava_nb.replica.group_replica import GroupReplica

        return GroupReplica(spec, resolve, self._device)

    def _resolve(self, name: str, module: ModuleType | None) -> object:
        """Return what a run's record names: shared, importable, or with @ what lives in this process."""
        if not name.startswith("@"):
            found: object = resolve(name, module)
            return found
        if self._own is None:
            raise PreparationError(
                f"this run's {name[1:]} lives in a worker's own process (GPUTrainer, or NetworkWorker with model_ctor=), and "
                "this worker has none: start GPUTrainer on its machine, or name a model that workers can build (register_model)"
            )
        return self._own.find(name)

    def built(self, message: Prepare, run: PreparedRun, holds_step: int | None = None, ticks: int = 0) -> Prepared:
        """Return the answer for a run that was built; a model that the orchestrator cannot build is described.

        Args:
            holds_step: it was not: what the run before it left is here, or what this worker had of this run, after that step.
            ticks: of its schedule.
        """
        described: tuple[TensorInfo, ...] = ()
        if self._own is not None and run.spec.model is not None and run.spec.model.name == OWN_MODEL:
            assert isinstance(run.replica, Replica)
            described = describe_model(run.replica.model)  # not the user's own object: that may be wrapped
        layout = run.replica.layout.digest()
        digest = ""
        if message.want_digest and self._own is None and isinstance(run.replica, Replica):
            digest = weights_digest(run.replica.model)
        return Prepared(
            run_id=run.run_id, ok=True, layout=layout, model=described, facts=dict(run.facts), generation=message.generation,
            holds=holds_step is not None, step=-1 if holds_step is None else holds_step, digest=digest, ticks=ticks,
        )  # fmt: skip

    def _facts_of(self, spec: RunSpec, resolve: Resolve, module: ModuleType | None) -> dict[str, str]:
        """What the user's code reads of its modules; of imported ones as they were at first: counters move since then."""
        roots = roots_of(spec, resolve)
        found = facts_of(roots)
        shared = "" if module is None else module.__name__
        for place, text in found.items():
            # What a role names is another object from run to run.
            if place not in roots and (not shared or module_of(place) in sys.modules):
                found[place] = self._first_facts.setdefault(place, text)
        return {sendable(place): sendable(text) for place, text in found.items()}

    def failed(self, message: Prepare, error: BaseException) -> Prepared:
        """Return the answer for a run that could not be built; the orchestrator's cell shows it."""
        self._look_at(error)
        return Prepared(
            run_id=message.run_id, ok=False, missing_module=cause_is_missing(error),
            problem=problem_text(error), traceback=trace_text(error), generation=message.generation,
        )  # fmt: skip

    def _look_at(self, error: BaseException) -> None:
        self.lost_device = self.lost_device or lost_device(error)

    def data_facts(self, message: AskData) -> DataFacts:
        """Build data sets that lie here and return their records, or what is wrong with them."""
        try:
            facts = self.datasets.facts(message.cells, message.data, _module_of(message.cells))
        except USER_ERRORS as error:  # the orchestrator's cell must show it
            self._look_at(error)
            # A sentence of ours needs no traceback, the user's own code does.
            trace = "" if isinstance(error, ConfigError) else trace_text(error)
            problem, missing = error_text(error) or type(error).__name__, cause_is_missing(error)
            return DataFacts(message.request_id, (), missing_module=missing, problem=problem, traceback=trace)
        return DataFacts(message.request_id, tuple(facts))

    def check_step(self, run: PreparedRun, message: CheckStep, payload: memoryview) -> StepChecked:
        """Return how a batch and its pieces differ; the run stays as it is.

        Args:
            run: in work.
            message: the question.
            payload: the bytes of the batch, and of weights to look with.
        """
        rows = message.rows
        try:
            batches = unpack(message.batch, payload, class_resolver(run.module))
            weights = batches.pop() if message.has_weights else None
            if message.source:  # pieces of what was loaded once: a data set may draw random numbers
                whole = self.datasets.batches(message, batches[0], run.spec.seed)
                edges = accumulate(rows[1:], initial=0)
                batches = [whole, *RowSplitter().split(whole, list(pairwise(edges)), rows[0])]
            found = compare(run.replica, run.spec, run.resolve, batches, rows, weights)
        except USER_ERRORS as error:  # the batch itself cannot be made here
            self._look_at(error)
            found = Finding("whole failed", problem=error_text(error))
        kept = replace(
            found,
            problem=sendable(found.problem[:_MOST_TEXT]),
            buffers=found.buffers[:_MOST_NAMES],
            moved=found.moved[:_MOST_NAMES],
            compared=found.compared[:_MOST_NUMBERS],
            written=found.written[:_MOST_NAMES],
            written_unlike=found.written_unlike[:_MOST_NAMES],
        )
        return StepChecked(run_id=message.run_id, request_id=message.request_id, finding=kept)

    def form_group(self, run: PreparedRun, message: FormGroup, payload: memoryview) -> GroupFormed:
        """Join the process group, and build this rank's part of the model over it.

        Args:
            run: that was prepared.
            message: members, path and generation.
            payload: the bytes of an example batch, where stages are measured with one.
        """
        from guava_nb.replica.group_replica import GroupReplica

        seat, replica = self._seat, run.replica
        assert seat is not None and isinstance(replica, GroupReplica)
        run_id, generation = message.run_id, message.generation
        try:
            resolve = class_resolver(run.module)
            example = None if message.example is None else unpack(message.example, payload, resolve)
            seat.form(message)
            replica.wants_digest = message.want_digest
            replica.spread(len(message.members), example, message.machines)
            seat.complete()
            return GroupFormed(
                run_id=run_id, generation=generation, ok=True, layout=replica.layout_text, digest=replica.digest
            )
        except USER_ERRORS as error:
            self._look_at(error)
            return GroupFormed(
                run_id=run_id, generation=generation, ok=False, problem=problem_text(error), traceback=trace_text(error),
                broken=seat.broken_by(error),
            )  # fmt: skip


def _module_of(cells: Sequence[Cell]) -> ModuleType | None:
    return build_module(cells) if cells else None
