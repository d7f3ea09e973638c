"""Collectives and the store at a hub: takes session events, sums, sends on.

The thin shell around `RelayGroup` and `StoreTable`. Everything happens in the reader thread that brings a message: a
hand-over to another thread would cost a small collective more than its arithmetic. Sums are made outside of any lock, so
that two readers add two chunks at the same time. A message is acknowledged as soon as it is taken in: credit that waited
for other ranks would let two groups that use the same sessions in different order wait for each other for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil

from guava_nb.errors import GuavaError, LinkClosed
from guava_nb.hub.relay_group import Action, Deliver, Reduce, RelayGroup
from guava_nb.hub.store import MOST_KEYS, Answers, StoreTable
from guava_nb.hub.typed_reduce import reduce_bytes
from guava_nb.link.session_events import Event, MessageArrived, SessionClosed, SessionHandle
from guava_nb.protocol.messages import (
    Expire,
    GroupEnded,
    LeaveGroup,
    Message,
    OpenGroup,
    Parcel,
    Piece,
    StoreAsk,
    StoreReply,
    channel_of,
)

__all__ = ["GroupFigures", "Relay"]

logger = logging.getLogger(__name__)

#: Most ranks of a group, as `num_workers` allows; most groups of a hub; characters of a group's name and of a member's.
MOST_RANKS, MOST_GROUPS, MOST_CHARS = 4096, 20_000, 500
#: Whether too much waits is looked at when what a rank has waiting in a group grew by so much: small pieces pay nothing for it.
_LOOK_BYTES = 64 << 10
#: What torch calls the default group of a process, behind the prefix that all its groups share.
_DEFAULT = "/0"


@dataclass
class GroupFigures:
    """Payload bytes of a group at the hub, headers left out.

    Attributes:
        in_bytes: that came from its members.
        out_bytes: that went to its members.
    """

    in_bytes: int = 0
    out_bytes: int = 0


class _Seat:
    """A group with what the shell adds: a lock, the sessions of its ranks, figures."""

    def __init__(self, group: RelayGroup) -> None:
        self.group = group
        self.lock = threading.Lock()  # actions that keep their order are carried out under it
        self.sessions: dict[int, SessionHandle] = {}
        self.ranks: dict[bytes, int] = {}
        self.figures = GroupFigures()

    def hindrance(self, session: SessionHandle, message: OpenGroup) -> str:
        """Say why a session may not become this rank: another one is, or it is another rank; "" where it may."""
        holder, own = self.sessions.get(message.rank), self.ranks.get(session.session_id, message.rank)
        if holder is not None and holder.session_id != session.session_id:
            return f"another session holds it ({self.group.members[message.rank]})"
        if own != message.rank:
            return f"this session holds rank {own}"
        return "" if message.size == self.group.size else f"it was opened with {self.group.size} ranks"


class _Assigned:
    """Who may open the groups whose names begin with a prefix: sessions, with their ranks among all `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks: dict[bytes, int] = {}

    def hindrance(self, rest: str, session_id: bytes, message: OpenGroup) -> str:
        """Say why a session may not open the group that is called `rest` behind the prefix; "" where it may."""
        own = self.ranks.get(session_id)
        if own is None:
            return "its ranks were assigned to other sessions"
        if rest == _DEFAULT and (message.rank, message.size) != (own, self.size):
            return f"this session was assigned rank {own} of {self.size}"
        return "" if message.size <= self.size else f"it has {self.size} ranks"


def _end_session(session: SessionHandle, violation: str) -> None:
    session.end(LinkClosed(f"it sent {violation}"), False, f"this session sent {violation}")


class Relay:
    """The collectives and keys of all sessions of one hub. Feed it session events; it needs nothing else.

    Args:
        most_waiting_bytes: that one session may have here in all its groups, waiting for other ranks. None: half of this
            machine's memory. An honest rank waits with whole gradients, whose size only its program knows; what two ranks
            send has to find room here in any case.
        on_violation: ends a session that sent more, with words for what it sent.
    """

    def __init__(
        self,
        most_waiting_bytes: int | None = None,
        on_violation: Callable[[SessionHandle, str], None] = _end_session,
    ) -> None:
        self._most_waiting_bytes = most_waiting_bytes or psutil.virtual_memory().total // 2
        self._on_violation = on_violation
        self._lock = threading.Lock()  # taken after no other lock
        self._assigned: dict[str, _Assigned] = {}  # by prefix of the names
        self._seats: dict[str, _Seat] = {}
        self._store = StoreTable()
        self._clients: dict[bytes, SessionHandle] = {}
        self._handlers: dict[type[Message], Callable[[MessageArrived], None]] = {
            Piece: self._on_piece,
            Parcel: self._on_parcel,
            StoreAsk: self._on_ask,
            OpenGroup: self._on_open,
            LeaveGroup: self._on_leave,
            Expire: self._on_expire,
        }

    # ------------------------------------------------------------------------------------------- called by its owner

    def on_event(self, event: Event) -> bool:
        """Take a session's event, in the thread that brings it.

        Returns:
            True when it was a message for the relay; it is done with then. False for all else, also for a
            `SessionClosed` that broke groups: the owner wants to know of that, too.
        """
        if isinstance(event, MessageArrived):
            handler = self._handlers.get(type(event.message))
            if handler is None:
                return False
            try:
                handler(event)
            except GuavaError as problem:
                logger.warning("%s from %s: %s", type(event.message).__name__, event.session.peer_address, problem)
            finally:
                event.done()
            return True
        if isinstance(event, SessionClosed):
            self._on_closed(event)
        return False

    def assign(self, prefix: str, session_id: bytes, rank: int, size: int) -> None:
        """From now on only sessions that were assigned a rank open groups whose names begin with `prefix`.

        The default group among them takes each session as its own rank only. What others opened or set there before is
        dropped, and their waits for its keys are refused.
        """
        with self._lock:
            if is_new := prefix not in self._assigned:
                self._assigned[prefix] = _Assigned(size)
            ranks = self._assigned[prefix].ranks
            ranks[session_id] = rank
            replies = self._store.refuse(prefix, ranks, _foreign(prefix)) if is_new else []
            refused = self._to_sessions(replies)
        _reply(refused)
        if is_new:
            self._drop(prefix, "its name belongs to a group of the orchestrator")

    def break_group(self, prefix: str, reason: str) -> None:
        """Every group whose name starts with `prefix`: what is pending and what comes fails on all with `reason`."""
        for seat in self._with_prefix(prefix):
            self._act(seat, lambda group: group.end(reason))

    def forget(self, prefix: str) -> None:
        """A generation is over: forget its groups and keys; what still comes for them is dropped."""
        with self._lock:
            for over in [one for one in self._assigned if one.startswith(prefix)]:
                del self._assigned[over]
        self._drop(prefix, "this group is over: a newer one took its place")

    def _drop(self, prefix: str, reason: str) -> None:
        self.break_group(prefix, reason)
        with self._lock:
            for name in [name for name in self._seats if name.startswith(prefix)]:
                del self._seats[name]
            self._store.forget(prefix)

    def figures(self, prefix: str = "") -> dict[str, GroupFigures]:
        """Payload bytes so far, per group that is not forgotten."""
        return {seat.group.name: seat.figures for seat in self._with_prefix(prefix)}

    @property
    def sessions(self) -> int:
        """How many sessions are members of a group that they have not left."""
        with self._lock:
            seats = list(self._seats.values())
        return len({session for seat in seats for session in list(seat.ranks)})

    # ------------------------------------------------------------------------------------------------------- messages

    def _on_piece(self, event: MessageArrived) -> None:
        message, payload = event.message, memoryview(event.payload)
        assert isinstance(message, Piece)
        seat, rank = self._seat_of(event, message.group)
        if seat is None:
            return
        seat.figures.in_bytes += len(payload)
        for action in self._take(event.session, seat, rank, lambda group: group.piece(rank, message, payload)):
            if type(action) is Reduce:
                self._reduce(seat, action)

    def _on_parcel(self, event: MessageArrived) -> None:
        message, payload = event.message, memoryview(event.payload)
        assert isinstance(message, Parcel)
        seat, rank = self._seat_of(event, message.group)
        if seat is not None:
            seat.figures.in_bytes += len(payload)
            self._take(event.session, seat, rank, lambda group: group.parcel(rank, message, payload))

    def _on_expire(self, event: MessageArrived) -> None:
        message = event.message
        assert isinstance(message, Expire)
        seat, rank = self._seat_of(event, message.group)
        if seat is not None:
            self._act(seat, lambda group: group.expire(rank, message))

    def _on_open(self, event: MessageArrived) -> None:
        message = event.message
        assert isinstance(message, OpenGroup)
        with self._lock:
            problem = self._refusal(message, event.session.session_id)
            is_kin = self._is_kin(message.group, event.session.session_id)
            seat = self._seats.get(message.group)
            if not problem and seat is None:
                seat = self._seats[message.group] = _Seat(RelayGroup(message.group, message.size))
        if problem or seat is None:
            self._refuse(event.session, message, problem)
            return
        with seat.lock:
            problem = seat.hindrance(event.session, message)
            if problem and is_kin and message.size != seat.group.size:
                who = f"{message.member} says it is rank {message.rank} of {message.size}"
                self._deliver(seat, seat.group.end(f"{who} in group {message.group!r}, but {problem}"))
            elif not problem:
                seat.sessions[message.rank] = event.session
                seat.ranks[event.session.session_id] = message.rank
                self._deliver(seat, seat.group.open(message))
        if problem:
            self._refuse(event.session, message, problem)
        elif (parent := self._parent(message.group)) is not None:
            self._look_at_subgroup(parent, seat)

    def _is_kin(self, group: str, session_id: bytes) -> bool:
        """Whether a session has a rank among those whose subgroup this is: then its program is wrong, and all are told."""
        assigned = any(group.startswith(prefix) and session_id in one.ranks for prefix, one in self._assigned.items())
        parent = self._parent(group)
        return assigned or (parent is not None and session_id in parent.ranks)

    def _parent(self, group: str) -> _Seat | None:
        """The default group of the program to which a subgroup belongs."""
        prefix = group
        while prefix := prefix.rpartition("/")[0]:
            seat = self._seats.get(prefix + _DEFAULT)
            if seat is not None and seat.group.name != group:
                return seat
        return None

    def _look_at_subgroups(self, parent: _Seat) -> None:
        """A rank of a program is lost, or has destroyed its default group: see to its subgroups."""
        if parent.group.name.endswith(_DEFAULT):
            for seat in self._with_prefix(parent.group.name.removesuffix(_DEFAULT) + "/"):
                if seat is not parent:
                    self._look_at_subgroup(parent, seat)

    def _look_at_subgroup(self, parent: _Seat, seat: _Seat) -> None:
        """Break a subgroup that a rank has yet to open, where none can: making one is a call of all ranks of the program.

        Which ranks belong to it only they know. One that all have opened stands for as long as its own ranks do.
        """
        whole, part = parent.group, seat.group
        gone = [rank for rank in range(whole.size) if whole.has_left(rank)]
        if not part.missing or not gone:
            return
        there = [rank for rank in range(whole.size) if rank not in gone]
        able = sum(rank not in parent.sessions or parent.sessions[rank].session_id not in seat.ranks for rank in there)
        reason = whole.broken or (
            f"{whole.who(gone)} destroyed the default group before" if able < part.missing else ""
        )
        if reason:
            self._act(seat, lambda group: group.end(f"not all ranks have opened it, and {reason}"))

    def _refuse(self, session: SessionHandle, message: OpenGroup, problem: str) -> None:
        """The one who asks is told, and the group goes on."""
        what = f"rank {message.rank} of {message.size} of group {message.group[:MOST_CHARS]!r} cannot be opened here"
        logger.warning("%s by %s: %s", what, session.peer_address, problem)
        _send(session, GroupEnded(message.group, f"{what}: {problem}"))

    def _refusal(self, message: OpenGroup, session_id: bytes) -> str:
        """Say why a group may not be opened, "" where it may: its size is a peer's word, and what is kept grows with that."""
        if not 0 < message.size <= MOST_RANKS or not 0 <= message.rank < message.size:
            return f"1 to {MOST_RANKS} ranks may be in one, counted from 0"
        if len(message.group) > MOST_CHARS or len(message.member) > MOST_CHARS:
            return f"a name may have {MOST_CHARS} characters"
        if message.group not in self._seats and len(self._seats) >= MOST_GROUPS:
            self._prune()
        if message.group not in self._seats and len(self._seats) >= MOST_GROUPS:
            return f"{MOST_GROUPS} groups may stand"
        found = ((prefix, one) for prefix, one in self._assigned.items() if message.group.startswith(prefix))
        problems = (one.hindrance(message.group.removeprefix(prefix), session_id, message) for prefix, one in found)
        return next(filter(None, problems), "")

    def _on_leave(self, event: MessageArrived) -> None:
        message = event.message
        assert isinstance(message, LeaveGroup)
        seat, rank = self._seat_of(event, message.group)
        if seat is not None:
            self._part(seat, event.session, lambda group: group.leave(rank))
            self._look_at_subgroups(seat)

    def _on_ask(self, event: MessageArrived) -> None:
        message, session = event.message, event.session
        assert isinstance(message, StoreAsk)
        with self._lock:
            self._clients[session.session_id] = session
            if problem := self._foreign_key(session.session_id, message):
                replies = [(session.session_id, StoreReply(message.request_id, problem=problem))]
            else:
                replies = self._store.ask(session.session_id, message)
            answers = self._to_sessions(replies)
        _reply(answers)

    def _to_sessions(self, replies: Answers) -> list[tuple[SessionHandle, StoreReply]]:
        """With the lock: whom each answer is for, less those that are gone."""
        return [(self._clients[client], reply) for client, reply in replies if client in self._clients]

    def _foreign_key(self, session_id: bytes, ask: StoreAsk) -> str:
        """Say which group of the orchestrator an ask is about that the session is in no rank of; "" where there is none."""
        if len(ask.keys) > MOST_KEYS:
            return ""  # the store refuses it unread
        of_prefixes = ask.op in ("forget", "num_keys", "list_keys")
        for prefix, one in self._assigned.items():
            if session_id not in one.ranks and any(
                key.startswith(prefix) or (of_prefixes and prefix.startswith(key)) for key in ask.keys
            ):
                return _foreign(prefix)
        return ""

    def _on_closed(self, event: SessionClosed) -> None:
        session = event.session
        with self._lock:
            self._clients.pop(session.session_id, None)
            self._store.lost(session.session_id)
        self._lose(session, str(event.cause))

    def _lose(self, session: SessionHandle, cause: str) -> None:
        for seat in self._with_prefix(""):
            rank = seat.ranks.get(session.session_id)
            if rank is not None and seat.sessions.get(rank) is session:
                self._part(seat, session, lambda group, rank=rank: group.lose(rank, cause))  # type: ignore[misc]
                self._look_at_subgroups(seat)

    def _take(
        self, session: SessionHandle, seat: _Seat, rank: int, what: Callable[[RelayGroup], list[Action]]
    ) -> list[Action]:
        """Let a group take what a session sent, and look whether too much of it waits; returns what is left to be done."""
        with seat.lock:
            before = seat.group.held[rank]
            actions = what(seat.group)
            self._deliver(seat, actions)
            after = seat.group.held[rank]
        if after // _LOOK_BYTES > before // _LOOK_BYTES:
            self._check_waiting(session)
        return actions

    def _check_waiting(self, session: SessionHandle) -> None:
        """End a session that sent more to ranks which are not there, or do not send theirs, than a hub keeps for it."""
        with self._lock:
            seats = [(seat.group, seat.ranks.get(session.session_id)) for seat in self._seats.values()]
        waiting = sum(group.held_by(rank) for group, rank in seats if rank is not None)
        if waiting > self._most_waiting_bytes:
            violation = (
                f"{waiting >> 20} MiB that wait for other ranks; the hub keeps {self._most_waiting_bytes >> 20} MiB"
            )
            self._lose(session, f"it sent {violation}")
            self._on_violation(session, violation)

    # -------------------------------------------------------------------------------------------------------- internal

    def _seat_of(self, event: MessageArrived, name: str) -> tuple[_Seat | None, int]:
        seat = self._seats.get(name)
        if seat is None:
            return None, -1  # of a generation that is over
        rank = seat.ranks.get(event.session.session_id)
        return (None, -1) if rank is None else (seat, rank)

    def _part(self, seat: _Seat, session: SessionHandle, farewell: Callable[[RelayGroup], list[Action]]) -> None:
        """A member goes, in any way; the last one takes the group with it."""
        with seat.lock:
            rank = seat.ranks.pop(session.session_id)
            seat.sessions.pop(rank, None)
            self._deliver(seat, farewell(seat.group))
            over = seat.group.over
        with self._lock:
            if over and not seat.ranks and self._seats.get(seat.group.name) is seat:
                del self._seats[seat.group.name]
            if not seat.ranks and seat.group.held_bytes:
                self._prune()

    def _prune(self) -> None:
        """Forget the oldest groups that no session is in, where all of them keep too much, or there are too many groups."""
        empty = [seat for seat in self._seats.values() if not seat.ranks]
        waiting = sum(seat.group.held_bytes for seat in empty)
        for seat in empty:
            if waiting <= self._most_waiting_bytes and len(self._seats) < MOST_GROUPS:
                return
            waiting -= seat.group.held_bytes
            del self._seats[seat.group.name]

    def _act(self, seat: _Seat, what: Callable[[RelayGroup], list[Action]]) -> None:
        with seat.lock:
            self._deliver(seat, what(seat.group))

    def _deliver(self, seat: _Seat, actions: Iterable[Action]) -> None:
        for action in actions:
            if type(action) is Deliver:
                self._send_to(seat, action.rank, action.message, action.payload)

    def _reduce(self, seat: _Seat, action: Reduce) -> None:
        try:
            result = reduce_bytes(action.message.reduce, action.message.tensor.dtype, action.parts)
        except GuavaError as problem:
            reason = f"operation {action.message.sequence}: {problem}"
            self._act(seat, lambda group: group.fail(action.message.sequence, reason))
            return
        for rank in action.ranks:
            self._send_to(seat, rank, action.message, result)

    def _send_to(self, seat: _Seat, rank: int, message: Message, payload: memoryview | None) -> None:
        session = seat.sessions.get(rank)
        if session is not None:
            seat.figures.out_bytes += len(payload) if payload is not None else 0
            _send(session, message, payload)

    def _with_prefix(self, prefix: str) -> list[_Seat]:
        with self._lock:
            return [seat for name, seat in self._seats.items() if name.startswith(prefix)]


def _foreign(prefix: str) -> str:
    return f"keys that begin with {prefix!r} are for the ranks of that group, and this session has none"


def _reply(answers: Iterable[tuple[SessionHandle, StoreReply]]) -> None:
    for session, reply in answers:
        _send(session, reply)


def _send(session: SessionHandle, message: Message, payload: memoryview | None = None) -> None:
    try:
        session.send(message, channel_of(message), () if payload is None else (payload,))
    except LinkClosed:
        return  # its `SessionClosed` is on the way and breaks its groups
