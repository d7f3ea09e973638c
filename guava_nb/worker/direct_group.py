"""A worker's end of a process group on gloo or NCCL: on the interface that was proved, and with an end that can be forced.

gloo gives up neither on request (its abort leaves a blocked rank blocked) nor when the network to a peer is cut. So its
connections are found by their addresses: shutting them down wakes the ranks that are blocked, and the kernel watches the peers.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from guava_nb.backend.group import GuavaGroup
from guava_nb.protocol.messages import FormGroup
from guava_nb.transport import foreign

__all__ = ["DirectGroup", "abort_nccl", "let_nccl_fail_softly", "let_operations_take_long"]

log = logging.getLogger(__name__)

#: Seconds without a sign of life from a peer's machine after which its connections break.
SILENCE_S = 9
#: For one operation. Long: others may compile or page for minutes, and who is lost is known by other means.
OPERATION_TIMEOUT_S = 1800.0

#: How the libraries are told an interface; "=" is NCCL's way to say this name, not names that begin so.
_INTERFACE = {"gloo": ("GLOO_SOCKET_IFNAME", ""), "nccl": ("NCCL_SOCKET_IFNAME", "=")}


class DirectGroup:
    """One default group of torch; `join` once, then `leave`.

    Args:
        order: with backend, interface and addresses.
        store: where the members meet; kept as long as the group.
        device: where tensors live.
    """

    def __init__(self, order: FormGroup, store: c10d.Store, device: torch.device) -> None:
        """Do nothing yet."""
        self._order, self._store, self._device = order, store, device
        self._before = foreign.connections(order.addresses)
        self._mine: set[foreign.Stream] | None = None  # None until the group is complete
        self._lock = threading.Lock()
        self._name, sign = _INTERFACE[order.backend]
        self._former = os.environ.get(self._name)
        os.environ[self._name] = sign + order.interface

    def join(self) -> None:
        """Meet the others.

        Raises:
            RuntimeError: they did not come, or cannot be reached.
        """
        if self._order.backend == "nccl":
            let_nccl_fail_softly()
            # Instead of device_id=: with one, subgroups are split off the first group's communicator, which crashes in
            # the second group of a process.
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            self._order.backend,
            store=self._store,
            rank=self._order.rank,
            world_size=len(self._order.members),
            timeout=datetime.timedelta(seconds=self._order.timeout_s),
        )
        let_operations_take_long()

    def complete(self) -> None:
        """All groups that the run needs are made: from now on their connections are known, and watched."""
        found = self._connections()
        foreign.expect_life(found, SILENCE_S)
        with self._lock:
            self._mine = found

    def _connections(self) -> set[foreign.Stream]:
        return foreign.connections(self._order.addresses) - self._before

    def wake(self) -> None:
        """Wake the ranks that are blocked in the group, here and at the peers; from any thread. The group is useless then."""
        if self._order.backend == "nccl":
            abort_nccl(self._device)
            return
        with self._lock:
            known = self._mine
        ended = foreign.shut_down(self._connections() if known is None else known)
        log.info("%d connections of the direct group were ended", ended)

    def leave(self) -> None:
        """Take the group down; never waits for the others."""
        try:
            self.wake()
            if dist.is_initialized():
                dist.destroy_process_group()
        except (RuntimeError, ValueError) as error:
            log.info("the old group could not be taken down well: %s", error)
        if self._former is None:
            os.environ.pop(self._name, None)
        else:
            os.environ[self._name] = self._former


def let_operations_take_long() -> None:
    """The default group was met in a short time; from now on its operations may take long."""
    timeout, world = datetime.timedelta(seconds=OPERATION_TIMEOUT_S), dist.group.WORLD
    if isinstance(world, GuavaGroup):
        world.set_timeout(timeout)
    else:
        c10d._set_pg_timeout(timeout, world)


def let_nccl_fail_softly() -> None:
    """NCCL's watchdog would end the whole process when a peer is lost; here the group ends, not the worker."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


def abort_nccl(device: torch.device) -> None:
    """End every NCCL group of this process, and wake the threads that are blocked in one; from any thread."""
    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError, AttributeError):  # gone meanwhile, or of another kind
            group._get_backend(device).abort()
