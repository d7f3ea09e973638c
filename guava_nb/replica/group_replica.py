"""One rank's part of a model that is spread over a process group: the local part of a training step.

The same face as `Replica`, so that the worker's loop drives both alike. Here gradients are summed by the group itself; the
hub only votes. Between two formations of the group nothing is kept but the record: a new group builds its part anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.config.mesh import Mesh
from guava_nb.data.batch_reading import BatchReading
from guava_nb.errors import ConfigError, LocalProtocolError
from guava_nb.nested import axes_at
from guava_nb.parallel.interface import ModelPart
from guava_nb.parallel.loss_interface import Forward, Learning, Measured, Observer, Predicted
from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.parallelize import parallelize
from guava_nb.parallel.replicas.call_order import Habit
from guava_nb.parallel.replicas.gather_batch import gathering, refusing
from guava_nb.parallel.state.full_state import local_part
from guava_nb.protocol.messages import BatchShard, Commit, RunSpec
from guava_nb.replica.base_replica import BaseReplica, Buckets
from guava_nb.replica.buckets import BucketWire, build_layout
from guava_nb.replica.buffers import BufferBook
from guava_nb.replica.gradient_buckets import OnBucket
from guava_nb.replica.model.build import begin_training, build_model, compile_modules, place_model
from guava_nb.replica.model.forward_writes import ForwardWrites
from guava_nb.replica.model.gradient_hooks import GradientHooks, refusing_hooks
from guava_nb.replica.model.parameter_watch import GradientSwitches, ParameterWatch
from guava_nb.replica.objective import build_criterion, scoring
from guava_nb.replica.optimizer import build_optimizer, is_of_the_user
from guava_nb.replica.outputs import inputs_of
from guava_nb.replica.preprocess import pair_of
from guava_nb.replica.rng import seeded, shard_seed
from guava_nb.replica.shard import LaunchedShard, ShardResult, ShardWork, clip_factor, true_scale
from guava_nb.replica.state_dict import copied, extra_states, give_extra_states, parameter_hash, plain, weights_digest
from guava_nb.spec.factories import Resolve

__all__ = ["GroupReplica"]

_STAGED = (
    "a pipeline's last stage sees one micro-batch at a time: use data or ZeRO mode for a loss that couples samples"
)


class GroupReplica(BaseReplica):
    """A rank's part of the model with all it needs to train.

    Attributes:
        layout: only its digest is used, to compare machines.
        part: this rank's part; None while no group stands.
        wants_digest: `spread` takes one of the weights that it builds, before it shares them out: `digest`.
    """

    part: ModelPart | None
    _axes: MeshAxes | None
    _built: nn.Module | None  # as its factory made it, until a group takes it
    _frozen: tuple[str, ...]  # parameters that take no gradient any more, as of the last commit

    def __init__(self, spec: RunSpec, resolve: Resolve, device: torch.device) -> None:
        """Build the whole model once, so that whatever is wrong with the record is found before a group is formed.

        Raises:
            ConfigError: a name, an argument or a setting is wrong.
            PreparationError: the user's own factory raised.
            ImportError: a module that the user's code imports is missing here.
        """
        super().__init__(spec, resolve, device)
        assert spec.parallel is not None
        self._shape, self._habit = spec.parallel, Habit()
        self.wants_digest, self.digest = False, ""
        # Of batches that the orchestrator has not read in the form in which they are cut here.
        self._reading = BatchReading()
        self._criterion = (
            None if spec.criterion is None else scoring(build_criterion(spec, resolve, device), in_training=False)
        )
        model = place_model(build_model(spec, resolve), spec, torch.device("cpu"))
        carried = model.state_dict().keys()
        self._hidden = {name: buffer.shape for name, buffer in model.named_buffers() if name not in carried}
        self.layout = build_layout(model, spec.bucket_bytes)
        self.wire = BucketWire(self.layout)
        with refusing_hooks(model, spec.optimizer.name):
            optimizer = self._make_optimizer(dict(model.named_parameters()))
        self._use_optimizer(optimizer)
        self.part = None
        # The first group spreads this one; not where the user's own optimizer may have changed something of it.
        self._built = None if is_of_the_user(optimizer) else model
        self.close()

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
        model, self._built = self._built, None
        if model is None:
            model = build_model(self._spec, self.resolve)
        begin_training(place_model(model, self._spec, self.device))
        staged = shape.pp > 1 or shape.mode == "pipeline"
        if self._spec.compile and not staged:
            compile_modules([model], self.device)
        self.digest = weights_digest(model) if self.wants_digest else ""
        self._hooks = GradientHooks(model)
        self.part = parallelize(
            model, shape, self._axes, self.device,
            Learning(self._objective, self._make_optimizer, self._criterion, self._spec.buffers, self._spec.wire),
            sync_batchnorm=self._spec.sync_batchnorm, example=self._inputs_of(example),
            habit=self._habit,
        )  # fmt: skip
        if self._spec.compile and staged:
            compile_modules(self.part.model.children(), self.device)
        self._hooks.move_to(self.part.named, clips=self._spec.max_grad_norm is not None)
        self._forward_writes = writes = ForwardWrites(self.part.model, self.part.named)
        if self.is_staged:
            for stage in self.part.model.children():
                stage.register_forward_hook(lambda stage, *_: writes.piece(stage))
        self._switches, self._frozen = GradientSwitches(self.part.named), ()
        self._watch = ParameterWatch(self.part.model, by_name=shape.zero_stage >= 2)
        self._use_optimizer(self.part.optimizer)
        self._buffers = BufferBook(self.part.model, build_layout(self.part.model, self._spec.bucket_bytes).buffers)

    def _inputs_of(self, example: Any) -> Any:
        if self._spec.preprocess is None or example is None:
            return self.preprocessing.for_evaluation(example)
        return pair_of(self.preprocessing.for_evaluation(example))[0]

    def _make_optimizer(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self._spec.optimizer, list(named.items()), self.resolve)

    @property
    def learning_rate(self) -> float | None:
        """As `BaseReplica.learning_rate`; stages have groups of their own."""
        if self.part is None or self.part.first_group is None:
            return None
        return float(self.part.optimizer.param_groups[self.part.first_group]["lr"])

    def close(self) -> None:
        """Forget the part; the group it was spread over is gone."""
        for parameter in () if self.part is None else self.part.model.parameters():
            # autograd holds them, so Python finds no circle through them: model, group and the group's sockets would stay
            if hooks := getattr(parameter, "_post_accumulate_grad_hooks", None):
                hooks.clear()
        self.part = self._axes = None
        self.optimizer = self._schedule = None

    @property
    def _standing(self) -> ModelPart:
        if self.part is None:
            raise LocalProtocolError("a step came before the process group was formed")
        return self.part

    @property
    def _module(self) -> nn.Module:
        return self._standing.model

    @property
    def module(self) -> nn.Module | None:
        """This rank's part of the module; None while no group stands."""
        return None if self.part is None else self.part.model

    @property
    def layout_text(self) -> str:
        """How the model is spread, in words for people."""
        return self._standing.layout

    @property
    def kind(self) -> str:
        """Names the ranks that must hold the same parameters."""
        axes, sharded = self._axes, self._shape.zero_stage > 1
        assert axes is not None
        return f", stage {axes.pp + 1}, part {axes.tp + 1}" + (f", shard {axes.dp + 1}" if sharded else "")

    # ---------------------------------------------------------------------------------------------------------- a step

    def launch_shard(self, work: ShardWork, on_bucket: OnBucket | None = None, gates: bool = False) -> LaunchedShard:
        """Do forward and backward of this rank's share, the group's sums included.

        Args:
            work: its parts; `part_rows` is 0 for a stand-in.
            on_bucket, gates: not used: nothing goes to the hub, and the hub's vote is waited for.

        Raises:
            GroupBroken: a member was lost, or the step was given up.
            ConfigError: batch, loss or outputs have a form that cannot be trained on.
        """
        part, axes = self._standing, self._axes
        assert axes is not None
        started = time.monotonic()
        self._train_mode()
        self._buffers.begin_shard()
        factor = self.loss_scale / work.global_rows
        seat = axes.dp * axes.sizes.stages + axes.pp  # ranks that share layers draw the same numbers
        counts: list[Any] = []
        self._hooks.check_accumulation(len(work.parts))
        parts = self._treated(work, axes.dp, counts)
        staged = gathering(refusing(_STAGED)) if self._shape.pp > 1 or self._shape.mode == "pipeline" else nullcontext()
        self._forward_writes.begin()
        seed = shard_seed(self._spec.seed, work.step, seat)
        with seeded(seed, self.device, restore_all=False), staged, self._forward_writes.watched():
            sums = []
            for number, (batch, rows) in enumerate(parts, start=1):
                self._read(batch, rows, work.axes[number - 1] if work.axes else b"")
                taken = _taken(part, batch)
                sums.append(self._train_part(part, taken, rows, factor, last=number == len(parts)))
        self._watch.check()
        frozen = self._switches.frozen() if any(rows for _, rows in parts) else None
        self._buffers.refuse_resized(shared=True)
        self._buffers.put_in_place()
        unlike = tuple(sorted(part.finish_gradients(work.buffers)))
        changed = self._forward_writes.end()
        return LaunchedShard(
            lambda: replace(
                self._result(part, work, sums, counts, started), unlike=unlike, changed=changed, frozen=frozen
            )
        )

    def _train_part(self, part: ModelPart, batch: Any, rows: int, factor: float, last: bool) -> Measured:
        with self._autocast():
            if rows == 0 and self._shape.tp == 1 and (self._forward_writes or self._forward_writes.is_new):
                part.stand_in(batch)  # else what others' forwards change of the parameters would stay behind here
            return part.train_batch(batch, max(rows, 1), factor, stand_in=rows == 0, last=last)

    def _treated(self, work: ShardWork, replica: int, counts: list[Any]) -> list[tuple[Any, int]]:
        """The parts, placed and treated: all ranks of one replica draw the same numbers for it, on whatever stage.

        The one whose loss counts counts tokens too, into `counts`.
        """
        part, found = self._standing, []
        with seeded(shard_seed(self._spec.seed, work.step, -1 - replica), self.device, restore_all=False):
            for batch, rows in _parts(work):
                treated = self.preprocessing.train(batch)
                if part.reports and rows:
                    counts.append(self.preprocessing.tokens(treated))
                found.append((treated, rows))
        return found

    def _read(self, batch: Any, rows: int, marks: bytes) -> None:
        part, shape = self._standing, self._shape
        part.cut_along = None
        if shape.pp == 1 or shape.micro_batches == 1 or rows < 2 or not (part.takes_inputs or part.takes_targets):
            return
        if marks:
            found = axes_at(tuple(batch) if isinstance(batch, tuple) else batch, marks)  # stages take them by place
            part.cut_along = lambda path, value: found.get(path)
            return
        self._reading.read(batch if isinstance(batch, list | tuple) else (batch, None), rows)
        if self._reading.problem:
            raise ConfigError(
                "what preprocess= or split_fn= gave cannot be cut into the micro-batches of a pipeline "
                f"(micro_batches=1 cuts none): {self._reading.problem}"
            )
        part.cut_along = self._reading.axes(rows)

    def _result(
        self, part: ModelPart, work: ShardWork, sums: list[Measured], counts: list[Any], started: float
    ) -> ShardResult:
        # First: this waits for all that the device was given, and then the loss is there too.
        square = part.gradient_square() / self.loss_scale**2
        loss_sum, count, finite = self._sums(work, sums) if part.reports else (0.0, 0.0, True)
        finite = finite and math.isfinite(square)
        nonfinite = self._full_name(self._buffers.first_not_finite()) if finite else part.nonfinite()
        return ShardResult(
            loss_sum, count, work.rows, finite and not nonfinite, time.monotonic() - started, 0.0,
            nonfinite, square, self.preprocessing.total(counts),
        )  # fmt: skip

    def own_commit(self, result: ShardResult, shard: BatchShard) -> Commit | None:
        """Vote with the other ranks on a step, all of whose gradients are summed; all get the same answer.

        Nothing is decided here where a rank has what only the orchestrator can judge: a value that is not finite, parameters
        that a forward changed, or other ones without gradients than in the step before.

        Raises:
            GroupBroken, RuntimeError: a member was lost, or the step was given up.
        """
        assert self._axes is not None
        group = self._axes.group("dp")
        is_as_before = result.frozen is None or tuple(sorted(result.frozen)) == self._frozen
        agrees = result.finite and result.changed is None and is_as_before
        square = 0.0 if result.gradient_square is None else result.gradient_square
        mine = torch.tensor([result.count, square, agrees], dtype=torch.float64, device=self.device)
        votes = mine.new_empty(self._axes.sizes.data * len(mine))
        dist.all_gather_into_tensor(votes, mine, group=group)
        told = votes.view(-1, len(mine)).tolist()
        if not all(agreed for _, _, agreed in told):
            return None
        # Added up in the order of the ranks, as the orchestrator does.
        scale = true_scale(shard.global_rows, sum(count for count, _, _ in told))
        clip = clip_factor(self._spec.max_grad_norm, sum(part for _, part, _ in told), scale)
        return Commit(scale, skip=False, clip=clip, steps=shard.num_steps, frozen=self._frozen)

    def apply(self, sums: Buckets | None, commit: Commit, step: int = 0) -> None:
        """As `BaseReplica.apply`; what takes no gradient any more is known for the next vote."""
        self._frozen = self._frozen if commit.frozen is None else commit.frozen
        super().apply(sums, commit, step)

    def _full_name(self, buffer: str) -> str:
        """Return the name in the whole model of a buffer of this part, where stages are numbered and layers may be wrapped."""
        known = () if self.layout.buffers is None else self.layout.buffers.names
        name = buffer.replace("_checkpoint_wrapped_module.", "")
        return max((full for full in known if f".{name}".endswith(f".{full}")), key=len, default=name)

    def _step(self, sums: Buckets | None, factor: float | Tensor) -> None:
        part = self._standing
        if factor != 1.0:
            part.scale_gradients(float(factor))
        self._hooks.run()
        part.apply()
        part.drop_gradients()
        self._forward_writes.forget()
        self._buffers.commit()

    def restore(self) -> None:
        """Drop the gradients since the last commit, and take back what the step did to buffers."""
        if self.part is not None:
            self.part.drop_gradients()
            self._buffers.restore()
            self._forward_writes.forget()
            self._switches.forget()

    # --------------------------------------------------------------------------------------------- evaluation and state

    def _evaluate(self, batch: Any, rows: int | None, observer: Observer | None) -> Measured | None:
        part, rows = self._standing, rows or 0
        measured = part.eval_batch(_taken(part, batch), max(rows, 1), stand_in=rows == 0, observer=observer)
        return measured if part.reports and rows else None

    def _predict(self, batch: Any, rows: int, forward: Forward) -> list[Predicted]:
        part = self._standing
        if not (part.takes_inputs and part.takes_targets):  # of the stages only the first one takes anything
            batch = (inputs_of(batch) if part.takes_inputs else None, None)
        found = part.predict_batch(batch, max(rows, 1), forward, stand_in=rows == 0)
        return found if part.reports else []

    def _model_state(self) -> dict[str, Any]:
        with self._buffers.as_committed():  # a later step may be in work, or one that was aborted not taken back yet
            return {
                "model": self._standing.model_pieces(),
                "extra": extra_states(self._module),
                "buffers": plain(self._hidden_buffers(), "buffers"),
            }

    def _hidden_buffers(self) -> dict[str, Tensor]:
        """Return those that training moved and no state dict carries, of their shapes, by names in the whole model."""
        moved = ((self._full_name(name), value) for name, value in self._buffers.hidden().items())
        return {name: value for name, value in moved if self._hidden.get(name) == value.shape}

    def _optimizer_state(self) -> Any:
        return self._standing.optimizer_pieces()

    def _load(self, state: Mapping[str, Any]) -> None:
        if "model" in state:
            hidden = state.get("buffers") or {}
            local = ((name, self._full_name(name)) for name, _ in self._module.named_buffers())
            # Before all else is loaded: what the replicas hold then counts as equal.
            self._buffers.load_hidden({name: hidden[full] for name, full in local if full in hidden})
            self._standing.load(state["model"], copied(state.get("optimizer")))
            give_extra_states(self._module, state["model"])
        self._buffers.save_all()

    def parameter_hash(self) -> str:
        """Return SHA-256 over names and raw bytes of this rank's parameters, in order."""
        return parameter_hash((name, local_part(value)) for name, value in self._standing.named.items())


def _parts(work: ShardWork) -> list[tuple[Any, int]]:
    assert work.part_rows is not None
    return list(zip(work.parts, work.part_rows, strict=True))


def _taken(part: ModelPart, batch: Any) -> Any:
    """What this rank takes of a batch: a stage gets the other half only where a function wanted to see the whole.

    Raises:
        ConfigError: a stage's batch is not of the form (inputs, targets).
    """
    if part.takes_inputs and part.takes_targets:
        return batch
    inputs, targets = pair_of(batch) if batch is not None else (None, None)
    return (inputs if part.takes_inputs else None, targets if part.takes_targets else None)
