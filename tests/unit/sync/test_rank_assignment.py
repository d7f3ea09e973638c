"""The orders by which workers become a process group."""

from __future__ import annotations

import torch

from guava_nb.cluster.group_path import Route
from guava_nb.cluster.roster import Roster
from guava_nb.data.codec import unpack
from guava_nb.protocol.messages import Hello, ProbeAddress
from guava_nb.sync.rank_assignment import DIRECT_TIMEOUT_S, FORM_TIMEOUT_S, group_orders, side_by_side


def roster(*hosts: str) -> Roster:
    made = Roster()
    for number, host in enumerate(hosts):
        hello = Hello(
            name=f"w{number}", program="spawned", versions={}, hostname=host, device="cpu", device_name="a CPU",
            device_uuid="", host_id=host,
        )  # fmt: skip
        made.join(hello)
    return made


def test_members_of_one_machine_stand_side_by_side() -> None:
    assert side_by_side(roster("a", "b", "a", "b").members, [3, 2, 1, 0]) == [0, 2, 1, 3]


def test_only_the_first_member_gets_the_example() -> None:
    members, route = roster("a", "b").members, Route("relay", "guava", "a test")
    orders = list(group_orders("run-1", 4, [1, 0], route, (), members, torch.arange(3)))
    assert [rank for rank, _, _ in orders] == [1, 0]
    (_, first, buffers), (_, second, none) = orders
    assert (first.name, first.rank, first.members) == ("run-1/4/", 0, ("w1", "w0"))
    assert first.example is not None and unpack(first.example, b"".join(buffers)).tolist() == [0, 1, 2]
    assert (second.rank, second.example, list(none)) == (1, None, [])
    assert first.timeout_s == FORM_TIMEOUT_S and first.addresses == () and first.interface == ""


def test_on_the_direct_path_each_member_gets_its_interface_and_all_addresses() -> None:
    seats = {0: ProbeAddress("eth0", "10.0.0.1", 9), 1: ProbeAddress("eth1", "10.0.0.2", 9)}
    route = Route("direct", "gloo", "a test", seats)
    orders = [order for _, order, _ in group_orders("run-1", 4, [0, 1], route, (), roster("a", "b").members, None)]
    assert [order.interface for order in orders] == ["eth0", "eth1"]
    assert all(order.addresses == ("10.0.0.1", "10.0.0.2") for order in orders)
    assert all(order.timeout_s == DIRECT_TIMEOUT_S for order in orders)
