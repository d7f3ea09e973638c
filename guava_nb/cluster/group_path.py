"""Which way the members of a process group reach each other, decided from what a probe found. No sockets, no clocks."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from guava_nb.protocol.messages import Hello, ProbeAddress, ProbeListening, ProbeReport

__all__ = ["Finding", "Findings", "Route", "decide", "machines_of", "on_one_host", "unlike_devices"]

#: Networks that strangers are not on: RFC 1918, link-local and unique local addresses, and the machine itself.
_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in [
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",
        "127.0.0.0/8",
        "fc00::/7",
        "::1/128",
    ]
)


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a process group.

    Attributes:
        path: "relay" or "direct".
        backend: "star" (whole replicas, no process group), "guava", "gloo" or "nccl".
        reason: why, as a phrase.
        seats: on the direct path the interface and address of every member.
    """

    path: str
    backend: str
    reason: str
    seats: Mapping[int, ProbeAddress] = field(default_factory=dict)

    def record(self) -> dict[str, str]:
        """Return what a report says of it."""
        return {"path": self.path, "backend": self.backend, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a probe found: an address of each member at which all others reach it, or why there is none.

    Attributes:
        seats: address of every member; empty where the direct path is not open.
        obstacle: a phrase that names who is in the way; empty with seats.
        private: whether strangers are kept out of all these addresses.
        where: "on one host" or the kind of addresses, for people.
    """

    seats: Mapping[int, ProbeAddress]
    obstacle: str = ""
    private: bool = True
    where: str = ""


class Findings:
    """What probes found in a session, by set of members; kept until a group on it fails.

    Attributes:
        found: by set of ranks.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.found: dict[frozenset[int], Finding] = {}
        self._told: tuple[str, set[frozenset[int]]] = ("", set())

    def forget(self, ranks: Iterable[int]) -> None:
        """A group of these members failed: probe again before the next one."""
        self.found.pop(frozenset(ranks), None)

    def is_first(self, run_id: str, ranks: Iterable[int]) -> bool:
        """Whether this run asks for the first time for these members: what a run was told is forgotten with it."""
        if self._told[0] != run_id:
            self._told = (run_id, set())
        told, members = self._told[1], frozenset(ranks)
        first = members not in told
        told.add(members)
        return first


def on_one_host(hellos: Sequence[Hello]) -> bool:
    """Whether workers share one machine and its network."""
    return len({hello.host_id for hello in hellos}) == 1 and bool(hellos[0].host_id)


def machines_of(hellos: Sequence[Hello]) -> tuple[int, ...]:
    """Number the machines of workers in order of appearance; () unless NCCL can serve the GPUs of each of them."""
    places = [(hello.host_id or f"? {index}", hello.device_uuid) for index, hello in enumerate(hellos)]
    if not all(hello.device.startswith("cuda") and hello.device_uuid for hello in hellos):
        return ()
    if len(set(places)) < len(places):  # two workers share one GPU
        return ()
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host, _ in places)


def unlike_devices(names: Sequence[str], hellos: Sequence[Hello]) -> str:
    """Return why no library can serve these devices directly, or ""."""
    kinds = [hello.device.partition(":")[0] for hello in hellos]
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            return f"{names[0]} has {kinds[0]} and {name} has {kind}, and gloo or NCCL serve like devices only"
    if kinds[0] not in ("cpu", "cuda"):
        return f"{names[0]} has {kinds[0]}, which neither gloo nor NCCL serves"
    seen: dict[str, str] = {}
    for name, hello in zip(names, hellos, strict=True):
        if kinds[0] == "cuda" and hello.device_uuid:
            if hello.device_uuid in seen:
                return f"{seen[hello.device_uuid]} and {name} share one GPU, which NCCL does not serve"
            seen[hello.device_uuid] = name
    return ""


def decide(
    names: Mapping[int, str],
    listening: Mapping[int, ProbeListening],
    reports: Mapping[int, ProbeReport],
    one_host: bool,
) -> Finding:
    """Choose an address of every member at which all others reach it, all of one family; private ones first.

    Args:
        names: of all members.
        listening: where each listens, as far as it answered.
        reports: which others each reached, as far as it answered.
        one_host: whether they say that they share one machine; only names the way.
    """
    for rank, name in names.items():
        if rank not in listening or rank not in reports:
            return Finding({}, f"{name} did not answer the probe in time")
        if listening[rank].problem:
            return Finding({}, f"{name} cannot be probed: {listening[rank].problem}")
    reached = {
        (rank, answer.member, answer.address): answer.problem
        for rank, report in reports.items()
        for answer in report.answers
    }
    for version in (4, 6):
        seats = {rank: _seat(rank, version, names, listening[rank].addresses, reached) for rank in names}
        if all(seats.values()):
            chosen = {rank: seat for rank, seat in seats.items() if seat is not None}
            private = all(_private(seat.address) for seat in chosen.values())
            # A worker's word that it shares a host opens nothing: one host reaches itself over the loopback.
            where = "on public addresses" if not private else "on one host" if one_host else "on private addresses"
            return Finding(chosen, "", private, where)
    return Finding({}, _obstacle(names, listening, reached))


def _seat(
    rank: int,
    version: int,
    names: Mapping[int, str],
    addresses: Sequence[ProbeAddress],
    reached: Mapping[tuple[int, int, str], str],
) -> ProbeAddress | None:
    """The best address at which all others reach a member: loopback, private, public."""
    good = [
        where
        for where in addresses
        if ipaddress.ip_address(where.address).version == version
        and all(reached.get((other, rank, where.address), "not tried") == "" for other in names if other != rank)
    ]
    return min(good, key=lambda where: _openness(where.address), default=None)


def _obstacle(
    names: Mapping[int, str],
    listening: Mapping[int, ProbeListening],
    reached: Mapping[tuple[int, int, str], str],
) -> str:
    """Name the first pair that does not reach each other, at the address that was the most likely to work."""
    for rank, name in names.items():
        wheres = sorted(listening[rank].addresses, key=lambda where: -_openness(where.address))
        for other in names:
            problems = {where.address: reached.get((other, rank, where.address), "not tried") for where in wheres}
            if other != rank and all(problems.values()):
                tried = ", ".join(f"{address}: {problem}" for address, problem in problems.items())
                return f"{names[other]} cannot reach {name} at {tried}" if tried else f"{name} has no address to dial"
    return "no member has one address at which all the others reach it"


def _openness(address: str) -> int:
    parsed = ipaddress.ip_address(address)
    return 0 if parsed.is_loopback else 1 if _private(address) else 2


def _private(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return any(parsed.version == network.version and parsed in network for network in _PRIVATE)
