"""What a pipeline is built from: this rank's place, what other modes do to a stage, and checks of the settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.config.modes import check_combination
from guava_nb.errors import ConfigError
from guava_nb.parallel.pipeline.microbatches import check_micro_batches
from guava_nb.parallel.pipeline.stages import Traced, parameter_costs, time_costs
from guava_nb.parallel.state.shard_layout import Layout
from guava_nb.protocol.messages import ParallelSpec

__all__ = ["Hooks", "PipelinePlace", "check_spec", "costs_for"]

_SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """Where this rank stands.

    Attributes:
        group: the ranks of this pipeline, in the order of the stages.
        device: where its stages live.
        dp: index of the replica.
        tp: index among the ranks that share each layer.
    """

    group: dist.ProcessGroup
    device: torch.device
    dp: int = 0
    tp: int = 0


class Hooks:
    """What other modes do to the stages; here nothing."""

    one_replica_owns = False
    """The state of a parameter is on one replica, whichever it is (ZeRO 1)."""

    def wrap_stage(self, stage: nn.Module, names: Mapping[str, str]) -> nn.Module:
        """Spread a stage over the tensor and data axes.

        Args:
            stage: to be spread.
            names: its parameters' and buffers' names, mapped to those of the full model.

        Returns:
            The module to run, whose tensors keep their names.
        """
        return stage

    def checkpoint(self, stage: nn.Module) -> None:
        """Arrange that activations of a stage are computed again in backward."""

    def layouts(self, named: Mapping[str, Tensor]) -> dict[str, Layout]:
        """Tell of this rank's parameters and buffers which part of the full tensor they are."""
        return {name: Layout.whole(tuple(tensor.shape)) for name, tensor in named.items()}

    def sum_over_data(self, named: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of these parameters over the replicas, once a step."""

    def sync_buffers(self, rows: int) -> Collection[str]:
        """Make buffers equal on all replicas, of which this one saw so many rows; returns names, see `BufferSync.unlike`."""
        return ()

    def spread_optimizer(self, optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
        """Make the local optimizer of these parameters the one that steps (ZeRO 1)."""

    def loaded(self) -> None:
        """Parameters and buffers were replaced, alike on every replica."""


def check_spec(spec: ParallelSpec, ranks: int) -> None:
    """Refuse settings that no pipeline on so many ranks can follow.

    Raises:
        ConfigError: with the numbers, and what to use instead.
    """
    if spec.schedule not in _SCHEDULES:
        raise ConfigError(f"schedule {spec.schedule!r} is unknown; there are {', '.join(_SCHEDULES)}")
    check_combination(spec.mode, spec.pp, spec.zero_stage, spec.schedule, spec.stages_per_rank)
    if spec.balance not in ("parameters", "time"):
        raise ConfigError(f"balance {spec.balance!r} is unknown; there are 'parameters' and 'time'")
    check_micro_batches(spec.schedule, spec.micro_batches, ranks)


def costs_for(spec: ParallelSpec, example: Any) -> Callable[[Traced], list[float]]:
    """Return how units are weighed; times are measured on rank 0 of the default group, and all ranks use them."""
    if spec.balance == "parameters":
        return parameter_costs

    def measured(traced: Traced) -> list[float]:
        costs = torch.full((len(traced.units),), -1.0, dtype=torch.float64)
        failure: Exception | None = None
        if dist.get_rank() == 0 and example is not None:
            try:
                costs = torch.tensor(time_costs(traced, example), dtype=torch.float64)
            except Exception as error:  # told to the others first, who wait for the times
                failure = error
        costs = _broadcast(costs)
        if failure is not None:
            raise failure
        if bool((costs < 0).any()):
            raise ConfigError(
                "pipeline_balance='time' (--balance time) needs inputs of a typical micro-batch on rank 0 that the model can "
                "run, and there are none: use pipeline_balance='parameters' (--balance parameters), or name the modules that "
                "begin a stage (pipeline_split=, --split)"
            )
        return [float(cost) for cost in costs]

    return measured


def _broadcast(tensor: Tensor) -> Tensor:
    """Return rank 0's tensor on every rank of the default group, on the CPU; all pass one of the same shape and dtype."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    tensor = tensor.to(device)
    dist.broadcast(tensor, 0)
    return tensor.cpu()
