"""Which way a group goes, decided from what a probe found."""

from __future__ import annotations

import msgspec
import pytest

from guava_nb.cluster.group_path import decide, machines_of, unlike_devices
from guava_nb.protocol.messages import Hello, ProbeAddress, ProbeAnswer, ProbeListening, ProbeReport

NAMES = {0: "w1", 1: "w2"}


def hello(device: str, uuid: str = "") -> Hello:
    return Hello(
        name="w",
        program="spawned",
        versions={},
        hostname="host",
        device=device,
        device_name="",
        device_uuid=uuid,
    )


def probe(*addresses: str, problems: dict[tuple[int, int, str], str] | None = None):
    """All members listen on these addresses and reach each other, but for these problems of (from, to, address)."""
    listening = {
        rank: ProbeListening(1, tuple(ProbeAddress(f"if{k}", address, 1) for k, address in enumerate(addresses)))
        for rank in NAMES
    }
    reports = {
        rank: ProbeReport(
            1,
            tuple(
                ProbeAnswer(1 - rank, address, (problems or {}).get((rank, 1 - rank, address), ""))
                for address in addresses
            ),
        )
        for rank in NAMES
    }
    return listening, reports


def test_the_least_open_address_that_everybody_reaches() -> None:
    found = decide(NAMES, *probe("203.0.113.7", "10.0.0.1", "127.0.0.1"), one_host=True)
    assert {seat.address for seat in found.seats.values()} == {"127.0.0.1"}
    found = decide(NAMES, *probe("203.0.113.7", "10.0.0.1"), one_host=False)
    assert ({seat.address for seat in found.seats.values()}, found.private) == ({"10.0.0.1"}, True)
    found = decide(NAMES, *probe("203.0.113.7"), one_host=False)
    assert (len(found.seats), found.private, found.where) == (2, False, "on public addresses")
    found = decide(NAMES, *probe("10.0.0.1", "fd00::1", problems={(0, 1, "10.0.0.1"): "timed out"}), one_host=False)
    assert {seat.address for seat in found.seats.values()} == {"fd00::1"}, "one family for all"


def test_the_word_of_one_host_does_not_make_public_addresses_private() -> None:
    found = decide(NAMES, *probe("203.0.113.7"), one_host=True)
    assert (len(found.seats), found.private, found.where) == (2, False, "on public addresses")
    found = decide(NAMES, *probe("203.0.113.7", "127.0.0.1"), one_host=True)
    assert (found.private, found.where) == (True, "on one host")


def test_one_direction_is_not_enough() -> None:
    found = decide(NAMES, *probe("10.0.0.2", problems={(0, 1, "10.0.0.2"): "timed out"}), one_host=False)
    assert (found.seats, found.obstacle) == ({}, "w1 cannot reach w2 at 10.0.0.2: timed out")


def test_who_does_not_answer_is_named() -> None:
    listening, reports = probe("10.0.0.2")
    del reports[1]
    assert decide(NAMES, listening, reports, one_host=False).obstacle == "w2 did not answer the probe in time"
    listening[0] = ProbeListening(1, (), "no network")
    _, reports = probe("10.0.0.2")
    assert decide(NAMES, listening, reports, one_host=False).obstacle == "w1 cannot be probed: no network"


@pytest.mark.parametrize(
    ("hellos", "said"),
    [
        ([hello("cpu"), hello("cpu")], ""),
        ([hello("cuda:0", "a"), hello("cuda:1", "b")], ""),
        ([hello("cuda:0", "a"), hello("cuda:0", "a")], "w1 and w2 share one GPU"),
        ([hello("cuda:0"), hello("cpu")], "w1 has cuda and w2 has cpu"),
        ([hello("mps"), hello("mps")], "neither gloo nor NCCL"),
    ],
)
def test_devices_that_no_library_serves_together(hellos: list[Hello], said: str) -> None:
    assert said in unlike_devices(["w1", "w2"], hellos)
    assert bool(said) == bool(unlike_devices(["w1", "w2"], hellos))


def test_machines_are_numbered_where_every_worker_has_a_gpu_of_its_own() -> None:
    def on(host: str, device: str, uuid: str) -> Hello:
        return msgspec.structs.replace(hello(device, uuid), host_id=host)

    four = [on("a", "cuda:0", "g0"), on("b", "cuda:0", "g1"), on("a", "cuda:1", "g2"), on("b", "cuda:1", "g3")]
    assert machines_of(four) == (0, 1, 0, 1)
    assert machines_of([*four, on("a", "cuda:1", "g2")]) == ()  # two workers on one GPU
    assert machines_of([*four, on("c", "cpu", "")]) == ()
    unknown = [on("", "cuda:0", "g0"), on("", "cuda:0", "g1")]
    assert machines_of(unknown) == (0, 1)  # nobody knows that they share a machine
