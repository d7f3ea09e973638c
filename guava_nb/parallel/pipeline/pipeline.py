"""One rank's part of a pipeline: its stages, their optimizer, and how a batch goes through them.

Speaks torch.distributed over the ranks that hold the stages of one replica. The first rank gets inputs, the last one
targets; what the ones between need to know about a batch comes with its first message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import CheckpointError
from guava_nb.parallel.interface import ModelPart
from guava_nb.parallel.loss_interface import Criterion, Forward, Loss, MakeOptimizer, Measured, Observer, Predicted
from guava_nb.parallel.module_state import evaluating, to_device
from guava_nb.parallel.pipeline.microbatches import WholeParts, count_micro_batches, cut_rows, micro_batch_sizes
from guava_nb.parallel.pipeline.pipeline_setup import Hooks, PipelinePlace, check_spec, costs_for
from guava_nb.parallel.pipeline.schedule_cache import ScheduleCache
from guava_nb.parallel.pipeline.shared_state import SharedState
from guava_nb.parallel.pipeline.stages import Split, split_model
from guava_nb.parallel.replicas.batch_norm import explaining_few_rows
from guava_nb.parallel.state.full_state import (
    FullOrder,
    StatePiece,
    load_optimizer,
    load_tensor,
    local_part,
    optimizer_pieces,
    pieces_of,
)
from guava_nb.parallel.state.gradient_norm import gradient_square
from guava_nb.parallel.step_errors import explaining_stages
from guava_nb.parallel.tensor.vocab_loss import whole_logits
from guava_nb.protocol.messages import ParallelSpec

__all__ = ["Hooks", "PipelinePart", "PipelinePlace"]

# Parameters that stand in stages on several ranks: an embedding and the head that shares its weight.
#
# Every rank with a copy ends up with the same sum of all gradients, so that the copies stay equal to the last bit: by one
# all_reduce where all ranks of the pipeline hold it, else each holder sends to the first one, which adds and sends the sum back.


class TiedParameters:
    """Sums the gradients of shared parameters.

    Args:
        named: this rank's parameters.
        holders: name of each shared parameter to the ranks of the group that hold it, lowest first.
        group: the pipeline's ranks.
        device: where messages are made.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        holders: Mapping[str, Sequence[int]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._rank = dist.get_rank(group)
        self._shared = [(named[name], ranks) for name, ranks in holders.items() if self._rank in ranks]
        self._group, self._device = group, device

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients up; a parameter that got none anywhere stays without.

        A rank that has a gradient waits for no device: it knows that there is a sum. One without reads whether others have one.
        """
        for parameter, ranks in self._shared:
            holders = torch.full((1,), float(parameter.grad is not None), device=self._device)
            self._sum(holders, ranks)
            if parameter.grad is None:
                if not float(holders):
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            total = gradient.contiguous()
            self._sum(total, ranks)
            if total is not gradient:
                gradient.copy_(total)

    def _sum(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Add up a contiguous tensor, of the same shape on each, in place over the ranks that hold a parameter."""
        if len(ranks) == self._group.size():
            dist.all_reduce(tensor, group=self._group)
            return
        first, *others = (dist.get_global_rank(self._group, rank) for rank in ranks)
        if self._rank != ranks[0]:
            dist.send(tensor, first, group=self._group)
            dist.recv(tensor, first, group=self._group)
            return
        part = torch.empty_like(tensor)
        for other in others:
            dist.recv(part, other, group=self._group)
            tensor.add_(part)
        for other in others:
            dist.send(tensor, other, group=self._group)


# Sums over the micro-batches of a batch.


class MicrobatchSums:
    """Adds up what the micro-batches measured, without waiting for a device."""

    def __init__(self) -> None:
        self._loss: list[Tensor] = []
        self._counts: list[float | Tensor | None] = []
        self._scores: list[Tensor] = []

    def add(self, loss: Loss) -> None:
        """Add what one micro-batch measured."""
        self._loss.append(loss.value.detach() * loss.weight)
        self._counts.append(loss.count.detach() if isinstance(loss.count, Tensor) else loss.count)
        if loss.scores is not None:
            self._scores.append(loss.scores)

    def measured(self, rows: int) -> Measured:
        """Return the sums; on a rank without the last stage they are nothing."""
        if not self._loss:
            return Measured(0.0, 0.0, None, rows)
        counts = [count for count in self._counts if count is not None]
        count = sum(counts[1:], counts[0]) if counts else None
        scores = sum(self._scores[1:], self._scores[0]) if self._scores else None
        return Measured(sum(self._loss[1:], self._loss[0]), count, scores, rows)


_NOTHING = Measured(0.0, 0.0, None, 0)


class PipelinePart(ModelPart):
    """A model in stages.

    Attributes, beside those of every part:
        begins: full name of the module with which each stage of the pipeline begins.
        stage_parameters: how many each stage of the pipeline has.
        buffers: full name to local buffer.

    Args:
        model: the whole model, the same on every rank; its modules live on in the stages.
        spec: stages, schedule, micro-batches, split points.
        place: this rank's.
        criterion: measures outputs against targets, on the last stage.
        make_optimizer: makes the optimizer of this rank's parameters.
        hooks: what tensor, data and activation settings do to a stage.
        example: inputs of a typical micro-batch, where the model is; for balancing by time, on rank 0 of the default
            group, whose measurement all ranks follow.
        wire: name of the format in which activations and their gradients travel in training.

    Raises:
        ConfigError: the model cannot be cut so, or settings do not fit; the text has the sizes.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ParallelSpec,
        place: PipelinePlace,
        *,
        criterion: Criterion,
        make_optimizer: MakeOptimizer,
        hooks: Hooks | None = None,
        example: Any = None,
        wire: str = "fp32",
    ) -> None:
        self._rank, self._ranks = dist.get_rank(place.group), dist.get_world_size(place.group)
        check_spec(spec, self._ranks)
        self._spec, self._place, self._criterion = spec, place, criterion
        self._hooks = hooks or Hooks()
        self._total = self._ranks * spec.stages_per_rank
        optimizer = make_optimizer(dict(model.named_parameters()))
        self._order = FullOrder.of(model, optimizer)
        self._split = split_model(model, self._total, spec.split, costs_for(spec, example))
        self.stage_parameters = tuple(sum(p.numel() for p in stage.parameters()) for stage in self._split.modules)
        held = {rank: self._split.modules[rank :: self._ranks] for rank in range(self._ranks)}
        self._shared = SharedState(held, self._rank)
        self._stages = {
            index: self._prepare(self._split.modules[index]) for index in range(self._rank, self._total, self._ranks)
        }
        self._split = _without_modules(self._split)
        self.begins = self._split.begins
        self.takes_inputs = self._rank == 0
        self.takes_targets = self._rank == self._ranks - 1
        self.reports = self.takes_targets and place.tp == 0
        self.model: nn.Module = nn.ModuleList(self._stages.values())
        self._schedules = ScheduleCache(spec.schedule, self._stages, self._total, place.group, place.device, wire)
        self._collect_names()
        self.optimizer = self._make_optimizer(make_optimizer, optimizer)

    # ----------------------------------------------------------------------------------------------------- building

    def _prepare(self, stage: nn.Module) -> nn.Module:
        stage = stage.to(self._place.device)
        names = {name: self._split.canonical[name] for name, _ in stage.named_parameters(remove_duplicate=False)}
        names.update({name: name for name, _ in stage.named_buffers(remove_duplicate=False)})
        stage = self._hooks.wrap_stage(stage, names)
        self._hooks.checkpoint(stage)
        return stage

    def _collect_names(self) -> None:
        found: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                found.setdefault(self._split.canonical[_plain(name)], parameter)
            for name, buffer in stage.named_buffers(remove_duplicate=False):
                buffers.setdefault(_plain(name), buffer)
        self.named = {name: found[name] for name in self._split.holders if name in found}
        self.buffers = {name: buffers[name] for name in self._split.buffers if name in buffers}
        self._names = {id(parameter): name for name, parameter in self.named.items()}
        self._layouts = self._hooks.layouts({**self.named, **self.buffers})
        ranks = {name: sorted({stage % self._ranks for stage in at}) for name, at in self._split.holders.items()}
        shared = {name: at for name, at in ranks.items() if len(at) > 1}
        self._tied = TiedParameters(self.named, shared, self._place.group, self._place.device)
        first = {name: at[0] for name, at in ranks.items()}
        first.update({name: at[0] % self._ranks for name, at in self._split.buffers.items()})
        #: What this rank speaks for: a tied parameter counts on the first rank that holds it.
        self._own = {name for name in (*self.named, *self.buffers) if first[name] == self._rank}

    def _make_optimizer(self, make: MakeOptimizer, whole: Optimizer) -> Optimizer:
        chosen = {name for group in self._order.groups for name in group}
        # Torch refuses an optimizer of nothing, and schedulers need one with the settings of all the others.
        optimizer = make(self.named) if chosen & set(self.named) else _emptied(whole)
        self.first_group = self._place_of_first(optimizer)
        self._hooks.spread_optimizer(optimizer, self.named)
        self._members = [
            [self._names[id(parameter)] for parameter in group["params"] if id(parameter) in self._names]
            for group in optimizer.param_groups
        ]
        return optimizer

    def _place_of_first(self, optimizer: Optimizer) -> int | None:
        """The user's function makes groups of this rank's parameters, so they may be fewer than those of the whole model."""
        first = set(self._order.groups[0]) & set(self._split.holders)
        if not first:
            return 0  # no stage has any of it
        for number, group in enumerate(optimizer.param_groups):
            if any(self._names.get(id(parameter)) in first for parameter in group["params"]):
                return number
        return None

    # ----------------------------------------------------------------------------------------------------- training

    def train_batch(
        self, batch: Any, rows: int, factor: float, stand_in: bool = False, *, last: bool = False
    ) -> Measured:
        """Run forward and backward on one batch and add its gradients to what is there.

        Args:
            batch: `(inputs, targets)`; the inputs matter on the first rank, the targets on the last.
            rows: samples in it, 1 or more.
            factor: what the loss sum is multiplied with, such as loss scale over samples of the global batch.
            stand_in: nothing is run. The ranks of one pipeline all say the same.
            last: no batch of this step follows; sums over replicas begin when all are through, so it changes nothing.

        Raises:
            ConfigError: the batch cannot be cut, or something cannot pass between stages.
            Exception: what the model or the criterion raises; the part can be used again once its group can.
        """
        if stand_in:
            return _NOTHING
        inputs, targets = batch
        count = count_micro_batches(self._spec.schedule, self._spec.micro_batches, rows, self._ranks)
        sizes = tuple(micro_batch_sizes(rows, count))
        parts = self._cut(inputs, rows, sizes, 0) if self.takes_inputs else []
        labels = self._cut(targets, rows, sizes, 1) if self.takes_targets else []
        sums, whole = MicrobatchSums(), [WholeParts(parts), WholeParts(labels)]

        def loss(number: int, outputs: Any) -> Tensor:
            found = self._criterion(outputs, labels[number], sizes[number])
            sums.add(found)
            return found.value * (found.weight * factor)

        self._shared.begin()
        with explaining_few_rows(*self._stages.values()), explaining_stages(self._rank, self._ranks):
            self._schedules.run(inputs, parts, sizes, loss)
        self._shared.check()
        for one in whole:
            one.check()
        self._rows += rows
        return sums.measured(rows)

    def stand_in(self, batch: Any) -> None:
        """Do nothing: the ranks of a pipeline do not know of each other's parameters."""

    def _cut(self, value: Any, rows: int, sizes: Sequence[int], half: int) -> list[Any]:
        return cut_rows(to_device(value, self._place.device), rows, sizes, self.cut_along, half)

    def forget(self) -> None:
        """Forget all shapes; after a batch that failed on some ranks only, call it on all of them."""
        self._schedules.forget()

    def finish_gradients(self, policies: str = "") -> Collection[str]:
        """Complete the gradients of a step: copies of tied parameters, then replicas, are added up; `policies` is not used."""
        self._tied.sum_gradients()
        self._hooks.sum_over_data(self.named)
        unlike = self._hooks.sync_buffers(self._rows)
        self._rows = 0
        return unlike

    # ---------------------------------------------------------------------------------------------------- evaluation

    def eval_batch(self, batch: Any, rows: int, stand_in: bool = False, observer: Observer | None = None) -> Measured:
        """Measure a batch in evaluation mode, whole and without gradients; arguments as for `train_batch`.

        `observer` sees outputs, targets and rows, on the last rank.
        """
        if stand_in:
            return _NOTHING
        sums = MicrobatchSums()
        targets = to_device(batch[1], self._place.device) if self.takes_targets else None

        def last(number: int, outputs: Any) -> None:
            sums.add(self._criterion(outputs, targets, rows))
            if observer is not None:
                observer(whole_logits(outputs), targets, rows)

        self._forward(batch[0], last)
        return sums.measured(rows)

    def predict_batch(self, batch: Any, rows: int, forward: Forward, stand_in: bool = False) -> list[Predicted]:
        """Return outputs and rows in evaluation mode, on the last rank; others have none."""
        if stand_in:
            return []
        outputs: list[Predicted] = []
        self._forward(batch[0], lambda number, output: outputs.append((whole_logits(output), rows)))
        return outputs

    def _forward(self, inputs: Any, last: Callable[[int, Any], None]) -> None:
        # Not in micro-batches: nothing tells whether a loss or outputs of a part are those of the whole batch.
        parts = [to_device(inputs, self._place.device)] if self.takes_inputs else []
        with torch.no_grad(), evaluating(self.model), explaining_stages(self._rank, self._ranks):
            self._schedules.forward_only.run(parts, 1, last)

    # ----------------------------------------------------------------------------------------------------- gradients

    def gradient_square(self) -> float:
        """Return this rank's share of the squared L2 norm of the full gradient, each element counted on one rank."""
        owned = {name: parameter for name, parameter in self.named.items() if name in self._own}
        return float(gradient_square(owned, self._layouts, self._place.dp, self._place.tp))

    # --------------------------------------------------------------------------------------------------------- state

    def _speaks_for(self, name: str, replica: int = 0) -> bool:
        """Whether this rank hands over a tensor: each replica holds the whole state and speaks for itself."""
        return name in self._own and self._layouts[name].counted(replica, self._place.tp)

    def model_pieces(self) -> list[StatePiece]:
        """Return this rank's share of the full state dict; a second name of a tied parameter comes with the first."""
        places = {key: place for place, key in enumerate(self._split.keys)}
        replica = self._place.dp if self._hooks.one_replica_owns else 0
        found: list[StatePiece] = []
        for key in self._split.keys:
            name = self._split.canonical.get(key, key)
            tensor = self.named.get(name, self.buffers.get(name))
            if tensor is not None and self._speaks_for(name, replica):
                found += pieces_of(key, tensor, self._layouts[name], places[key])
        return found

    def optimizer_pieces(self) -> dict[str, Any]:
        """Return this rank's share of the optimizer's state, see `parallel.state.assemble_optimizer`."""
        return optimizer_pieces(
            self.optimizer, self._names, self._members, self._layouts, self._order, self._speaks_for
        )

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None = None) -> None:
        """Take this rank's part of a full state; without `optimizer` its state is left as it is.

        Raises:
            CheckpointError: a tensor is missing, or has another shape than the model's.
        """
        carried = set(self._order.keys)  # a state_dict of the user's own may leave frozen layers out
        for name, tensor in {**self.named, **self.buffers}.items():
            if name not in carried:
                continue
            if name not in model:
                raise CheckpointError(f"the state has no {name!r}, which this model needs; it has {len(model)} entries")
            load_tensor(name, tensor, model[name], self._layouts[name])
        self._hooks.loaded()
        if optimizer is not None and self.named:
            load_optimizer(self.optimizer, self._names, self._members, self._layouts, self._order, optimizer)


# ------------------------------------------------------------------------------------------------------------- helpers


def _without_modules(split: Split) -> Split:
    """Let go of the stages that other ranks run."""
    return Split((), split.begins, split.canonical, split.holders, split.buffers, split.keys)


def _emptied(optimizer: Optimizer) -> Optimizer:
    """Leave an optimizer its groups and their settings only."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []
        group.pop("param_names", None)
    return optimizer


def _plain(name: str) -> str:
    """Return a name without what torch's activation checkpointing puts into it."""
    return name.replace("_checkpoint_wrapped_module.", "")
