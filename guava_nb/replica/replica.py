"""One replica of the model: the local part of a training step.

Knows model, loss, gradients, optimizer; knows nothing of sessions, threads or other replicas. Its caller calls,
per optimizer step: `launch_shard` for each shard it was given, then `apply` with the sums over all shards, or `restore`.

A shard's gradient is that of `loss_sum / global_rows`; the hub adds shards in their order; `Commit.scale` is global_rows / total
count. So it is the gradient of the mean over the global batch, however it was cut; no worker needs a denominator before backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import CheckpointError, ConfigError, TrainingError
from guava_nb.parallel.loss_interface import Forward, Measured, Observer, Predicted
from guava_nb.parallel.replicas.batch_norm import explaining_few_rows
from guava_nb.parallel.replicas.gather_batch import Gather, gathering, refusing
from guava_nb.parallel.unloaded import take_step
from guava_nb.protocol.messages import ParameterChange, RunSpec
from guava_nb.replica.base_replica import BaseReplica, Buckets, explained, pick
from guava_nb.replica.buckets import BUFFERS, BucketWire, build_layout, message_format, pack_present, present_at
from guava_nb.replica.buffers import BufferBook
from guava_nb.replica.device_figures import DeviceFigures, StepTimer, norms, square_sum
from guava_nb.replica.gradient_buckets import GradientBuckets, OnBucket
from guava_nb.replica.model.build import begin_training, build_model, compile_modules, place_model
from guava_nb.replica.model.forward_writes import ForwardWrites
from guava_nb.replica.model.gradient_hooks import GradientHooks
from guava_nb.replica.model.parameter_watch import GradientSwitches, ParameterWatch, forward_changes
from guava_nb.replica.model.wrappers import unwrapped
from guava_nb.replica.objective import NO_GRADIENT, Loss, backward, counts_none
from guava_nb.replica.optimizer import build_optimizer, is_gated
from guava_nb.replica.rng import seeded, shard_seed
from guava_nb.replica.shard import LaunchedShard, ShardResult, ShardWork, rows_of_batch, rows_of_parts
from guava_nb.replica.state_dict import copied, load_model, parameter_hash, plain, refuse_extra_state
from guava_nb.spec.factories import Resolve

__all__ = ["Replica"]

_NO_GROUP = (
    "the workers of this run meet at the orchestrator only, since no shared cell names it, nor any code that model, loss "
    "and step reach. Import it in a shared cell (from guava_nb import gather_batch): then the run forms a process group"
)
_CUT = (
    "the batch does not fit the memory here, and was cut into pieces that cannot see each other: give smaller batches, or more "
    "workers"
)


class Replica(BaseReplica):
    """A whole model with all it needs to train.

    Attributes:
        model: the module; a given one is trained in place.
        optimizer: over all parameters of the model.
    """

    optimizer: Optimizer
    _keeps_graphs = False

    def __init__(self, spec: RunSpec, resolve: Resolve, device: torch.device, model: nn.Module | None = None) -> None:
        """Build everything a run's record describes.

        Args:
            spec: the record.
            resolve: finds shared and importable objects by name.
            device: where to compute.
            model: the user's own object; it is moved to `device` and trained in place, unwrapped where torch.compile or
                DataParallel wraps it or a part of it. None builds `spec.model` on the CPU, its random numbers drawn from
                `spec.seed` as after `torch.manual_seed`.

        Raises:
            ConfigError: a name, an argument or a setting is wrong.
            PreparationError, ImportError: the user's own factory raised, or a module that it imports is missing here.
        """
        super().__init__(spec, resolve, device)
        built = build_model(spec, resolve) if model is None else unwrapped(model)
        self.model = begin_training(place_model(built, spec, device))
        if spec.compile and model is None:
            compile_modules([self.model], device)
        self.layout = build_layout(self.model, spec.bucket_bytes, message_format(spec)[0])
        self.wire = BucketWire(self.layout, *message_format(spec))
        self._use_optimizer(build_optimizer(spec.optimizer, self.model.named_parameters(), resolve))
        self.hooks = GradientHooks(self.model)  # those that the optimizer has put there, too
        self._named = dict(self.model.named_parameters())
        self._parameters = [[self._named[name] for name in bucket.names] for bucket in self.layout.buckets]
        self._gradient_buckets = GradientBuckets(self.layout, self._named, device)
        self._buffers = BufferBook(self.model, self.layout.buffers)
        self._watch, self._switches = ParameterWatch(self.model), GradientSwitches(self._named)
        self._forward_writes = ForwardWrites(self.model, always=spec.optimizer_site == "orchestrator")
        self._last_part: tuple[Any, int] | None = None  # a batch for `stand_in`
        self._drop_gradients()
        self._check_state()

    @property
    def _module(self) -> nn.Module:
        return self.model

    # -------------------------------------------------------------------------------------------------------- a shard

    def launch_shard(self, work: ShardWork, on_bucket: OnBucket | None = None, gates: bool = False) -> LaunchedShard:
        """Do forward and backward of one shard, without waiting for a GPU to have done them.

        Args:
            work: the shard. One without rows hands over empty buckets.
            on_bucket: takes every bucket of `layout.numbers` once, the gradients as soon as backward has filled them. Its
                tensor, `[numel]` in the wire dtype, is lent: it is not touched again before `apply`, `take_parameters` or
                `restore`. None: a lone worker, the gradients stay in the parameters.
            gates: for `apply_ahead`.

        Raises:
            TrainingError: the loss depends on no trainable parameter, a gradient came too late, or the model has not the
                parameters any more with which the run began.
            ConfigError: batch, loss or outputs have a form that cannot be trained on.
        """
        clock, counts = StepTimer(self.device), list[Any]()
        if on_bucket is None:
            self._gradient_buckets.remove_hooks()
        try:
            self._train_mode()
            self._buffers.begin_shard()
            if is_watched := on_bucket is not None or work.is_cut:
                self._forward_writes.begin()
            seed = shard_seed(self._spec.seed, work.step, work.shard)
            with (
                seeded(seed, self.device, restore_all=False),
                gathering(self._gather(work)),
                self._forward_writes.watched(),
            ):
                losses = self._run_parts(work, on_bucket, clock, counts, gates)
            changed = self._changed(work) if losses and is_watched else None
            self._watch.check()
            frozen = self._switches.frozen(is_alone=on_bucket is None) if losses else None
            self._buffers.refuse_resized(shared=on_bucket is not None)
            if on_bucket is not None:
                self._buffers.refuse_unfollowed()
            if on_bucket is not None and self.layout.buffers is not None:
                on_bucket(BUFFERS, *(self._buffers.flatten() if losses else self._buffers.nothing()))
            launched = self._launched(work, losses, clock, counts, on_bucket is None, gates)
            return launched.telling(changed, frozen) if changed or frozen is not None else launched
        except BaseException:
            # What was handed over stays valid: the hub may already have added it. Only local state is dropped.
            self._gradient_buckets.cancel()
            self._drop_gradients()
            raise

    def _changed(self, work: ShardWork) -> ParameterChange | None:
        """Return what the forward changed of the trained parameters; where it may change some, keep a batch for `stand_in`.

        Raises:
            TrainingError: it changes some, and the optimizer's step is not taken here.
        """
        changed = self._forward_writes.end()
        if changed and self._spec.optimizer_site == "orchestrator":
            raise TrainingError(forward_changes(changed.name))
        if self._forward_writes:
            part, rows = next((p, n) for p, n in zip(work.parts, rows_of_parts(work), strict=True) if n)
            self._last_part = part, rows
        return changed

    def stand_in(self, step: int) -> None:
        """Change parameters as the other workers' forwards do, by an earlier batch: this one has no sample of the step.

        Only where a forward was seen to change some; all else is left as it was.
        """
        if not self._forward_writes or self._last_part is None:
            return
        part, rows = self._last_part
        self._train_mode()
        self._buffers.begin_shard()
        with (
            seeded(shard_seed(self._spec.seed, step, -1), self.device, restore_all=False),
            gathering(refusing(_NO_GROUP)),
        ):
            self._objective(self.model, self.preprocessing.train(part), rows)
        self._buffers.restore()
        self._drop_gradients()

    def _gather(self, work: ShardWork) -> Gather | None:
        """Return what `gather_batch` does in a shard: all samples of each batch are here, or they cannot be had."""
        if work.rows == work.global_rows and not work.is_cut:
            return None
        return refusing(_CUT if work.is_cut else _NO_GROUP)

    def _run_parts(
        self, work: ShardWork, on_bucket: OnBucket | None, clock: StepTimer, counts: list[Any], gates: bool
    ) -> list[tuple[Loss, int]]:
        parts = [(part, rows) for part, rows in zip(work.parts, rows_of_parts(work), strict=True) if rows]
        if not work.is_cut:
            self.hooks.check_accumulation(len(parts))
        losses = []
        for number, (part, rows) in enumerate(parts):
            with clock.forward():
                batch = self.preprocessing.train(part)
                counts.append(self.preprocessing.tokens(batch))
                with self._autocast(), explaining_few_rows(self.model):
                    loss = self._objective(self.model, batch, rows)
            if work.is_cut:
                self._forward_writes.piece()
            learns = loss.value.requires_grad
            if not (learns or counts_none(loss)):  # a part of a batch may be without one object
                raise TrainingError(NO_GRADIENT)
            with clock.backward():
                last = number == len(parts) - 1
                if on_bucket is not None and last:
                    self._gradient_buckets.begin(on_bucket)
                factor: Tensor | float = loss.weight * self.loss_scale / work.global_rows
                if gates and len(parts) == 1:  # the true mean at once, which costs no pass over the gradients
                    factor = factor * _true_mean(work, [(loss, rows)])
                if learns:
                    backward(loss.value, factor, self._keeps_graphs)
                if on_bucket is not None and last:
                    self._gradient_buckets.finish()
            losses.append((Loss(loss.value.detach(), loss.weight, loss.count), rows))
        if on_bucket is not None and not parts:
            self._gradient_buckets.begin(on_bucket)
            self._gradient_buckets.finish()
        return losses

    def _launched(
        self,
        work: ShardWork,
        losses: list[tuple[Loss, int]],
        clock: StepTimer,
        counts: list[Any],
        solo: bool,
        gates: bool,
    ) -> LaunchedShard:
        checked, sizes, square = _checked(self._named, self._buffers.moved_numbers()) if solo else ([], None, None)
        values, denominators = [loss.value for loss, _ in losses], _denominators(work, losses)
        factor = _true_mean(work, losses) if gates and len(losses) > 1 else 1.0
        of_all = [] if sizes is None or square is None else [square, sizes]
        figures = DeviceFigures([*values, *denominators, factor, *of_all], gates)

        def read() -> ShardResult:
            told = figures.read()
            loss_values, found = told[: len(values)], told[len(values) : 2 * len(values)]
            measured = [
                Measured(value * loss.weight, count, None, rows)
                for (value,), (count,), (loss, rows) in zip(loss_values, found, losses, strict=True)
            ]
            loss_sum, count, finite = self._sums(work, measured)
            bad = (name for name, size in zip(checked, told[-1], strict=True) if not math.isfinite(size))
            nonfinite = next(bad, "") if finite and checked else ""
            forward_s, backward_s = clock.read()
            # As before its scaling by rows / count, which one that gates has done already.
            scaled = told[2 * len(values)][0] * count / work.rows if gates else 1.0 / self.loss_scale
            return ShardResult(
                loss_sum, count, work.rows, finite and not nonfinite, forward_s, backward_s, nonfinite,
                told[-2][0] * scaled**2 if of_all and finite else None, self.preprocessing.total(counts),
            )  # fmt: skip

        return LaunchedShard(read, factor, figures.bad)

    # -------------------------------------------------------------------------------------------------- commit or abort

    def _step(self, sums: Buckets | None, factor: float | Tensor) -> None:
        if sums is None:
            _scale(self._named.values(), factor)
        else:
            self._take_sums(sums, float(factor))
            # Before the optimizer: its hooks may read what the forward changed, and change it further.
            self._adopt_buffers(sums)
        self.hooks.run()
        if self._spec.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._spec.max_grad_norm)
        take_step(self.optimizer)
        self._finish_step(sums)

    @property
    def can_apply_ahead(self) -> bool:
        """Whether a lone worker's step may be given to the device before it is known to be finite.

        The optimizer must be able to leave a step out by itself, and nothing of the user's may run on it meanwhile.
        """
        return (
            self._scaler is None and self._spec.tokens is None and not self.hooks and is_gated(self.optimizer)
            and self.device.type != "mps"
        )  # fmt: skip

    def apply_ahead(self, launched: LaunchedShard) -> None:
        """Give the device a lone worker's step, to be left out there where a figure is not finite; then call `confirm`.

        Raises:
            ApplyFailed: as `apply`.
        """
        assert launched.bad is not None
        optimizer: Any = self.optimizer
        optimizer.found_inf = launched.bad
        try:
            self._step_or_undo(None, launched.factor)
        finally:
            del optimizer.found_inf

    def confirm(self, launched: LaunchedShard) -> ShardResult:
        """Return the result of the step that was applied ahead; where its figures are not finite, take back what it changed here.

        Call it before the next step is applied. Shards that were run since are forgotten where the step was taken back.

        Raises:
            ApplyFailed: the user's schedule raised.
        """
        result = None
        try:
            result = launched.read()
        finally:
            if result is None or not result.finite:
                self.restore()
                self._buffers.take_back()
        if result.finite:
            self._advance_schedule()
        return result

    def take_parameters(self, buckets: Buckets, frozen: tuple[str, ...] | None = None) -> None:
        """Commit a step that was applied elsewhere (optimizer_site="orchestrator").

        Args:
            buckets: new values of all parameters, as `parameter_buckets` gives them, and with number -1 what became of the
                buffers if the model has any. They are copied and not kept.
            frozen: as in the commit.

        Raises:
            LocalProtocolError: a bucket is missing or has another size.
        """
        self._adopt_buffers(buckets)
        with torch.no_grad():
            for bucket, parameters in zip(self.layout.buckets, self._parameters, strict=True):
                _, flat = pick(buckets, bucket.index)
                for parameter, view in zip(parameters, bucket.views(flat), strict=True):
                    parameter.copy_(view)
        self._switches.end_step(frozen)
        self._finish_step(buckets)
        if self._scaler:
            self._scaler.update(skipped=False)

    def parameter_buckets(self) -> Iterator[tuple[int, bytes, Tensor]]:
        """Give the parameters' values bucket by bucket: number, presence bits, a new CPU tensor, `[numel]` in the wire dtype."""
        for bucket, parameters in zip(self.layout.buckets, self._parameters, strict=True):
            flat = torch.cat([p.detach().reshape(-1).to(bucket.dtype) for p in parameters]).cpu()
            yield bucket.index, pack_present([True] * len(parameters)), flat

    def buffer_changes(self) -> tuple[bytes, Tensor] | None:
        """Return what the last step changed of the buffers, `[numel]`, if hooks of the optimizer, which runs here only, did."""
        return self._buffers.last_changes() if self._buffers.has_followed else None

    def restore(self) -> None:
        """Forget every shard since the last commit. Random state needs nothing: see `guava_nb.replica.rng`."""
        self._gradient_buckets.cancel()
        self._gradient_buckets.recycle()
        self._drop_gradients()
        self._buffers.restore()
        self._forward_writes.forget()
        self._switches.forget()
        self.wire.discard()

    def _finish_step(self, sums: Buckets | None) -> None:
        self._drop_gradients()
        self._gradient_buckets.recycle()
        self._forward_writes.forget()
        if sums is None:  # a worker's own step settles nothing that was sent
            self._buffers.commit()
        else:
            self.wire.commit()
            self._buffers.follow()

    def _adopt_buffers(self, sums: Buckets) -> None:
        if self.layout.buffers is not None:
            self._buffers.adopt(*pick(sums, BUFFERS))

    def _take_sums(self, sums: Buckets, factor: float) -> None:
        for bucket, parameters in zip(self.layout.buckets, self._parameters, strict=True):
            present, flat = pick(sums, bucket.index)
            flat = flat.to(self.device, non_blocking=True)
            if factor != 1.0:
                flat.mul_(factor)
            bits = present_at(present, len(parameters))
            for parameter, view, is_present in zip(parameters, bucket.views(flat), bits, strict=True):
                parameter.grad = view.to(parameter.dtype) if is_present else None

    def _drop_gradients(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    # ------------------------------------------------------------------------------------------------------- evaluation

    def _evaluate(self, batch: Any, rows: int | None, observer: Observer | None) -> Measured:
        rows = rows_of_batch(batch) if rows is None else rows
        loss = self._objective(self.model, batch, rows, want_scores=True, observer=observer)
        return Measured(float(loss.value) * loss.weight, loss.count, loss.scores, rows)

    def _predict(self, batch: Any, rows: int, forward: Forward) -> list[Predicted]:
        return [(forward(self.model, batch), rows)]

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        self._buffers.restore()
        with super()._evaluation_mode():
            yield

    # ------------------------------------------------------------------------------------------------------------ state

    def _model_state(self) -> dict[str, Any]:
        own = self.model.state_dict()
        if self._buffers.touched:
            own.update({name: value for name, value in self._buffers.committed().items() if name in own})
        return {"model": plain(own, "model"), "buffers": plain(self._buffers.hidden(), "buffers")}

    def _optimizer_state(self) -> Any:
        return plain(self.optimizer.state_dict(), "optimizer")

    def _load(self, state: Mapping[str, Any]) -> None:
        if "model" in state:
            load_model(self.model, state["model"])
            self._buffers.load_hidden(state.get("buffers") or {})
            self._buffers.save_all()
        if state.get("optimizer") is not None:
            with explained("optimizer"):
                self.optimizer.load_state_dict(copied(state["optimizer"]))

    def parameter_hash(self) -> str:
        """Return SHA-256 over names and raw bytes of all parameters, in order."""
        return parameter_hash(self._named.items())

    def close(self) -> None:
        """Take the hooks off the model, drop gradients and uncommitted work; the model stays usable."""
        self.restore()
        self._gradient_buckets.remove_hooks()
        self.hooks.put_back()

    def _check_state(self) -> None:
        """Find out now, not at the first checkpoint, that a state cannot be saved."""
        try:
            plain(self.optimizer.state_dict()["param_groups"], "optimizer.param_groups")
            plain(self.scheduler.state_dict() if self.scheduler else None, "scheduler")
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        refuse_extra_state(self.model, self._spec)
        own = self.model.state_dict()
        if hasattr(own, "_metadata"):
            return
        held = {value.data_ptr() for value in own.values() if isinstance(value, Tensor)}
        left_out = [
            name for name, p in self._named.items() if p.requires_grad and p.numel() and p.data_ptr() not in held
        ]
        if left_out:
            raise ConfigError(
                f"state_dict() of {type(self.model).__name__} leaves out {left_out[0]!r}, which is trained: neither other "
                "workers nor checkpoints would have it. Let it leave out only what is frozen (requires_grad_(False))"
            )


# ----------------------------------------------------------------------------------------------------------- functions


def _denominators(work: ShardWork, losses: Sequence[tuple[Loss, int]]) -> list[float | Tensor]:
    return [rows / work.global_rows if loss.count is None else loss.count for loss, rows in losses]


def _true_mean(work: ShardWork, losses: Sequence[tuple[Loss, int]]) -> Tensor | float:
    """Return `Commit.scale` of a lone worker's step, a float64 scalar `[]` on the device where only that knows it.

    0 where nothing counts; NaN, so that the step is left out, where the denominator is negative.
    """
    count = sum(_denominators(work, losses))
    if not isinstance(count, Tensor):
        return work.global_rows / count if count > 0 else 0.0 if count == 0 else math.nan
    count = count.detach().reshape(()).double()
    return torch.where(count == 0, 0.0, work.global_rows / torch.where(count < 0, math.nan, count))


def _scale(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients of parameters with a factor, in place; a factor that is a scalar tensor is not waited for."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and (isinstance(factor, Tensor) or factor != 1.0):
        torch._foreach_mul_(gradients, factor)


def _checked(
    named: Mapping[str, nn.Parameter], moved: Mapping[str, Tensor]
) -> tuple[list[str], Tensor | None, Tensor | None]:
    """Return what must be finite for a lone worker's step.

    Args:
        named: parameters, by name.
        moved: buffers that a forward moved, by name.

    Returns:
        Names, a norm of each, `[names]`, and the squared norm of the gradient, `[]`; None where there is nothing.
    """
    found = {name: p.grad for name, p in named.items() if p.grad is not None}
    gradients = {name: one if one.layout is torch.strided else one.coalesce().values() for name, one in found.items()}
    found = {**gradients, **moved}
    sizes = norms(found.values())
    return list(found), sizes, square_sum(list(gradients.values()), sizes)
