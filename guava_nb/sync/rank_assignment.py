"""The orders by which workers become a process group: which of them is which rank, on which way. Sends nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from guava_nb.cluster.group_path import Route, machines_of
from guava_nb.cluster.roster import Member
from guava_nb.config.mesh import Mesh
from guava_nb.data.codec import pack
from guava_nb.parallel.mesh import axes_inside
from guava_nb.protocol.messages import FormGroup

__all__ = ["DIRECT_TIMEOUT_S", "FORM_TIMEOUT_S", "group_name", "group_orders", "machines_for", "side_by_side"]

#: For all members to meet; they are connected, and spreading a large model comes after.
FORM_TIMEOUT_S = 120.0
#: The same on the direct path: the members have just been reached there.
DIRECT_TIMEOUT_S = 20.0


def group_name(run_id: str, generation: int) -> str:
    """Return the prefix of everything that belongs to a group; it is new for every generation."""
    return f"{run_id}/{generation}/"


def group_orders(
    run_id: str, generation: int, members: Sequence[int], route: Route, machines: tuple[int, ...],
    roster: Mapping[int, Member], example: Any,
) -> Iterator[tuple[int, FormGroup, Sequence[memoryview]]]:  # fmt: skip
    """Make the orders by which the members form a group.

    Args:
        run_id: of the run.
        generation: of the group.
        members: ranks in the cluster, in order of their rank in the group.
        route: the way between them.
        machines: number of every member's machine where NCCL serves inside; else ().
        roster: all members of the cluster.
        example: inputs of some samples for the first member; None where nothing is measured.

    Yields:
        Each member with its order and the order's payload.
    """
    names = tuple(roster[rank].name for rank in members)
    direct, seats = route.path == "direct", route.seats
    for number, rank in enumerate(members):
        tree, buffers = (None, []) if number or example is None else pack(example)
        order = FormGroup(
            run_id=run_id, generation=generation, name=group_name(run_id, generation), rank=number, members=names,
            backend=route.backend,
            timeout_s=DIRECT_TIMEOUT_S if direct else FORM_TIMEOUT_S,
            interface=seats[rank].interface if direct else "",
            addresses=tuple(seats[member].address for member in members) if direct else (),
            example=tree,
            machines=machines,
        )  # fmt: skip
        yield rank, order, buffers


def side_by_side(roster: Mapping[int, Member], members: Iterable[int]) -> list[int]:
    """Order members so that those of one machine are neighbours: ranks that exchange most lie side by side."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(members):
        hosts.setdefault(roster[rank].hello.host_id, []).append(rank)
    return [rank for ranks in hosts.values() for rank in ranks]


def machines_for(
    roster: Mapping[int, Member], members: Sequence[int], mesh: Mesh, route: Route
) -> tuple[tuple[int, ...], str]:
    """Say whose GPUs use NCCL among themselves while the group goes through the hub.

    Args:
        roster: members by rank.
        members: in the order of the group's ranks.
        mesh: of the group.
        route: on which it meets.

    Returns:
        The number of every member's machine, and a phrase for people; () and "" where no axis stays within machines.
    """
    machines = () if route.path == "direct" else machines_of([roster[rank].hello for rank in members])
    inside = axes_inside(mesh, machines)
    if not inside:
        return (), ""
    return machines, f"; NCCL along {' and '.join(inside)}, which stays within each machine"
