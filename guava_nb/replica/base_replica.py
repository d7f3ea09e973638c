"""What a whole replica and a rank's part of a spread one have in common.

Optimizer, schedule and loss scale; a step's result and its commit; evaluation and prediction; the state. What a shard's
forward and backward are, and where gradients come from, the two kinds of replica know.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import CheckpointError, ConfigError, LocalProtocolError
from guava_nb.parallel.loss_interface import Forward, Measured, Observer, Predicted
from guava_nb.parallel.module_state import back_to
from guava_nb.protocol.messages import BatchShard, Commit, RunSpec
from guava_nb.replica.buckets import BucketLayout, BucketWire
from guava_nb.replica.buffers import BufferBook
from guava_nb.replica.gradient_buckets import OnBucket
from guava_nb.replica.model.build import autocast_dtype, check_spec
from guava_nb.replica.model.parameter_watch import GradientSwitches
from guava_nb.replica.objective import build_objective
from guava_nb.replica.optimizer import ApplyFailed, LossScale, Schedule, StepUndo, build_scheduler, is_of_the_user
from guava_nb.replica.preprocess import Preprocessing
from guava_nb.replica.rng import seeded, shard_seed
from guava_nb.replica.shard import EvalSums, LaunchedShard, ShardResult, ShardWork, true_scale
from guava_nb.replica.state_dict import copied, like, plain
from guava_nb.spec.factories import Resolve

__all__ = ["BaseReplica", "Buckets", "explained", "load_scheduler", "pick"]

#: What came for a bucket: its presence bits and its flat tensor, `[numel]` in the wire dtype.
Buckets = Mapping[int, tuple[bytes, Tensor]]


#: Stands for a shard in the seed of what the optimizer draws: no shard has this number.
_OF_THE_OPTIMIZER = -(1 << 31)


class BaseReplica(ABC):
    """A model, or a rank's part of one, with all it needs to train.

    Attributes:
        layout: buckets of the whole model.
        optimizer: torch's optimizer of the parameters; None while there are none.
        device: where the model lives.
        resolve: finds what the run's record names.
        torch_loss: torch's class of the run's loss; None for a loss or step of the user's own.
    """

    layout: BucketLayout
    wire: BucketWire
    optimizer: Optimizer | None
    _buffers: BufferBook
    _switches: GradientSwitches

    def __init__(self, spec: RunSpec, resolve: Resolve, device: torch.device) -> None:
        """Find what the run's record names; the subclass builds the model.

        Raises:
            ConfigError: a name, an argument or a setting is wrong.
            PreparationError: the user's own factory raised.
            ImportError: a module that the user's code imports is missing here.
        """
        check_spec(spec)
        self.device = device
        self._spec, self.resolve = spec, resolve
        self._objective = build_objective(spec, resolve, device)
        self.torch_loss: type[nn.Module] | None = getattr(self._objective, "torch_loss", None)
        self.preprocessing = Preprocessing(spec, resolve, device)
        self._autocast_dtype = autocast_dtype(spec.precision, device)
        self._schedule: Schedule | None = None
        self._scaler: LossScale | None = None
        self._undo: StepUndo | None = None

    def _use_optimizer(self, optimizer: Optimizer | None) -> None:
        """Step with this optimizer from now on; schedule and loss scale begin anew."""
        spec, self.optimizer = self._spec, optimizer
        self._schedule = None
        if optimizer is not None:
            self._schedule = build_scheduler(spec.scheduler, optimizer, self.resolve, spec.scheduler_interval)
        self._scaler = LossScale() if spec.precision == "fp16" else None
        self._undo = None if optimizer is None else StepUndo(optimizer, (self.scheduler, self._scaler))

    @property
    @abstractmethod
    def _module(self) -> nn.Module:
        """The local module."""

    @property
    def optimizer_site(self) -> str:
        """Who holds the run's optimizer: "workers" or "orchestrator"."""
        return self._spec.optimizer_site

    @property
    def module(self) -> nn.Module | None:
        """The local module; None while there is none."""
        return self._module

    @property
    def is_staged(self) -> bool:
        """Whether a step runs the forward several times, for micro-batches."""
        shape = self._spec.parallel
        return shape is not None and shape.pp > 1 and shape.micro_batches > 1

    @property
    def user_code(self) -> dict[str, object]:
        """The user's own loss or step, and functions of batches, by what messages call them."""
        return {"criterion": getattr(self._objective, "user", None), **self.preprocessing.functions}

    @property
    def weights_bytes(self) -> int:
        """Bytes of the parameters held here."""
        return sum(parameter.nbytes for parameter in self._module.parameters())

    @property
    def model_bytes(self) -> int:
        """Bytes of the parameters and buffers held here."""
        return self.weights_bytes + sum(buffer.nbytes for buffer in self._module.buffers())

    @property
    def kind(self) -> str:
        """Names the replicas that must hold the same parameters; "" for all."""
        return ""

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler, None when there is none."""
        return self._schedule.scheduler if self._schedule else None

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward; 1 without fp16."""
        return self._scaler.scale if self._scaler else 1.0

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the whole optimizer's first parameter group; None on a rank that has nothing of it."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else None

    # ---------------------------------------------------------------------------------------------------------- a step

    @abstractmethod
    def launch_shard(self, work: ShardWork, on_bucket: OnBucket | None = None, gates: bool = False) -> LaunchedShard:
        """Do forward and backward of one shard, without waiting for a GPU to have done them; see `Replica`."""

    def run_shard(self, work: ShardWork, on_bucket: OnBucket | None = None) -> ShardResult:
        """Do forward and backward of one shard, wait for the device, and return what it came to; see `launch_shard`."""
        return self.launch_shard(work, on_bucket).read()

    def notes_on_error(self, is_shared: bool) -> list[str]:
        """Say what may have led to an error of the user's own code in a step; `is_shared`: other workers have samples of it."""
        counted = self._buffers.counted(self._spec.buffers) if is_shared else {}
        if not counted:
            return []
        held = ", ".join(f"{name} (now {value.tolist()})" for name, value in list(counted.items())[:3])
        return [
            f"The model changes the whole numbers {held}. What workers change there is added up where it counts samples, and a "
            "position that goes round, as in ptr = (ptr + n) % size, may pass its end so. If that is the cause: let each worker "
            f"enqueue the whole batch (gather_batch) and take one worker's change, buffers='{next(iter(counted))}=first' "
            "(--buffers), or let one worker do every batch, shares=[1, 0] (--shares 1,0)"
        ]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    def _train_mode(self) -> None:
        # Only where the whole model was put into evaluation mode: a layer that the factory froze stays frozen.
        if not self._module.training:
            self._module.train()

    def _sums(self, work: ShardWork, measured: Sequence[Measured]) -> tuple[float, float, bool]:
        """Return loss sum and count of a shard, and whether both are finite. On a GPU this waits for the device.

        Raises:
            ConfigError: the count is negative.
        """
        loss_sum = sum(float(one.loss_sum) for one in measured)
        count = sum(one.rows / work.global_rows if one.count is None else float(one.count) for one in measured)
        if count < 0:
            raise ConfigError(f"the loss gave a count of {count:g}; the denominator of a mean is at least 0")
        return loss_sum, count, math.isfinite(loss_sum) and math.isfinite(count)

    def own_commit(self, result: ShardResult, shard: BatchShard) -> Commit | None:
        """Decide here whether a step counts that is not committed at the orchestrator: a lone worker's, of the only shard.

        Args:
            result: of the shard.
            shard: which was asked for.

        Returns:
            How it is applied; None: the orchestrator decides.
        """
        if not result.finite and self._scaler is None:
            return None
        return Commit(true_scale(shard.global_rows, result.count), skip=not result.finite, steps=shard.num_steps)

    def apply(self, sums: Buckets | None, commit: Commit, step: int = 0) -> None:
        """Apply the step.

        Args:
            sums: the sum over all shards of every bucket in `layout.numbers`, flat, `[numel]`, in the wire dtype. The
                memory is given to the replica: it is scaled in place, and on the CPU gradients are views of it until the
                step is over. None: the gradients are in the parameters already, of a lone worker or summed by a group.
            commit: `scale` is the factor to the true mean, `clip` that of clipping where a group knows the norm. With
                `skip` nothing changes but the loss scale.
            step: its number, by which an optimizer that draws random numbers draws the same on every worker.

        Raises:
            LocalProtocolError: a bucket is missing or has another size.
            GroupBroken: a member was lost while parameters were exchanged (ZeRO 1); the part holds no step any more.
            ApplyFailed: the user's optimizer or schedule raised, and what is held is a whole state. Any other error of theirs
                leaves it torn.
        """
        self._switches.end_step(commit.frozen)
        if commit.skip:
            self.restore()
        else:
            self._step_or_undo(sums, commit.scale * commit.clip / self.loss_scale, step)
        if self._scaler:
            self._scaler.update(skipped=commit.skip)
        if not commit.skip:
            self._advance_schedule()

    def _advance_schedule(self) -> None:
        if self._schedule:
            try:
                self._schedule.on_step()
            except (Exception, SystemExit) as error:
                raise ApplyFailed(applied=True) from error

    def _step_or_undo(self, sums: Buckets | None, factor: float | Tensor, step: int = 0) -> None:
        """Take the optimizer's step, or leave all as it was.

        Args:
            sums: of all buckets; None: the gradients that are here.
            factor: of the gradients.
            step: its number, from 0; an optimizer that draws random numbers draws those of the step.

        Raises:
            ApplyFailed: the user's optimizer raised, and all is as before.
        """
        self._buffers.begin_step()
        if self._undo is not None:
            self._undo.begin(self._buffers.committed().values())
        draws = self.optimizer is not None and is_of_the_user(self.optimizer)  # torch's own draw nothing
        seed = shard_seed(self._spec.seed, step, _OF_THE_OPTIMIZER)
        try:
            with seeded(seed, self.device, restore_all=False) if draws else contextlib.nullcontext():
                self._step(sums, factor)
        except (Exception, SystemExit) as error:
            if isinstance(error, LocalProtocolError) or self._undo is None or not self._undo.undo():
                raise
            self._buffers.take_back()
            self.restore()
            raise ApplyFailed(applied=False) from error

    def undo_step(self) -> bool:
        """Go back to before the step that was applied last; returns whether that can be done."""
        if self._undo is None or not self._undo.undo():
            return False
        self._buffers.write_committed()
        self.restore()
        return True

    @abstractmethod
    def _step(self, sums: Buckets | None, factor: float | Tensor) -> None:
        """Multiply the gradients with `factor`, a number or a scalar `[]`, step the optimizer, and drop the gradients."""

    @abstractmethod
    def restore(self) -> None:
        """Forget every shard since the last commit. Random state needs nothing: see `guava_nb.replica.rng`."""

    def tick(self, metric: float | None = None) -> None:
        """Advance a schedule of epochs or validations once; one of steps advances in `apply` and ignores this."""
        if self._schedule:
            self._schedule.on_tick(metric)

    # ------------------------------------------------------------------------------------------------------- evaluation

    def evaluate(
        self, batch: Any, rows: int | None = None, observer: Observer | None = None, axes: Sequence[bytes] = ()
    ) -> EvalSums:
        """Measure a batch at the committed state, in evaluation mode. Not between a lone worker's shard and its commit.

        Args:
            batch: as in training; in a group this rank's part.
            rows: its samples; None counts them. In a group all ranks measure together, and 0 or None mark a stand-in.
            observer: sees outputs, targets and rows, on the ranks that have them.
            axes: as in `ShardWork`, of the one part.

        Returns:
            The sums; in a group all 0 on ranks whose figures do not count.
        """
        with self._evaluation_mode():
            treated = self.preprocessing.for_evaluation(batch)
            self._read(treated, rows or 0, axes[0] if axes else b"")
            with self._autocast():
                one = self._evaluate(treated, rows, observer)
        if one is None:
            return EvalSums(0.0, 0.0, 0, correct=0, nll=0.0)
        count = float(one.rows) if one.count is None else float(one.count)
        if one.scores is None:
            return EvalSums(float(one.loss_sum), count, one.rows)
        right, scored, nll = one.scores.tolist()
        return EvalSums(float(one.loss_sum), count, one.rows, int(right), int(scored), None if math.isnan(nll) else nll)

    def _read(self, batch: Any, rows: int, marks: bytes) -> None:  # noqa: B027 - whole replicas cut nothing
        """Know how a preprocessed batch is cut into micro-batches, where it is; `marks`: how it was read before.

        Raises:
            ConfigError: it was not read before, and cannot be cut.
        """

    @abstractmethod
    def _evaluate(self, batch: Any, rows: int | None, observer: Observer | None) -> Measured | None:
        """Do a forward of a preprocessed batch; None on a rank whose figures do not count."""

    def predict(self, batch: Any, rows: int, forward: Forward, axes: Sequence[bytes] = ()) -> list[Predicted]:
        """Return outputs and rows of a batch, at the committed state and in evaluation mode.

        Args:
            batch: in the form that `forward` takes; in a group this rank's part, stages get (inputs, nothing).
            rows: its samples; in a group 0 marks a stand-in.
            forward: calls a whole model with the batch.
            axes: as for `evaluate`.

        Returns:
            One pair; in a group one for each micro-batch, and none on ranks whose outputs do not count.
        """
        with self._evaluation_mode():
            treated = self.preprocessing.for_evaluation(batch)
            self._read(treated, rows, axes[0] if axes else b"")
            with self._autocast():
                return self._predict(treated, rows, forward)

    @abstractmethod
    def _predict(self, batch: Any, rows: int, forward: Forward) -> list[Predicted]:
        """Do a forward of a preprocessed batch."""

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        modes = {module: module.training for module in self._module.modules()}
        self._module.eval()
        try:
            with torch.no_grad(), seeded(self._spec.seed, self.device, restore_all=False):
                yield
        finally:
            back_to(modes)

    # ------------------------------------------------------------------------------------------------------------ state

    def state(self, model: bool = True, optimizer: bool = True) -> dict[str, Any]:
        """Return the state as of the last commit: plain data and CPU copies; of a spread model this rank's share.

        Args:
            model: include "model", and of a whole replica "buffers" (moving ones that the state dict leaves out).
            optimizer: include "optimizer", "scheduler" and "scaler"; the latter two are None where there is none.

        Raises:
            CheckpointError: an optimizer or scheduler keeps something that is not plain data.
        """
        state = self._model_state() if model else {}
        if optimizer:
            scheduler = self.scheduler.state_dict() if self.scheduler else None
            state["optimizer"] = self._optimizer_state()
            state["scheduler"] = plain(scheduler, "scheduler")
            state["scaler"] = self._scaler.state() if self._scaler else None
        return state

    def schedule_state(self) -> dict[str, Any]:
        """Return the settings of the optimizer's groups of parameters and the scheduler's state, as plain data.

        Raises:
            CheckpointError: one of them is no plain data.
        """
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        found = {
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
        }
        made: dict[str, Any] = plain(found, "schedule")
        return made

    @abstractmethod
    def _model_state(self) -> dict[str, Any]:
        """Return what `state` holds of the model."""

    @abstractmethod
    def _optimizer_state(self) -> Any:
        """Return what `state` holds of the optimizer."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become a whole state, as `Replica.state` returned it; what it leaves out stays as it is. Nothing of it is kept.

        Raises:
            CheckpointError: it belongs to another model, optimizer or scheduler.
        """
        self.restore()
        self.wire.reset()
        self._load(state)
        if state.get("scheduler") is not None and self.scheduler:
            load_scheduler(self.scheduler, state["scheduler"])
        if state.get("scaler") and self._scaler:
            self._scaler.load(state["scaler"])

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over model and optimizer of a whole state."""

    @abstractmethod
    def parameter_hash(self) -> str:
        """Return SHA-256 over names and raw bytes of the parameters held here, in order."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what training needed."""


def load_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Give a scheduler the state, as plain data, of another one.

    Raises:
        CheckpointError: it belongs to another scheduler.
    """
    with explained("scheduler"):
        scheduler.load_state_dict(like(scheduler.state_dict(), copied(state)))


@contextlib.contextmanager
def explained(part: str) -> Iterator[None]:
    """Raise what loading raises as CheckpointError that names the part of the state."""
    try:
        yield
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"the {part} state does not fit this run's {part}: {error}") from error


def pick(sums: Buckets, number: int) -> tuple[bytes, Tensor]:
    """Return what came for a bucket: presence bits and flat tensor, `[numel]`.

    Raises:
        LocalProtocolError: nothing did.
    """
    if number not in sums:
        raise LocalProtocolError(f"bucket {number} is missing; {sorted(sums)} came")
    return sums[number]
