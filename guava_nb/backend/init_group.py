"""From a session, or from a store that a program brings, to torch's default process group.

Three ways in, one object behind them. `init_group` uses the endpoint of a session that stands already (a worker of an
orchestrator). `init_method="guava://JOINCODE"` dials the hub itself. Any other store (torchrun): rank 0 listens, and
tells the others through that store where. Subgroups find the session of their default group here.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler

from guava_nb.backend.embedded_hub import EmbeddedHub, host_of
from guava_nb.backend.endpoint import Endpoint
from guava_nb.backend.group import GuavaGroup
from guava_nb.backend.rendezvous import introduce, meet
from guava_nb.backend.store import store_for
from guava_nb.errors import CollectiveError, ConfigError, GuavaError, LinkClosed
from guava_nb.link.dialler import dial
from guava_nb.link.options import LinkOptions
from guava_nb.link.session import Session
from guava_nb.link.session_events import Event, MessageArrived, SessionClosed
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Message, channel_of

__all__ = ["Dialled", "World", "dial_through", "end_group", "init_group", "member_name", "register", "rendezvous"]


@dataclass
class World:
    """The ranks of one default group, and the way to the hub.

    Attributes:
        endpoint: of the session.
        name: prefix of all its groups and keys at the hub.
        members: names of all ranks.
        close: ends what was opened for it.
        stores: kept alive here; torch holds only their C++ half.
    """

    endpoint: Endpoint
    name: str
    members: tuple[str, ...]
    close: Callable[[], None] = lambda: None
    stores: list[Store] = field(default_factory=list)


_lock = threading.Lock()
_current: World | None = None


def _set_current(world: World | None) -> World | None:
    global _current
    with _lock:
        before, _current = _current, world
    return before


def init_group(
    endpoint: Endpoint, name: str, rank: int, world_size: int, members: Sequence[str], timeout_s: float
) -> None:
    """Make torch's default process group of this process, for CPU and CUDA tensors.

    Args:
        endpoint: of the session that stands.
        name: of the group at the hub; never used before there.
        rank: of this process.
        world_size: number of ranks.
        members: the workers' names in order of rank.
        timeout_s: for every operation that says nothing else.

    Raises:
        ConfigError: a default group exists already, or the numbers do not fit.
        CollectiveError: the others did not come in time, or the groups were broken meanwhile.
    """
    if dist.is_initialized():
        raise ConfigError("this process has a default process group already: call end_group() before the next one")
    if len(members) != world_size or not 0 <= rank < world_size:
        raise ConfigError(
            f"a group of {world_size} needs a rank from 0 to {world_size - 1} and {world_size} names; given "
            f"were rank {rank} and {len(members)} names"
        )
    store = store_for(endpoint, f"{name}/")
    store.set_timeout(timedelta(seconds=timeout_s))
    _set_current(World(endpoint, name, tuple(members), stores=[store]))
    try:
        dist.init_process_group(
            "guava", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
    except BaseException:
        _set_current(None)
        raise


def end_group() -> None:
    """Destroy the default group and all its subgroups; does nothing when there is none. Never waits for other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
    world = _set_current(None)
    if world is not None:
        world.close()


# ------------------------------------------------------------------------------------------------ called by torch


def register() -> None:
    """Make `"guava"` a backend and `guava://` a rendezvous of torch.distributed; may be called again."""
    if not hasattr(dist.Backend, "GUAVA"):
        dist.Backend.register_backend("guava", _create, extended_api=True, devices=["cpu", "cuda"])
        register_rendezvous_handler("guava", rendezvous)  # type: ignore[no-untyped-call]


def _create(options: Any, backend_options: Any) -> GuavaGroup:
    """Make one group, as torch asks for it."""
    timeout_s = options.timeout.total_seconds()
    world, on_shutdown = _current, _nothing
    if world is None:
        world = _join_through(options.store, options.group_rank, options.group_size, timeout_s)
        if not dist.is_initialized():
            _set_current(world)
        on_shutdown = _closer(world)
        members = world.members
    else:
        ranks = list(options.global_ranks_in_group) or range(options.group_size)
        members = tuple(world.members[rank] for rank in ranks)
        if not dist.is_initialized():  # the default group of a world that the rendezvous or init_group made
            on_shutdown = _closer(world)
    name = f"{world.name}/{options.group_id}"
    return GuavaGroup(world.endpoint, name, options.group_rank, members, timeout_s, on_shutdown)


def _nothing() -> None:
    """Most groups own nothing but themselves."""


def _closer(world: World) -> Callable[[], None]:
    def close() -> None:
        if _current is world:
            _set_current(None)
        world.close()

    return close


# -------------------------------------------------------------------------------------------- a session of our own


class Dialled:
    """A session opened for a program that brings none.

    Args:
        code: of the hub.
        member: name of this process, for sentences on the other ranks.
        options: patience.

    Attributes:
        endpoint: for `init_group` and `store_for`.
    """

    def __init__(self, code: JoinCode, member: str, options: LinkOptions | None = None) -> None:
        self._session: Session | None = None
        self.endpoint = Endpoint(self._send, member)
        self._session = dial(code, self._on_event, options)

    def _send(self, message: Message, buffers: Sequence[memoryview]) -> None:
        assert self._session is not None
        with suppress(LinkClosed):  # `closed` is on the way and fails what is pending
            self._session.send(message, channel_of(message), buffers)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, MessageArrived):
            if not self.endpoint.post(event.message, event.payload, event.done):
                event.done()
        elif isinstance(event, SessionClosed):
            self.endpoint.closed(event.cause)

    def close(self, reason: str = "the process group was destroyed") -> None:
        """Say goodbye, with a reason that the other ranks are told if their group still stands."""
        if self._session is not None:
            self._session.close(reason)


def rendezvous(url: str, timeout: timedelta | None = None, **options: Any) -> Any:
    """`init_method="guava://JOINCODE"`: dial the hub and meet the other ranks in its store.

    `?job=NAME` keeps programs apart that use one hub at the same time.

    Raises:
        ConfigError: the join code, rank or world size is missing or damaged.
        GuavaError: the hub cannot be reached, or the others do not come in time.
    """
    code_text, query = _split_url(url)
    try:
        rank, world_size = int(query["rank"]), int(query["world_size"])
    except (KeyError, ValueError) as problem:
        raise ConfigError(
            "guava:// needs a rank and a world size: pass rank= and world_size= to init_process_group"
        ) from problem
    timeout_s = (timeout or timedelta(seconds=300)).total_seconds()
    dialled = Dialled(JoinCode.decode(code_text), member_name(rank))
    try:
        meeting = meet(dialled.endpoint, query.get("job", "program"), rank, world_size, timeout_s)
        store = store_for(dialled.endpoint, f"{meeting.name}/")
        store.set_timeout(timedelta(seconds=timeout_s))
    except BaseException:
        dialled.close()
        raise
    world = World(dialled.endpoint, meeting.name, meeting.members, _once(dialled.close), [store])
    _set_current(world)
    yield store, rank, world_size


def _split_url(url: str) -> tuple[str, dict[str, str]]:
    from urllib.parse import parse_qsl

    rest, _, query = url.removeprefix("guava://").partition("?")
    return rest.strip("/"), dict(parse_qsl(query))


def member_name(rank: int) -> str:
    """Name this process for the other ranks."""
    import socket

    return f"{socket.gethostname()}:{rank}"


def dial_through(store: Store, rank: int, timeout_s: float, dialled_as: str) -> tuple[Dialled, Callable[[], None]]:
    """Rank 0 listens and tells the others through a store of theirs; everyone dials.

    Args:
        store: that all ranks have.
        rank: of this process.
        timeout_s: the longest that rank 0 stays for the others when it is done.
        dialled_as: this process's name for the others.

    Returns:
        The session, and what ends it (and the hub, on rank 0).
    """
    hub: EmbeddedHub | None = None
    if rank == 0:
        hub = EmbeddedHub(host_of(store))
        store.set("guava/code", hub.code.encode())
    try:
        code = JoinCode.decode(bytes(store.get("guava/code")).decode())
        dialled = Dialled(hub.local_code if hub is not None else code, dialled_as)
    except BaseException:
        if hub is not None:
            hub.close()
        raise

    def close() -> None:
        dialled.close()
        if hub is not None:
            hub.close_when_left(min(timeout_s, _LINGER_S))

    return dialled, close


def _join_through(store: Store, rank: int, size: int, timeout_s: float) -> World:
    dialled, close = dial_through(store, rank, timeout_s, member_name(rank))
    try:
        meeting = introduce(dialled.endpoint, "world", rank, size, timeout_s)
    except BaseException:
        close()
        raise
    if rank == 0:  # everyone has dialled: the next group made through this store must not find an old code
        store.delete_key("guava/code")
    return World(dialled.endpoint, "world", meeting.members, _once(close))


_LINGER_S = 30.0  # how long rank 0 stays for the others once it is done


def _once(close: Callable[[], None]) -> Callable[[], None]:
    """Close once, and at the latest when the process ends."""
    state = {"closed": False}

    def close_once() -> None:
        if not state["closed"]:
            state["closed"] = True
            with suppress(GuavaError, CollectiveError):
                close()
            atexit.unregister(close_once)

    atexit.register(close_once)
    return close_once
