"""The sessions of all seats, and what is left of those that are over: who they were and their bytes. Thread-safe.

A session holds queues, windows and meters: some 30 KB. A holder of the join code may come and go all night, so a session
that is over is not kept for its figures.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from guava_nb.link.lane import Wire
from guava_nb.link.session_events import SessionHandle
from guava_nb.protocol.messages import Channel

__all__ = ["MOST_KNOWN", "Counted", "SeatSessions"]

#: Sessions that a seat is known by, the newest: a worker that comes back names its last one, and may do so a million times.
MOST_KNOWN = 4


class Counted(Protocol):
    """What has counted bytes: a session, or all that are over."""

    @property
    def wire(self) -> Wire:
        """Bytes so far."""

    @property
    def saved(self) -> Wire:
        """Bytes that compression spared."""


class _Over:
    """The bytes of all sessions that are over."""

    def __init__(self) -> None:
        self.wire, self.saved = (Wire(dict.fromkeys(Channel, 0), dict.fromkeys(Channel, 0)) for _ in range(2))

    def take(self, session: SessionHandle) -> None:
        self.wire, self.saved = _sum(self.wire, session.wire), _sum(self.saved, session.saved)


@dataclass(slots=True)
class _Seat:
    open: SessionHandle | None = None
    counted: list[SessionHandle] = field(default_factory=list)  # not over yet, or not noted
    known: list[tuple[bytes, bytes]] = field(default_factory=list)  # id and identity of the newest, oldest first
    past_bytes: tuple[int, int] = (0, 0)


class SeatSessions:
    """Who sits where."""

    def __init__(self) -> None:
        """No seat is taken."""
        self._access = threading.Lock()
        self._seats: dict[int, _Seat] = {}
        self._ranks: dict[bytes, int] = {}
        self._over = _Over()

    def sit(self, rank: int, session: SessionHandle) -> None:
        """A session has this seat from now on."""
        with self._access:
            seat = self._seats.setdefault(rank, _Seat())
            seat.open = session
            seat.counted.append(session)
            seat.known.append((session.session_id, session.identity))
            self._ranks[session.session_id] = rank
            while len(seat.known) > MOST_KNOWN:
                oldest, _ = seat.known.pop(0)
                for earlier in [one for one in seat.counted if one.session_id == oldest]:
                    self._let_go(seat, earlier)
                self._ranks.pop(oldest, None)

    def rank_of(self, session_id: bytes) -> int | None:
        """Return whose seat a session has or had."""
        return self._ranks.get(session_id)

    def of(self, rank: int) -> SessionHandle | None:
        """Return the session of a seat that is held."""
        seat = self._seats.get(rank)
        return None if seat is None else seat.open

    def seat_before(self, session_id_hex: str, identity: bytes) -> int | None:
        """Return the seat of an earlier session, if this identity had it."""
        try:
            session_id = bytes.fromhex(session_id_hex)
        except ValueError:  # no session had it
            return None
        with self._access:
            rank = self._ranks.get(session_id)
            known = dict(self._seats[rank].known) if rank is not None else {}
            return rank if hmac.compare_digest(known.get(session_id, b""), identity) else None

    def rise(self, rank: int) -> SessionHandle | None:
        """Give up a seat; returns the session that had it, which is to be closed and then passed to `note_over`."""
        seat = self._seats.get(rank)
        if seat is None:
            return None
        session, seat.open = seat.open, None
        return session

    def note_over(self, session: SessionHandle) -> None:
        """A session is closed: keep its bytes and let go of it."""
        with self._access:
            seat = self._seats.get(self._ranks.get(session.session_id, -1))
            if seat is not None and session in seat.counted:
                self._let_go(seat, session)

    def _let_go(self, seat: _Seat, session: SessionHandle) -> None:
        seat.counted.remove(session)
        seat.past_bytes = _both_ways(seat.past_bytes, session.wire)
        self._over.take(session)

    def forget(self, rank: int) -> None:
        """This seat is not asked for any more; its bytes stay in the sum."""
        with self._access:
            seat = self._seats.pop(rank, _Seat())
            for session_id, _ in seat.known:
                self._ranks.pop(session_id, None)
            for session in seat.counted:
                self._over.take(session)

    def total_bytes(self, rank: int) -> tuple[int, int]:
        """Return what was sent to a seat and came from it, over all its sessions."""
        with self._access:
            seat = self._seats.get(rank, _Seat())
            total = seat.past_bytes
            for session in seat.counted:
                total = _both_ways(total, session.wire)
            return total

    def silent_s(self, rank: int) -> float:
        """Return for how many seconds nothing came from a member."""
        session = self.of(rank)
        return 0.0 if session is None else session.silent_s

    def is_in_outage(self, rank: int) -> bool:
        """Whether a member is away because a tunnel broke, and not by itself."""
        session = self.of(rank)
        return session is not None and session.in_outage

    def counted(self) -> list[Counted]:
        """Return all that has bytes of this cluster's seats, forgotten ones included."""
        with self._access:
            return [self._over, *(session for seat in self._seats.values() for session in seat.counted)]


def _both_ways(before: tuple[int, int], wire: Wire) -> tuple[int, int]:
    return before[0] + sum(wire.out_bytes.values()), before[1] + sum(wire.in_bytes.values())


def _sum(one: Wire, other: Wire) -> Wire:
    return Wire(_added(one.out_bytes, other.out_bytes), _added(one.in_bytes, other.in_bytes))


def _added(one: Mapping[Channel, int], other: Mapping[Channel, int]) -> dict[Channel, int]:
    return {channel: one[channel] + other[channel] for channel in Channel}
