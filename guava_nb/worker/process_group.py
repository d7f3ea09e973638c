"""A worker's place in a process group: takes it, gives it up, and wakes the threads that are blocked in it.

The loop's thread sits in the group's operations; an abort comes on another thread and must reach it there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from guava_nb.backend import Endpoint, end_group, init_group, store_for
from guava_nb.errors import CollectiveTimeout, GroupBroken
from guava_nb.protocol.messages import FormGroup
from guava_nb.worker.direct_group import DirectGroup, abort_nccl, let_nccl_fail_softly, let_operations_take_long

__all__ = ["GroupSeat"]


class GroupSeat:
    """At most one group at a time, torch's default one.

    Args:
        endpoint: this process's way to the hub's relay and store.
        device: where tensors live.

    Attributes:
        is_woken: the present group was given up, and the thread that waits in it was woken.
    """

    def __init__(self, endpoint: Endpoint, device: torch.device) -> None:
        """No group yet."""
        self._endpoint, self._device = endpoint, device
        self._lock = threading.Lock()
        self._formed: FormGroup | None = None
        self._direct: DirectGroup | None = None
        self._broken = ""  # why the present group is given up; "" while it stands
        self._applying = False
        self._generation = -1  # an abort up to here came
        self.is_woken = False

    @property
    def is_direct(self) -> bool:
        """Whether the present group's members reach each other: what one has sent is then not at the hub."""
        return self._direct is not None

    @property
    def formed_in(self) -> int:
        """Generation of the present group, -1 without one."""
        formed = self._formed
        return -1 if formed is None else formed.generation

    def form(self, order: FormGroup) -> None:
        """Leave the present group and take a place in a new one; returns when all members have met.

        Raises:
            GroupBroken: it was given up meanwhile.
            GuavaError, RuntimeError: a member did not come, or could not be reached.
        """
        self.leave()
        with self._lock:
            if order.generation <= self._generation:
                raise GroupBroken("the group was given up before it was formed")
            self._formed, self._broken, self.is_woken = order, "", False
        if order.backend == "guava":
            if order.machines:
                let_nccl_fail_softly()
            init_group(
                self._endpoint, order.name, order.rank, len(order.members), order.members, timeout_s=order.timeout_s
            )
            let_operations_take_long()
            return
        direct = DirectGroup(order, store_for(self._endpoint, order.name), self._device)
        with self._lock:
            self._direct = direct
        direct.join()

    def complete(self) -> None:
        """The model is spread over the group: no more groups are made of it.

        Raises:
            GroupBroken: it was given up meanwhile.
        """
        if self._direct is not None:
            self._direct.complete()
        if self._broken:  # an abort that came before may have missed the newest connections
            raise GroupBroken(self._broken)

    def leave(self) -> None:
        """Give the present group up, if there is one; never waits for the others."""
        with self._lock:
            formed, self._formed = self._formed, None
            direct, self._direct = self._direct, None
        if direct is not None:
            direct.leave()
        elif formed is not None:
            if formed.machines:  # taking a group down waits for what is blocked in it
                abort_nccl(self._device)
            end_group()
        if not dist.is_initialized():
            c10d._world.group_count = (
                0  # a failed init has counted, and torch names subgroups by number: all must agree
            )

    def renew(self) -> None:
        """Another session follows: its groups are no older ones than those that were given up here."""
        self.leave()
        with self._lock:
            self._generation = -1

    def abort(self, generation: int, reason: str) -> None:
        """Wake the threads that are blocked in the group; called from any thread, and does not wait.

        While a committed step is being applied it waits for that to end: half of ZeRO 1's exchange would tear the parameters.
        A member that is gone breaks the exchange by itself.
        """
        with self._lock:
            self._generation = max(self._generation, generation)
            if self._formed is None or generation < self._formed.generation:
                return
            self._broken = self._broken or reason
            applying = self._applying
        if not applying:
            self._wake()

    def give_up(self, reason: str) -> None:
        """Wake the thread that is blocked in the group, whatever the group was made for; from any thread, and does not wait."""
        with self._lock:
            if self._formed is None:
                return
            self._broken = self._broken or reason
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            formed, direct = self._formed, self._direct
        if formed is None:
            return
        self._endpoint.break_groups(self._broken)  # the store too, where members of a direct group meet
        if direct is not None:
            direct.wake()
        elif formed.machines:
            abort_nccl(self._device)
        self.is_woken = True

    @contextmanager
    def applying(self) -> Iterator[None]:
        """A committed step is applied in the block: an abort waits for its end."""
        with self._lock:
            self._applying = True
        try:
            yield
        finally:
            with self._lock:
                self._applying, wake = False, bool(self._broken)
            if wake:
                self._wake()

    def broken_by(self, error: BaseException) -> bool:
        """Whether an error of the step comes from the group, not from the user's code."""
        if self._formed is None:
            return False
        if self._broken or isinstance(error, GroupBroken | CollectiveTimeout | dist.DistError):
            return True
        text = str(error)
        return isinstance(error, RuntimeError) and any(mark in text for mark in _MARKS)


#: What gloo and NCCL say in a plain RuntimeError when a peer is gone, and the hub of one that left because its own part failed.
_MARKS = (
    "left the group",
    "Connection closed by peer", "Connection reset by peer", "gloo", "Broken pipe", "NCCL", "Timed out waiting",
    "Application timeout",
)  # fmt: skip
