"""The process group of a program that knows nothing of guava: made before it runs, handed out when it asks for one.

    with ProgramGroup(place, ways) as group:
        ...  # the program's own init_process_group("nccl") gets this group

The group exists before the program's first line, so that ranks that do not come, or do not fit, are told in one sentence
and not from the depths of somebody's script.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from guava_nb.backend.group import GuavaGroup
from guava_nb.backend.init_group import Dialled, dial_through, end_group, init_group, member_name
from guava_nb.backend.rendezvous import Rendezvous, check_place, introduce, meet
from guava_nb.backend.store import store_for
from guava_nb.errors import ConfigError, GuavaError, LinkError
from guava_nb.protocol.joincode import JoinCode

__all__ = ["Place", "ProgramGroup"]

_OPERATION_S = 1800.0  # torch's own, for programs that name none
_ANY_PORT = "29500"  # nobody listens: programs only want to read a number
_SUBGROUP_BACKENDS = ("gloo", "nccl", "mpi", "ucc")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Which process of a program this is.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: number of processes.
        code: of the hub; None: the environment of torchrun tells where the others are, and rank 0 has the hub.
        job: keeps programs apart that use one hub at the same time.
        backend: "guava", or one that needs machines that reach each other: "gloo", "nccl".
        wait_s: how long the others may take to come.
    """

    rank: int
    world_size: int
    code: JoinCode | None = None
    job: str = "program"
    backend: str = "guava"
    wait_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse what is no place.

        Raises:
            ConfigError: there is no such rank.
        """
        check_place(self.rank, self.world_size)


class ProgramGroup:
    """A session with the hub, a default group over it, and torch's functions led to it. A context manager.

    Args:
        place: of this process.
        say: told in one sentence where things stand.

    Raises (by `with`):
        ConfigError: the ranks do not fit together.
        CollectiveTimeout: some ranks did not come in time; it names them.
        GuavaError: the hub cannot be reached or refuses.
    """

    def __init__(self, place: Place, say: Say = lambda line: None) -> None:
        self.place, self._say = place, say
        self._dialled: Dialled | None = None
        self._close_hub: Callable[[], None] = lambda: None
        self._meeting: Rendezvous | None = None
        self._formed = 0
        self._claimed = self._forming = False
        self._torchs_init = dist.init_process_group
        self._stores: list[Store] = []  # torch holds only their C++ half
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> ProgramGroup:
        """Meet the others, make the group, lead torch's functions to it."""
        try:
            meeting = self._meet()
            self._form(timedelta(seconds=_OPERATION_S))
        except BaseException:
            self.close("it could not begin")
            raise
        self._say(f"all {self.place.world_size} ranks are here: {', '.join(meeting.members)}")
        self._lead("init_process_group", self._init_process_group)
        if self.place.backend == "guava":
            self._lead("new_group", _without_backend(dist.new_group))
        return self

    def __exit__(self, *error: object) -> None:
        """Give the functions back and end the session; a group that is still open breaks on the other ranks."""
        self.close(f"its program ended with {_described(error[1])}" if error[1] is not None else "")

    def close(self, failure: str = "") -> None:
        """End the group and the session.

        Args:
            failure: why, for the other ranks; "" when the program has come to its end.
        """
        while self._undo:
            self._undo.pop()()
        if failure and self._dialled is not None:
            self._dialled.close(failure)  # before the group: a rank that leaves in good order breaks nothing
        with suppress(GuavaError, RuntimeError, ValueError):
            end_group()
        if self._dialled is not None:
            self._dialled.close("its program has ended")
            self._close_hub()

    def interrupt(self) -> None:
        """Wake the thread that is blocked in the group; from any thread."""
        if self._dialled is not None:
            self._dialled.endpoint.break_groups("it was interrupted here")

    def environment(self) -> dict[str, str]:
        """What a launcher would have put into the environment; what stands there already wins for the local ranks."""
        assert self._meeting is not None
        ours = {
            "RANK": str(self.place.rank),
            "WORLD_SIZE": str(self.place.world_size),
            "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(self._meeting.local_rank)),
            "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(self._meeting.local_size)),
        }
        if (
            not torch.cuda.is_available()
        ):  # else Hugging Face accelerate takes a machine without GPU for a single process
            ours["ACCELERATE_USE_CPU"] = os.environ.get("ACCELERATE_USE_CPU", "true")
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _ANY_PORT}
        return ours if self.place.code is None else {**ours, **address}

    # --------------------------------------------------------------------------------------------------- the group

    def _meet(self) -> Rendezvous:
        rank, size, wait_s = self.place.rank, self.place.world_size, self.place.wait_s
        if self.place.code is None:
            store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=wait_s)))
            self._stores.append(store)
            self._dialled, self._close_hub = dial_through(store, rank, wait_s, member_name(rank))
            self._meeting = introduce(self._dialled.endpoint, self.place.job, rank, size, wait_s)
        else:
            try:
                self._dialled = Dialled(self.place.code, member_name(rank))
            except LinkError as error:
                raise type(error)(f"{error} Is the session (%guava_up) still open?") from error
            self._say(f"rank {rank} of {size} is at {self.place.code.address}; it waits for the others")
            self._meeting = meet(self._dialled.endpoint, self.place.job, rank, size, wait_s)
        return self._meeting

    def _form(self, timeout: timedelta) -> None:
        """Make the default group; every time under a new name, as a program may destroy it and ask again."""
        assert self._dialled is not None and self._meeting is not None
        self._formed += 1
        endpoint, name = self._dialled.endpoint, f"{self._meeting.name}/{self._formed}"
        place, seconds = self.place, timeout.total_seconds()
        self._forming = True
        try:
            if place.backend == "guava":
                init_group(endpoint, name, place.rank, place.world_size, self._meeting.members, seconds)
                return
            store = store_for(endpoint, f"{name}/")
            self._stores.append(store)
            self._torchs_init(place.backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
        finally:
            self._forming = False

    # ------------------------------------------------------------------------------------------- called by the program

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
        """Give the program the group that stands, whatever backend and address it asks for."""
        if rank not in (-1, self.place.rank) or world_size not in (-1, self.place.world_size):
            raise ConfigError(
                f"the program calls init_process_group(rank={rank}, world_size={world_size}), but `guava run` started "
                f"it as rank {self.place.rank} of {self.place.world_size}; let it read RANK and WORLD_SIZE"
            )
        if self._forming:  # by ourselves, just now
            self._torchs_init(backend, init_method, timeout, world_size, rank, *others, **more)
            return
        if not dist.is_initialized():
            self._form(timeout or timedelta(seconds=_OPERATION_S))
        elif self._claimed:
            raise ValueError("trying to initialize the default process group twice!")
        elif timeout is not None:
            _set_timeout(timeout)
        if not self._claimed and backend is not None and str(backend).lower() != self.place.backend:
            self._say(f"backend: {self.place.backend} (the script asked for {backend})")
        self._claimed = True

    def _lead(self, name: str, ours: Callable[..., Any]) -> None:
        """Put our function where the program, and torch's own modules, find torch's."""
        theirs = getattr(distributed_c10d, name)
        holders = [held for held in list(sys.modules.values()) if getattr(held, "__dict__", {}).get(name) is theirs]
        for module in holders:
            setattr(module, name, ours)

        def give_back() -> None:
            for module in holders:
                setattr(module, name, theirs)

        self._undo.append(give_back)


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


def _described(error: object) -> str:
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {text[:200]}" if text else "")
