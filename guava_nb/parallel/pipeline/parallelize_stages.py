"""Tensor axis, activation checkpointing and data axis for the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import ConfigError
from guava_nb.parallel.blocks import matching
from guava_nb.parallel.checkpointing import checkpoint_activations
from guava_nb.parallel.loss_interface import Learning
from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.pipeline.pipeline import PipelinePart
from guava_nb.parallel.pipeline.pipeline_setup import Hooks, PipelinePlace
from guava_nb.parallel.replicas import zero1
from guava_nb.parallel.replicas.buffer_sync import BufferSync
from guava_nb.parallel.replicas.data_axis import sum_over_data
from guava_nb.parallel.state.local_tensors import full_names_of, layouts_in
from guava_nb.parallel.state.shard_layout import Layout
from guava_nb.parallel.tensor.tensor_plan import Plan, apply_plan
from guava_nb.parallel.tensor.tensor_sums import TensorSums
from guava_nb.protocol.messages import ParallelSpec

__all__ = ["pipeline_part"]


def pipeline_part(
    model: nn.Module,
    spec: ParallelSpec,
    mesh: MeshAxes,
    device: torch.device,
    learning: Learning,
    plan: Plan,
    example: Any = None,
) -> PipelinePart:
    """Cut a model into stages and spread each; `plan` is the whole model's, `example` as in `parallelize`.

    Raises:
        ConfigError: there is no criterion, or the model cannot be cut so.
    """
    if learning.criterion is None:
        raise ConfigError(
            "a pipeline needs a criterion of outputs and targets (--loss): which stage would "
            "run a step function is not known"
        )
    # On the whole model, because in a stage alone a block may not repeat.
    again = matching(model, spec.checkpoint_activations, "checkpoint_activations (--checkpoint-activations)")
    return PipelinePart(
        model,
        spec,
        PipelinePlace(mesh.group("pp"), device, mesh.dp, mesh.tp),
        criterion=learning.criterion,
        make_optimizer=learning.make_optimizer,
        hooks=_Stages(spec, mesh, plan, list(again), learning.buffers),
        example=example,
        wire=learning.wire,
    )


class _Stages(Hooks):
    """What tensor, data and activation settings do to the stages of one rank."""

    def __init__(self, spec: ParallelSpec, mesh: MeshAxes, plan: Plan, again: list[str], policies: str) -> None:
        self._spec, self._mesh, self._plan, self._again, self._policies = spec, mesh, plan, again, policies
        self._layouts: dict[str, Layout] = {}
        self._partial: list[str] = []
        self._modules = nn.ModuleList()
        self._tensor: TensorSums | None = None
        self._buffers: BufferSync | None = None
        self.one_replica_owns = spec.zero_stage == 1 and spec.dp > 1

    def wrap_stage(self, stage: nn.Module, names: Mapping[str, str]) -> nn.Module:
        if self._spec.tp > 1:
            self._partial += apply_plan(stage, self._plan, self._mesh.group("tp"))
        self._layouts.update({names[local]: layout for local, layout in layouts_in(stage, self._mesh).items()})
        self._modules.append(stage)
        return stage

    def layouts(self, named: Mapping[str, Tensor]) -> dict[str, Layout]:
        self.loaded()
        return {name: self._layouts[name] for name in named}

    def checkpoint(self, stage: nn.Module) -> None:
        checkpoint_activations(stage, self._again, must_match=False)

    def spread_optimizer(self, optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
        if self.one_replica_owns:
            zero1.own_share(optimizer, named, self._mesh.group("dp"))

    def sum_over_data(self, named: Mapping[str, nn.Parameter]) -> None:
        sum_over_data(named, self._mesh.group("dp"))
        if self._tensor is None:
            group = self._mesh.group("tp") if self._spec.tp > 1 else None
            self._tensor = TensorSums(group, self._partial, self._layouts)
        self._tensor.finish(named)

    def sync_buffers(self, rows: int) -> Collection[str]:
        if self._buffers is None:
            return ()
        self._buffers.finish(rows)
        return self._buffers.unlike

    def loaded(self) -> None:
        if self._spec.dp > 1:
            names = {f"{i}.{name}": name for i, stage in enumerate(self._modules) for name in full_names_of(stage)}
            self._buffers = BufferSync(self._modules, self._mesh.group("dp"), names, self._policies)
