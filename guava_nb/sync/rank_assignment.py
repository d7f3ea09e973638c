"""The orders by which workers become a process group: who is which rank, on which way. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from guava_nb.cluster.group_path import Route, machines_of
from guava_nb.cluster.roster import Member
from guava_nb.config.mesh import Mesh
from guava_nb.data.codec import pack
from guava_nb.parallel.mesh import axes_inside
from guava_nb.protocol.messages import FormGroup

__all__ = ["DIRECT_TIMEOUT_S", "FORM_TIMEOUT_S", "Formation", "machines_for", "side_by_side"]

#: For all members to meet; they are connected, and spreading a large model comes after.
FORM_TIMEOUT_S = 120.0
#: The same on the direct path: the members have just been reached there.
DIRECT_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Formation:
    """One attempt to form a group.

    Attributes:
        run_id: of the run.
        generation: of the group.
        name: prefix of everything that belongs to it.
        members: ranks in the cluster, in order of their rank in the group.
        route: the way between them.
        machines: number of every member's machine where NCCL serves inside; else ().
    """

    run_id: str
    generation: int
    name: str
    members: Sequence[int]
    route: Route
    machines: tuple[int, ...] = ()

    def orders(
        self, roster: Mapping[int, Member], example: Any
    ) -> Iterator[tuple[int, FormGroup, Sequence[memoryview]]]:
        """Every member with its order and that one's payload.

        Args:
            roster: of all members of the cluster.
            example: inputs of some samples for the first member; None where nothing is measured.
        """
        names = tuple(roster[rank].name for rank in self.members)
        direct = self.route.path == "direct"
        seats = self.route.seats
        addresses = tuple(seats[rank].address for rank in self.members) if direct else ()
        for number, rank in enumerate(self.members):
            order = FormGroup(
                run_id=self.run_id,
                generation=self.generation,
                name=self.name,
                rank=number,
                members=names,
                backend=self.route.backend,
                timeout_s=DIRECT_TIMEOUT_S if direct else FORM_TIMEOUT_S,
                interface=seats[rank].interface if direct else "",
                addresses=addresses,
                machines=self.machines,
            )
            buffers: Sequence[memoryview] = ()
            if number == 0 and example is not None:
                tree, buffers = pack(example)
                order = msgspec.structs.replace(order, example=tree)
            yield rank, order, buffers


def side_by_side(roster: Mapping[int, Member], members: Iterable[int]) -> list[int]:
    """Order members so that those of one machine are neighbours: who talks most is laid out along neighbours."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(members):
        hosts.setdefault(roster[rank].hello.host_id, []).append(rank)
    return [rank for ranks in hosts.values() for rank in ranks]


def machines_for(
    roster: Mapping[int, Member], members: Sequence[int], mesh: Mesh, route: Route
) -> tuple[tuple[int, ...], str]:
    """Say whose GPUs use NCCL among themselves while the group goes through the hub.

    Returns:
        The number of every member's machine, and a phrase for people; () and "" where no axis stays within machines.
    """
    machines = () if route.path == "direct" else machines_of([roster[rank].hello for rank in members])
    inside = axes_inside(mesh, machines)
    if not inside:
        return (), ""
    return machines, f"; NCCL along {' and '.join(inside)}, which stays within each machine"
