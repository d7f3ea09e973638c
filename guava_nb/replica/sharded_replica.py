"""One rank's part of a model that is spread over a process group: the local part of a training step.

The same face as `Replica`, so that the worker's loop drives both alike. Here gradients are summed by the group itself; the
hub only votes. Between two formations of the group nothing is kept but the record: a new group builds its part anew.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from guava_nb.config.mesh import Mesh
from guava_nb.errors import LocalProtocolError, TrainingError
from guava_nb.parallel.interface import Part
from guava_nb.parallel.loss_interface import Forward, Measured, Observer, Predicted
from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.parallelize import parallelize
from guava_nb.protocol.messages import Commit, RunSpec
from guava_nb.replica.buckets import BucketLayout, build_layout
from guava_nb.replica.build import autocast_dtype, build_model, check_spec, place_model
from guava_nb.replica.objective import build_criterion, build_objective, counting_correct
from guava_nb.replica.optimizer import LossScale, Schedule, build_optimizer, build_scheduler
from guava_nb.replica.outputs import inputs_of
from guava_nb.replica.preprocess import Preprocessing, pair_of
from guava_nb.replica.rng import seeded, shard_seed
from guava_nb.replica.shard import EvalSums, ShardResult, ShardWork
from guava_nb.replica.state_dict import copied, like, parameter_hash, plain
from guava_nb.spec.factories import Resolve

__all__ = ["ShardedReplica"]


class ShardedReplica:
    """A rank's part of the model with all it needs to train.

    Attributes:
        layout: buckets of the whole model; only their digest is used, to compare machines.
        part: this rank's part; None while no group stands.
    """

    def __init__(self, spec: RunSpec, resolve: Resolve, device: torch.device) -> None:
        """Build the whole model once, so that whatever is wrong with the record is found before a group is formed.

        Raises:
            ConfigError: a name, an argument or a setting is wrong.
            PreparationError: the user's own factory raised.
            ImportError: a module that the user's code imports is missing here.
        """
        check_spec(spec)
        assert spec.parallel is not None
        self.device = device
        self._spec, self._resolve, self._shape = spec, resolve, spec.parallel
        self._objective = build_objective(spec, resolve, device)
        self._preprocessing = Preprocessing(spec, resolve, device)
        self._criterion = None if spec.criterion is None else counting_correct(build_criterion(spec, resolve, device))
        self._autocast_dtype = autocast_dtype(spec.precision, device)
        model = place_model(build_model(spec, resolve), spec, torch.device("cpu"))
        self.layout: BucketLayout = build_layout(model, spec.bucket_bytes)
        build_scheduler(spec.scheduler, build_optimizer(spec.optimizer, model.named_parameters(), resolve), resolve,
                        spec.scheduler_interval)  # fmt: skip
        self.part: Part | None = None
        self._axes: MeshAxes | None = None
        self._schedule: Schedule | None = None
        self._scaler = LossScale() if spec.precision == "fp16" else None

    # ------------------------------------------------------------------------------------------------------- the group

    def spread(self, world_size: int, example: Any = None, machines: Sequence[int] = ()) -> None:
        """Build this rank's part of a new model over the process group that stands now.

        Args:
            world_size: ranks of the group.
            example: inputs of some samples (whole batches where there is a `preprocess`), for balancing stages by time; None on
                all ranks but the first.
            machines: see `MeshAxes.build`.

        Raises:
            ConfigError: the model cannot be split like this; the message has the sizes.
        """
        self.close()
        shape = self._shape
        mesh = Mesh(world_size // (shape.pp * shape.tp), shape.pp, shape.tp)
        shape = msgspec.structs.replace(shape, dp=mesh.data)  # whole replicas go on with any number
        self._axes = MeshAxes.build(mesh, self.device, machines)
        model = place_model(build_model(self._spec, self._resolve), self._spec, self.device)
        self.part = parallelize(
            model, shape, self._axes, self.device,
            objective=self._objective, criterion=self._criterion, make_optimizer=self._make_optimizer,
            sync_batchnorm=self._spec.sync_batchnorm, example=self._inputs_of(example),
        )  # fmt: skip
        optimizer = self.part.optimizer
        self._schedule = None
        if optimizer is not None:
            self._schedule = build_scheduler(
                self._spec.scheduler, optimizer, self._resolve, self._spec.scheduler_interval
            )
        self._scaler = LossScale() if self._spec.precision == "fp16" else None

    def _inputs_of(self, example: Any) -> Any:
        if self._spec.preprocess is None or example is None:
            return self._preprocessing.for_evaluation(example)
        return pair_of(self._preprocessing.for_evaluation(example))[0]

    def _make_optimizer(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self._spec.optimizer, list(named.items()), self._resolve)

    def close(self) -> None:
        """Forget the part; the group it was spread over is gone."""
        self.part = self._axes = self._schedule = None

    @property
    def _standing(self) -> Part:
        if self.part is None:
            raise LocalProtocolError("a step came before the process group was formed")
        return self.part

    @property
    def layout_text(self) -> str:
        """How the model is spread, in words for people."""
        return self._standing.layout

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the first parameter group; None on a rank without parameters."""
        optimizer = self._standing.optimizer
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else None

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward; 1 without fp16."""
        return self._scaler.scale if self._scaler else 1.0

    @property
    def kind(self) -> str:
        """Names the ranks that must hold the same parameters."""
        axes, sharded = self._axes, self._shape.zero_stage > 1
        assert axes is not None
        return f", stage {axes.pp + 1}, part {axes.tp + 1}" + (f", shard {axes.dp + 1}" if sharded else "")

    # ---------------------------------------------------------------------------------------------------------- a step

    def run_shard(self, work: ShardWork, on_bucket: object = None) -> ShardResult:
        """Do forward and backward of this rank's share, the group's sums included.

        Args:
            work: its parts; `part_rows` is 0 for a stand-in.
            on_bucket: not used: nothing goes to the hub.

        Raises:
            GroupBroken: a member was lost, or the step was given up.
            ConfigError: batch, loss or outputs have a form that cannot be trained on.
        """
        part, axes = self._standing, self._axes
        assert axes is not None
        started = time.monotonic()
        if not part.model.training:
            part.model.train()
        factor = self.loss_scale / work.global_rows
        seat = axes.dp * axes.sizes.stages + axes.pp  # ranks that share layers draw the same numbers
        counts: list[Any] = []
        parts = self._treated(work, axes.dp, counts)
        with seeded(shard_seed(self._spec.seed, work.step, seat), self.device, restore_all=False):
            sums = [
                self._train_part(part, batch, rows, factor, last=number == len(parts))
                for number, (batch, rows) in enumerate(parts, start=1)
            ]
        part.finish_gradients()
        return self._result(part, work, sums, counts, started)

    def _train_part(self, part: Part, batch: Any, rows: int, factor: float, last: bool) -> Measured:
        with self._autocast():
            return part.train_batch(batch, max(rows, 1), factor, stand_in=rows == 0, last=last)

    def _treated(self, work: ShardWork, replica: int, counts: list[Any]) -> list[tuple[Any, int]]:
        """The parts, placed and treated: all ranks of one replica draw the same numbers for it, on whatever stage.

        The one whose loss counts counts tokens too, into `counts`.
        """
        part, found = self._standing, []
        with seeded(shard_seed(self._spec.seed, work.step, -1 - replica), self.device, restore_all=False):
            for batch, rows in _parts(work):
                treated = self._preprocessing.train(batch)
                if part.reports and rows:
                    counts.append(self._preprocessing.tokens(treated))
                found.append((_taken(part, treated), rows))
        return found

    def _result(
        self, part: Part, work: ShardWork, sums: list[Measured], counts: list[Any], started: float
    ) -> ShardResult:
        loss_sum = count = 0.0
        if part.reports:
            loss_sum = sum(float(measured.loss_sum) for measured in sums)
            count = sum(
                measured.rows / work.global_rows if measured.count is None else float(measured.count)
                for measured in sums
            )
        if count < 0:
            raise TrainingError(f"the loss gave a count of {count:g}; the denominator of a mean is at least 0")
        square = part.gradient_square() / self.loss_scale**2
        finite = math.isfinite(loss_sum) and math.isfinite(count) and math.isfinite(square)
        return ShardResult(
            loss_sum, count, work.rows, finite, time.monotonic() - started, 0.0,
            "" if finite else part.culprit(), square, self._preprocessing.total(counts),
        )  # fmt: skip

    def apply(self, means: object, commit: Commit) -> None:
        """Apply the step on the gradients that the group has summed.

        Args:
            means: not used.
            commit: `scale` is the factor to the true mean, `clip` that of clipping.

        Raises:
            GroupBroken: a member was lost while parameters were exchanged (ZeRO 1); the part holds no step any more.
        """
        part = self._standing
        if commit.skip:
            self.restore()
            if self._scaler:
                self._scaler.update(skipped=True)
            return
        factor = commit.scale * commit.clip / self.loss_scale
        if factor != 1.0:
            part.scale_gradients(factor)
        part.apply()
        part.drop_gradients()
        if self._scaler:
            self._scaler.update(skipped=False)
        if self._schedule:
            self._schedule.on_step()

    def restore(self) -> None:
        """Drop the gradients since the last commit; what a broken step did to buffers ends with the group."""
        if self.part is not None:
            self.part.drop_gradients()

    def tick(self, metric: float | None = None) -> None:
        """Advance a schedule of epochs or validations once."""
        if self._schedule:
            self._schedule.on_tick(metric)

    # ------------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, batch: Any, rows: int | None = None, observer: Observer | None = None) -> EvalSums:
        """Measure a batch together with the whole group, in evaluation mode; 0 rows, or None, mark a stand-in.

        Args:
            batch: this rank's part.
            rows: its samples.
            observer: sees outputs, targets and rows on the ranks that have them.

        Returns:
            The sums; all 0 on ranks whose figures do not count.
        """
        part, rows = self._standing, rows or 0
        with self._only_looking(part):
            treated = _taken(part, self._preprocessing.for_evaluation(batch))
            with self._autocast():
                measured = part.eval_batch(treated, max(rows, 1), stand_in=rows == 0, observer=observer)
        if not part.reports or not rows:
            return EvalSums(0.0, 0.0, 0, 0)
        count = float(rows) if measured.count is None else float(measured.count)
        correct = None if measured.correct is None else int(measured.correct)
        return EvalSums(float(measured.loss_sum), count, correct, rows)

    def predict(self, batch: Any, rows: int, forward: Forward) -> list[Predicted]:
        """Return outputs and rows of each micro-batch; nothing on ranks whose outputs do not count.

        Args:
            batch: this rank's part; stages get (inputs, nothing).
            rows: its samples, 0 for a stand-in.
            forward: calls a whole model with the batch.
        """
        part = self._standing
        with self._only_looking(part):
            treated = self._preprocessing.for_evaluation(batch)
            if not (
                part.takes_inputs and part.takes_targets
            ):  # a stage: the first one has the inputs, nobody else anything
                treated = (inputs_of(treated) if part.takes_inputs else None, None)
            with self._autocast():
                found = part.predict_batch(treated, max(rows, 1), forward, stand_in=rows == 0)
        return found if part.reports else []

    @contextlib.contextmanager
    def _only_looking(self, part: Part) -> Iterator[None]:
        modes = [(module, module.training) for module in part.model.modules()]
        part.model.eval()
        try:
            with torch.no_grad(), seeded(self._spec.seed, self.device, restore_all=False):
                yield
        finally:
            for module, training in modes:
                module.training = training

    # ------------------------------------------------------------------------------------------------------------ state

    def state(self, model: bool = True, optimizer: bool = True) -> dict[str, Any]:
        """Return what this rank adds to the whole state; `ShardedReplicaSet` puts the parts together."""
        part = self._standing
        state: dict[str, Any] = {}
        if model:
            state["model"] = part.model_pieces()
        if optimizer:
            state["optimizer"] = part.optimizer_pieces()
            schedule = self._schedule.scheduler.state_dict() if self._schedule else None
            state["scheduler"] = plain(schedule, "scheduler")
            state["scaler"] = self._scaler.state() if self._scaler else None
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become this rank's part of a whole state, as `Replica.state` gives it."""
        self.restore()
        self._standing.load(state["model"], copied(state.get("optimizer")))
        if state.get("scheduler") is not None and self._schedule:
            scheduler = self._schedule.scheduler
            scheduler.load_state_dict(like(scheduler.state_dict(), copied(state["scheduler"])))
        if state.get("scaler") and self._scaler:
            self._scaler.load(state["scaler"])

    def parameter_hash(self) -> str:
        """Return SHA-256 over names and raw bytes of this rank's parameters, in order."""
        return parameter_hash((name, _local(value)) for name, value in self._standing.named.items())

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)


def _parts(work: ShardWork) -> list[tuple[Any, int]]:
    assert work.part_rows is not None
    return list(zip(work.parts, work.part_rows, strict=True))


def _taken(part: Part, batch: Any) -> Any:
    """What this rank takes of a batch: a stage gets the other half only where a function wanted to see the whole.

    Raises:
        ConfigError: a stage's batch is not of the form (inputs, targets).
    """
    if part.takes_inputs and part.takes_targets:
        return batch
    inputs, targets = pair_of(batch) if batch is not None else (None, None)
    return (inputs if part.takes_inputs else None, targets if part.takes_targets else None)


def _local(value: Tensor) -> Tensor:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()
