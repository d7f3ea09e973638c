"""Whether an optimizer can step on parameters of which each replica holds some rows, tried on a tiny one."""

from __future__ import annotations

from collections import defaultdict
from copy import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from guava_nb.errors import ConfigError

__all__ = ["check_sharded_step"]


def check_sharded_step(optimizer: Optimizer, mesh: DeviceMesh, stage: int, device: torch.device) -> None:
    """Take two steps of a copy of an optimizer; all ranks of the mesh do so together.

    Args:
        optimizer: of sharded parameters; it is not changed.
        mesh: the replicas.
        stage: of ZeRO, for the message.
        device: of the parameters.

    Raises:
        ConfigError: it steps on whole parameters, and not on sharded ones.
    """
    with torch.no_grad():
        whole = torch.linspace(-1, 1, 4 * mesh.size(), device=device).reshape(-1, 2)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
    problem = _problem(optimizer, sharded)
    if problem is not None and _problem(optimizer, whole) is None:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step on parameters of which each worker holds some rows, as zero_stage "
            f"{stage} has them ({str(problem).splitlines()[0][:120]}); use zero_stage 1, or another optimizer such as AdamW"
        ) from problem


def _problem(optimizer: Optimizer, tensor: Tensor) -> Exception | None:
    trial = copy(optimizer)
    parameter = nn.Parameter(tensor.clone())
    trial.state = defaultdict(dict)
    trial.param_groups = [{**optimizer.param_groups[0], "params": [parameter]}]
    try:
        for _ in range(2):
            parameter.grad = tensor.clone()
            trial.step()
    except Exception as problem:  # An optimizer of the user's may raise anything.
        return problem
    return None
