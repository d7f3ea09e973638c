"""How the ranks of a program find each other at a hub: by a job's name, in the hub's store.

Rank 0 draws a name that no earlier run has used; the others learn it from the store. Until all ranks are there, what is
written is lent: it goes with the session of the rank that wrote it, so a rank that was started again finds its place free.
Then the run is marked as met, and takes no more ranks: one that is done with it comes again while rank 0 may still be in it,
and must wait for the next run. The cards stay from then on, for ranks that read them after others have left.
"""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec

from guava_nb.backend.endpoint import Endpoint
from guava_nb.errors import CollectiveTimeout, ConfigError

__all__ = ["Rendezvous", "check_place", "introduce", "meet"]

_PREDECESSOR_S = 12.0  # a rank that was killed holds its place until the hub knows that it is gone
_POLL_S = 0.2


class _Card(msgspec.Struct, frozen=True):
    """What a rank says of itself.

    Attributes:
        member: its name in sentences.
        box: the same for processes that see the same devices.
        world_size: how many ranks it expects.
        token: drawn by it; two processes that claim one place differ in it.
        group: name of the run, drawn by rank 0.
    """

    member: str
    box: str
    world_size: int
    token: str
    group: str = ""


@dataclass(frozen=True)
class Rendezvous:
    """Ranks that have found each other.

    Attributes:
        name: prefix of their groups and keys; never used before at this hub.
        rank: of this process.
        members: names of all ranks, in order.
        boxes: for each rank, what it shares with ranks that see the same devices.
    """

    name: str
    rank: int
    members: tuple[str, ...]
    boxes: tuple[str, ...]

    @property
    def local_rank(self) -> int:
        """How many earlier ranks see the same devices."""
        return self.boxes[: self.rank].count(self.boxes[self.rank])

    @property
    def local_size(self) -> int:
        """How many ranks see the same devices."""
        return self.boxes.count(self.boxes[self.rank])


def check_place(rank: int, world_size: int) -> None:
    """Refuse numbers that are no place in a group.

    Raises:
        ConfigError: there is no such rank.
    """
    if world_size < 1:
        raise ConfigError(f"the world size is {world_size}; it is the number of processes, 1 or more")
    if not 0 <= rank < world_size:
        raise ConfigError(f"there is no rank {rank} among {world_size} processes; ranks go from 0 to {world_size - 1}")


def meet(endpoint: Endpoint, job: str, rank: int, world_size: int, timeout_s: float) -> Rendezvous:
    """Wait until all ranks of a job are at the hub.

    Args:
        endpoint: of the session.
        job: keeps programs apart that use one hub at the same time.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: for all of it.

    Raises:
        ConfigError: the place is taken, or the ranks do not agree on their number.
        CollectiveTimeout: some ranks did not come in time; it names them.
    """
    check_place(rank, world_size)
    until = time.monotonic() + timeout_s
    if rank == 0:
        mine = _card(endpoint.member, world_size, f"{job}/{secrets.token_hex(6)}")
        _claim(endpoint, f"rendezvous/{job}", mine, f"rank 0 of job {job!r}")
        return introduce(endpoint, mine.group, rank, world_size, timeout_s)
    first = _next_run(endpoint, job, rank, world_size, timeout_s)
    if first.world_size != world_size:
        mine = _card(endpoint.member, world_size)
        # Rank 0 may look only when this session is over: what is set, not claimed, stays.
        endpoint.ask("set", [f"{first.group}/member/{rank}"], [msgspec.json.encode(mine)])
        _check_sizes(rank, mine, [first])
    left_s = max(0.0, until - time.monotonic())
    return introduce(endpoint, first.group, rank, world_size, left_s, timeout_s)


def _next_run(endpoint: Endpoint, job: str, rank: int, world_size: int, timeout_s: float) -> _Card:
    """Wait for a run of the job whose ranks have not met yet; returns the card of its rank 0.

    Raises:
        ConfigError: another process is this rank in the run that stands.
        CollectiveTimeout: rank 0 did not come in time, or is still in the earlier run.
    """
    began, pause, left_s = time.monotonic(), threading.Event(), timeout_s
    while True:
        try:
            first = _read(endpoint.ask("get", [f"rendezvous/{job}"], timeout_s=left_s).values[0])
        except CollectiveTimeout as late:
            raise CollectiveTimeout(_missing_text([0], world_size, timeout_s)) from late
        if not endpoint.ask("check", [f"{first.group}/met"]).number:
            return first
        is_here = endpoint.ask("check", [f"{first.group}/here/{rank}"]).number
        if is_here and time.monotonic() >= began + _PREDECESSOR_S:
            card = endpoint.ask("get", [f"{first.group}/member/{rank}"]).values[0]
            raise _taken(f"rank {rank} of job {job!r}", _read(card).member)
        left_s = began + timeout_s - time.monotonic()
        if left_s <= _POLL_S:
            raise CollectiveTimeout(
                f"rank 0 of job {job!r} ({first.member}) was still in an earlier run after {timeout_s:g} s: end its program, "
                "or give this one a job name of its own"
            )
        pause.wait(_POLL_S)


def introduce(
    endpoint: Endpoint, name: str, rank: int, world_size: int, timeout_s: float, waited_s: float | None = None
) -> Rendezvous:
    """Tell the others who this rank is, and wait until all have done so.

    Args:
        name: of the run, known to all ranks.
        waited_s: what an error calls the time-out, where a part of it is over already.

    Raises:
        ConfigError, CollectiveTimeout: as `meet`.
    """
    mine = _card(endpoint.member, world_size)
    _claim(endpoint, f"{name}/member/{rank}", mine, f"rank {rank} of {world_size}")
    keys = [f"{name}/member/{other}" for other in range(world_size)]
    try:
        cards = [_read(value) for value in endpoint.ask("multi_get", keys, timeout_s=timeout_s).values]
    except CollectiveTimeout as late:
        here = {key.decode() for key in endpoint.ask("list_keys", [f"{name}/member/"]).values}
        missing = [other for other, key in enumerate(keys) if key not in here]
        raise CollectiveTimeout(_missing_text(missing, world_size, waited_s or timeout_s)) from late
    _check_sizes(rank, mine, cards)
    endpoint.ask("lend", [f"{name}/here/{rank}"], [b""])
    endpoint.ask("multi_set", [f"{name}/member/{rank}", f"{name}/met"], [msgspec.json.encode(mine), b""])
    return Rendezvous(name, rank, tuple(card.member for card in cards), tuple(card.box for card in cards))


def _check_sizes(rank: int, mine: _Card, cards: list[_Card]) -> None:
    for other, card in enumerate(cards):
        if card.world_size != mine.world_size:
            raise ConfigError(
                f"rank {other} ({card.member}) was started as one of {card.world_size} processes and rank {rank} "
                f"({mine.member}) as one of {mine.world_size}: give all the same world size"
            )


def _missing_text(missing: list[int], world_size: int, timeout_s: float) -> str:
    who = ", ".join(f"rank {rank}" for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
    return (
        f"{who or 'a rank'} of {world_size} did not come within {timeout_s:g} s: start the program there too, with the "
        "same join code and world size"
    )


def _claim(endpoint: Endpoint, key: str, mine: _Card, what: str) -> None:
    """Take a place, waiting a little for a predecessor that is dead and not yet known to be."""
    value, until, pause = msgspec.json.encode(mine), time.monotonic() + _PREDECESSOR_S, threading.Event()
    while True:
        holder = _read(endpoint.ask("claim", [key], [value]).values[0])
        if holder.token == mine.token:
            return
        if time.monotonic() >= until:
            raise _taken(what, holder.member)
        pause.wait(_POLL_S)


def _taken(what: str, holder: str) -> ConfigError:
    return ConfigError(
        f"{what} is taken by {holder}: give each process a rank of its own, and each program that uses the hub at the same "
        "time a job name of its own"
    )


def _card(member: str, world_size: int, group: str = "") -> _Card:
    return _Card(member, _box(), world_size, secrets.token_hex(8), group)


def _read(value: bytes) -> _Card:
    return msgspec.json.decode(value, type=_Card)


def _box() -> str:
    """The same in two processes that number the same devices the same way, and else not."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text(encoding="utf-8").strip() if boot.exists() else f"{uuid.getnode():x}"
    return f"{platform.node()} {machine} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
