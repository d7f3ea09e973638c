"""The process group of a program that knows nothing of guava: made before it runs, handed out when it asks for one.

    with ProgramGroup(place, ways) as group:
        ...  # the program's own init_process_group("nccl") gets this group

The group exists before the program's first line, so that ranks that do not come, or do not fit, are told in one sentence
and not from the depths of the user's script.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from guava_nb.backend.init_group import Dialled, dial_through, end_group, init_group, member_name
from guava_nb.backend.led_group import OPERATION_S, LedGroup, environment
from guava_nb.backend.rendezvous import Rendezvous, check_place, introduce, meet
from guava_nb.backend.store import store_for
from guava_nb.errors import GuavaError, LinkError
from guava_nb.protocol.joincode import JoinCode

__all__ = ["Place", "ProgramGroup"]

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
        self._stores: list[Store] = []  # torch holds only their C++ half
        self._led = LedGroup(place.rank, place.world_size, place.backend, self._form, say)

    def __enter__(self) -> ProgramGroup:
        """Meet the others, make the group, lead torch's functions to it."""
        try:
            meeting = self._meet()
            self._led.form(timedelta(seconds=OPERATION_S))
        except BaseException:
            self.close("it could not begin")
            raise
        self._say(f"all {self.place.world_size} ranks are here: {', '.join(meeting.members)}")
        self._led.lead()
        return self

    def __exit__(self, *error: object) -> None:
        """Give the functions back and end the session; a group that is still open breaks on the other ranks."""
        self.close(f"its program ended with {_described(error[1])}" if error[1] is not None else "")

    def close(self, failure: str = "") -> None:
        """End the group and the session.

        Args:
            failure: why, for the other ranks; "" when the program has come to its end.
        """
        self._led.give_back()
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
        meeting, theirs = self._meeting, os.environ
        local = (
            int(theirs.get("LOCAL_RANK", meeting.local_rank)),
            int(theirs.get("LOCAL_WORLD_SIZE", meeting.local_size)),
        )
        ours = environment(self.place.rank, self.place.world_size, *local)
        if self.place.code is None:  # torchrun's own address stands
            return {name: value for name, value in ours.items() if not name.startswith("MASTER_")}
        return ours

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
        if place.backend == "guava":
            init_group(endpoint, name, place.rank, place.world_size, self._meeting.members, seconds)
            return
        store = store_for(endpoint, f"{name}/")
        self._stores.append(store)
        dist.init_process_group(
            place.backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )


def _described(error: object) -> str:
    text = " ".join(str(error).split())
    return type(error).__name__ + (f": {text[:200]}" if text else "")
