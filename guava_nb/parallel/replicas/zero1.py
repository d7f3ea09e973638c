"""ZeRO 1: every replica keeps the optimizer's state of its own parameters only, and updates those.

A whole optimizer is made first, the user's own function included, then each group is cut to the parameters that this
rank owns; torch's optimizers make their state on the first step, so what is cut away never exists. After each step the
owners broadcast their parameters, as the end of `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import ConfigError
from guava_nb.parallel.unloaded import take_step

__all__ = ["keep_owned", "own_share", "owners"]


def owners(named: Mapping[str, nn.Parameter], ranks: int) -> dict[str, int]:
    """Return the owner of each parameter, a rank of the group: the largest first, each to the rank that has least."""
    load = [0] * ranks
    found: dict[str, int] = {}
    for name, parameter in sorted(named.items(), key=lambda item: (-item[1].numel(), item[0])):
        found[name] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[found[name]] += max(1, parameter.numel())
    return found


def own_share(optimizer: Optimizer, named: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> dict[str, int]:
    """Cut an optimizer to this rank's parameters and let every step end with all ranks holding all of them.

    Args:
        optimizer: of all parameters; it is changed in place.
        named: all parameters, by full name.
        group: of the replicas.

    Returns:
        The owner of each parameter, a rank of `group`.

    Raises:
        ConfigError: the optimizer keeps state of its own beside the parameters', which cannot be divided.
    """
    mine, ranks = dist.get_rank(group), dist.get_world_size(group)
    owner = owners(named, ranks)
    keep_owned(optimizer, {id(named[name]) for name, rank in owner.items() if rank == mine})
    sending = _sending(named, owner, ranks)
    _share_after(optimizer, lambda: _broadcast(sending, group))
    return owner


def keep_owned(optimizer: Optimizer, owned: Collection[int]) -> None:
    """Cut an optimizer to the parameters with these `id`s.

    Raises:
        ConfigError: as `own_share`.
    """
    if strange := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {len(strange)} entries of state that belong to no parameter; "
            "ZeRO 1 cannot divide them, use zero_stage=0 (--zero 0 in hybrid mode), or data mode"
        )
    for param_group in optimizer.param_groups:
        param_group["params"] = [p for p in param_group["params"] if id(p) in owned]
        # Present only where the user's function named its parameters; torch wants as many names as parameters.
        param_group.pop("param_names", None)
    for parameter in [p for p in optimizer.state if id(p) not in owned]:
        del optimizer.state[parameter]  # Adagrad makes its state before the first step.


def _share_after(optimizer: Optimizer, share: Callable[[], None]) -> None:
    """Have every call of `step` end with `share`.

    A hook would not do: torch runs it once more in a step that calls its base class's, if some optimizer of that class was
    ever made in this process, so that ranks with unlike pasts would send unlike often.
    """
    own_step = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = None
        if args or kwargs:
            result = own_step(*args, **kwargs)
        else:
            take_step(self, own_step)
        share()
        return result

    # A method, since schedules of torch look into it.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _sending(
    named: Mapping[str, nn.Parameter], owner: Mapping[str, int], ranks: int
) -> list[tuple[int, list[nn.Parameter]]]:
    found: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            found.setdefault((owner[name], parameter.dtype), []).append(parameter)
    return [(rank, found[rank, dtype]) for rank, dtype in sorted(found, key=lambda key: (key[0], str(key[1])))]


@torch.no_grad()
def _broadcast(sending: Sequence[tuple[int, list[nn.Parameter]]], group: dist.ProcessGroup) -> None:
    flats, works = [], []
    for rank, parameters in sending:
        flat = torch.cat([p.reshape(-1) for p in parameters])
        source = dist.get_global_rank(group, rank)
        works.append(dist.broadcast(flat, src=source, group=group, async_op=True))
        flats.append((rank, flat, parameters))
    mine = dist.get_rank(group)
    for work, (rank, flat, parameters) in zip(works, flats, strict=True):
        work.wait()
        if rank != mine:
            parts = flat.split([p.numel() for p in parameters])  # type: ignore[no-untyped-call]
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))
