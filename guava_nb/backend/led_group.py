"""Leads a program's `init_process_group` and `new_group` to a default group that stands before its first line.

Knows torch's functions; does not know how the group is made, or whose session carries it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from guava_nb.backend.group import GuavaGroup
from guava_nb.errors import ConfigError

__all__ = ["OPERATION_S", "LedGroup", "environment"]

OPERATION_S = 1800.0  # torch's own, for programs that name none
_ANY_ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # programs only read it: nothing listens
_SUBGROUP_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
Say = Callable[[str], None]


def environment(rank: int, world_size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Return what a launcher such as torchrun would have put into the environment of this rank."""
    ours = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        **_ANY_ADDRESS,
    }
    if not torch.cuda.is_available():  # else Hugging Face accelerate takes a machine without GPU for a single process
        ours["ACCELERATE_USE_CPU"] = os.environ.get("ACCELERATE_USE_CPU", "true")
    return ours


class LedGroup:
    """The default group of one rank, as its program gets it, with any backend and address that the program asks for.

    Args:
        rank: of this process.
        world_size: number of ranks.
        backend: of the group.
        form: makes the default group with this time-out for its operations; called again where the program has destroyed it.
        say: told in one sentence where the program gets another backend than it asked for.
    """

    def __init__(self, rank: int, world_size: int, backend: str, form: Callable[[timedelta], None], say: Say) -> None:
        self._rank, self._world_size, self._backend, self._form, self._say = rank, world_size, backend, form, say
        self._claimed = self._forming = False
        self._torchs_init = dist.init_process_group
        self._undo: list[Callable[[], None]] = []

    def form(self, timeout: timedelta) -> None:
        """Make the default group; meanwhile `init_process_group` is torch's own."""
        self._forming = True
        try:
            self._form(timeout)
        finally:
            self._forming = False

    def lead(self) -> None:
        """From now on the program's calls come here."""
        _replace("init_process_group", self._init_process_group, self._undo)
        if self._backend == "guava":
            _replace("new_group", _without_backend(dist.new_group), self._undo)

    def give_back(self) -> None:
        """Put torch's functions back."""
        while self._undo:
            self._undo.pop()()

    def _init_process_group(
        self,
        backend: Any = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        *others: Any,
        **more: Any,
    ) -> None:
        """Give the program the group that stands."""
        if rank not in (-1, self._rank) or world_size not in (-1, self._world_size):
            raise ConfigError(
                f"the program calls init_process_group(rank={rank}, world_size={world_size}), but it was started as rank "
                f"{self._rank} of {self._world_size}; let it read RANK and WORLD_SIZE"
            )
        if self._forming:  # by ourselves, just now
            self._torchs_init(backend, init_method, timeout, world_size, rank, *others, **more)
            return
        if not dist.is_initialized():
            self.form(timeout or timedelta(seconds=OPERATION_S))
        elif self._claimed:
            raise ValueError("trying to initialize the default process group twice!")
        elif timeout is not None:
            _set_timeout(timeout)
        if not self._claimed and backend is not None and str(backend).lower() != self._backend:
            self._say(f"backend: {self._backend} (the script asked for {backend})")
        self._claimed = True


def _replace(name: str, ours: Callable[..., Any], undo: list[Callable[[], None]]) -> None:
    """Put our function where the program, and torch's own modules, find torch's."""
    theirs = getattr(distributed_c10d, name)
    holders = [held for held in list(sys.modules.values()) if getattr(held, "__dict__", {}).get(name) is theirs]
    for module in holders:
        setattr(module, name, ours)

    def give_back() -> None:
        # Also in modules that were loaded meanwhile: in a process that stays they would keep a group that is over.
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is ours:
                setattr(module, name, theirs)

    undo.append(give_back)


def _without_backend(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """A `new_group` that makes a group like the default one where the program asks for one that needs a network."""
    signature = inspect.signature(new_group)

    def made(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        wanted = str(call.arguments.get("backend") or "")
        if any(name in wanted.lower() for name in _SUBGROUP_BACKENDS):
            call.arguments.update(backend=None, pg_options=None)
        return new_group(*call.args, **call.kwargs)

    return made


def _set_timeout(timeout: timedelta) -> None:
    group = dist.group.WORLD
    if isinstance(group, GuavaGroup):
        group.set_timeout(timeout)
    else:
        distributed_c10d._set_pg_timeout(timeout)
