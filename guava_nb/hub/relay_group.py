"""One process group at the hub, as a pure machine: what came from which rank in, what goes to which rank out.

Knows ranks, sequences and agreement; knows nothing of sessions, locks, clocks or arithmetic. Two kinds of traffic:
pieces of reductions are collected until every rank's piece of the same place is there; everything else is passed on
as it comes. What a rank called is compared with what the others called under the same number, so that a program whose
ranks go different ways is told so instead of hanging.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Union

import msgspec

from guava_nb.protocol.messages import (
    CallSpec,
    Expire,
    GroupEnded,
    LeaveGroup,
    Message,
    OpenGroup,
    OperationFailed,
    Parcel,
    Piece,
    Taken,
)

__all__ = ["Action", "Deliver", "RelayGroup", "Reduce", "describe_call"]

#: What a message that waits takes beside its payload, and a rank's entry in a list.
_RECORD_BYTES, _ENTRY_BYTES = 500, 8
#: Numbers of failed collectives that are kept, the newest ones: a piece for an older one counts as what waits.
MOST_FAILED = 1024
ONLY_CALLED = -2  # target of a piece that carries nothing but its rank's call
EVERYONE = -1


class Deliver(NamedTuple):
    """Send a message to a rank."""

    rank: int
    message: Message
    payload: memoryview | None = None


class Reduce(NamedTuple):
    """Reduce the parts in order, then send the result, as the payload of `message`, to these ranks."""

    ranks: Sequence[int]
    message: Piece
    parts: Sequence[memoryview]


Action = Union[Deliver, Reduce]  # noqa: UP007 - an alias is evaluated at run time


@dataclass
class _Call:
    """One collective, until every rank has called it and nothing of it is awaited."""

    specs: dict[int, CallSpec] = field(default_factory=dict)
    failure: OperationFailed | None = None


@dataclass
class _Place:
    """Where the same piece of all ranks is collected."""

    parts: list[memoryview | None]
    first: int  # the rank whose part came first
    missing: int
    numel: int
    dtype: str


def describe_call(spec: CallSpec) -> str:
    """Say in words what a rank called."""
    words = spec.kind + (f" ({spec.reduce})" if spec.reduce else "")
    if spec.counts:
        words += f" of {' + '.join(map(str, spec.counts[:4]))}{' + ...' if len(spec.counts) > 4 else ''} {spec.dtype}"
    return words + (f", root {spec.root}" if spec.root >= 0 else "")


def _onward(piece: Piece, source: int) -> Piece:
    """The same piece on its way down."""
    return msgspec.structs.replace(piece, source=source, confirm=False, call=None)


def _weight(payload: memoryview | None) -> int:
    return _RECORD_BYTES + (0 if payload is None else payload.nbytes)


def _spec_bytes(spec: CallSpec) -> int:
    return _RECORD_BYTES + len(spec.kind) + len(spec.reduce) + len(spec.dtype) + _ENTRY_BYTES * len(spec.counts)


def _source(message: Message) -> int:
    assert isinstance(message, Piece | Parcel)
    return message.source


class RelayGroup:
    """One group.

    Attributes:
        name: as its members call it.
        size: number of ranks.
        members: rank to the worker's name, for those who have opened the group.
        broken: why nothing in it will ever complete; "" while it stands.
        held: rank to the bytes of what it sent that waits here for other ranks.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.members: dict[int, str] = {}
        self.broken = ""
        self.held: Counter[int] = Counter()
        self._left: set[int] = set()
        self._waiting: dict[int, list[Deliver]] = {}  # for ranks that have not opened the group yet
        self._calls: dict[int, _Call] = {}
        self._places: dict[tuple[int, int, int], _Place] = {}
        self._failed: dict[int, None] = {}  # in order of failure; their late pieces are dropped

    @property
    def missing(self) -> int:
        """How many ranks have never opened it."""
        return self.size - len(self.members)

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left, or was lost."""
        return rank in self._left

    @property
    def over(self) -> bool:
        """Whether every rank has opened it and left, so that it can be forgotten."""
        return not self.missing and self._left >= self.members.keys()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait here in all; may be asked for while another thread has the group's lock."""
        return sum(list(self.held.values()))

    def held_by(self, rank: int) -> int:
        """Bytes that a rank answers for: its own, and those of ranks that left. Needs no lock, as `held_bytes`."""
        left = sum(self.held.get(other, 0) for other in list(self._left) if other != rank) if self._left else 0
        return self.held.get(rank, 0) + left

    def who(self, ranks: Iterable[int]) -> str:
        """Name ranks for a sentence."""
        named = [f"rank {rank}" + (f" ({self.members[rank]})" if rank in self.members else "") for rank in ranks]
        return ", ".join(named) or "no rank"

    # ---------------------------------------------------------------------------------------------------- membership

    def open(self, message: OpenGroup) -> list[Action]:
        """A rank has come, one of `size`: it gets what waited for it."""
        rank = message.rank
        self.members[rank] = message.member
        self._left.discard(rank)
        if self.broken:
            return [Deliver(rank, GroupEnded(self.name, self.broken))]
        gone = [Deliver(rank, LeaveGroup(self.name, other)) for other in sorted(self._left)]
        waited = self._waiting.pop(rank, [])
        for deliver in waited:
            self.held[_source(deliver.message)] -= _weight(deliver.payload)
        return [*waited, *gone]

    def leave(self, rank: int) -> list[Action]:
        """A rank is done: collectives that it did not call, and receives from it, cannot complete any more."""
        self._left.add(rank)
        actions: list[Action] = [Deliver(other, LeaveGroup(self.name, rank)) for other in self._present()]
        for sequence, call in list(self._calls.items()):
            if rank not in call.specs and call.failure is None:
                actions += self._fail(sequence, call, f"{self.who([rank])} has left the group", missing=(rank,))
        return actions

    def lose(self, rank: int, cause: str) -> list[Action]:
        """A rank's session is over without a farewell: the group is broken."""
        if rank in self._left:
            return []
        self._left.add(rank)
        return self.end(f"{self.who([rank])} was lost: {cause}")

    def end(self, reason: str) -> list[Action]:
        """Break the group on all its members; the first reason counts."""
        if self.broken:
            return []
        self.broken = reason
        self._calls.clear()
        self._places.clear()
        self._waiting.clear()
        self.held.clear()
        return [Deliver(rank, GroupEnded(self.name, reason)) for rank in self._present()]

    def _present(self) -> list[int]:
        return [rank for rank in self.members if rank not in self._left]

    # -------------------------------------------------------------------------------------------------------- traffic

    def piece(self, rank: int, piece: Piece, payload: memoryview) -> list[Action]:
        """A rank's part of a collective.

        Args:
            rank: of the sender.
            piece: its record: which call, which part.
            payload: its bytes, at most 1 MiB.
        """
        if self.broken:
            return []
        actions = self._called(rank, piece.sequence, piece.call) if piece.call is not None else []
        if piece.target != ONLY_CALLED and piece.sequence not in self._failed:
            if piece.reduce:
                actions += self._collect(rank, piece, payload)
            else:
                actions += self._pass_on(self._receivers(piece.target, rank), _onward(piece, rank), payload)
        if piece.confirm:
            actions.append(Deliver(rank, Taken(self.name, piece.sequence)))
        return actions

    def parcel(self, rank: int, parcel: Parcel, payload: memoryview) -> list[Action]:
        """A part of a tensor from rank to rank.

        Args:
            rank: of the sender.
            parcel: its record: to whom, which part.
            payload: its bytes, at most 1 MiB.
        """
        if self.broken or not 0 <= parcel.target < self.size:
            return []
        actions = self._pass_on((parcel.target,), msgspec.structs.replace(parcel, source=rank, confirm=False), payload)
        if parcel.confirm:
            actions.append(Deliver(rank, Taken(self.name, -parcel.number, parcel.target)))
        return actions

    def fail(self, sequence: int, reason: str) -> list[Action]:
        """A collective that every rank has called cannot be done."""
        self._note_failed(sequence)
        failure = OperationFailed(self.name, sequence, f"group {self.name!r}: {reason}")
        return [Deliver(rank, failure) for rank in self._present()]

    def expire(self, rank: int, message: Expire) -> list[Action]:
        """A rank has waited long enough: the collective fails on all, with the names of those who did not call it."""
        call = self._calls.get(message.sequence)
        if self.broken:
            return []
        waited = f"{self.who([rank])} reached its timeout of {message.waited_s:g} s"
        if call is None:  # every rank has called it: its data is still on the way
            why = f"{waited}; every rank has called it, its data is still on the way: give more time"
            return [Deliver(rank, OperationFailed(self.name, message.sequence, why, timed_out=True))]
        if call.failure is not None:
            return []
        missing = tuple(other for other in range(self.size) if other not in call.specs)
        what = describe_call(call.specs[rank]) if rank in call.specs else "a collective"
        reason = f"{waited} waiting for {self.who(missing)} in {what}"
        return self._fail(message.sequence, call, reason, timed_out=True, missing=missing)

    # -------------------------------------------------------------------------------------------------------- internal

    def _called(self, rank: int, sequence: int, spec: CallSpec) -> list[Action]:
        call = self._calls.get(sequence)
        if call is None:
            call = self._calls[sequence] = _Call()
        first = next(iter(call.specs.items()), None)
        before = call.specs.get(rank)
        self.held[rank] += _spec_bytes(spec) - (0 if before is None else _spec_bytes(before))
        call.specs[rank] = spec
        actions: list[Action] = []
        if call.failure is not None:
            actions.append(Deliver(rank, call.failure))
        elif first is not None and first[1] != spec:
            actions = self._fail(
                sequence,
                call,
                f"the ranks do not agree: {self.who([first[0]])} called {describe_call(first[1])}, "
                f"{self.who([rank])} called {describe_call(spec)}",
            )
        elif self._left and (absent := [other for other in sorted(self._left) if other not in call.specs]):
            actions = self._fail(sequence, call, f"{self.who(absent)} left the group before", missing=tuple(absent))
        if len(call.specs) == self.size:
            del self._calls[sequence]
            for other, called in call.specs.items():
                self.held[other] -= _spec_bytes(called)
        return actions

    def _note_failed(self, sequence: int) -> None:
        self._failed[sequence] = None
        if len(self._failed) > MOST_FAILED:
            del self._failed[next(iter(self._failed))]

    def _drop_place(self, key: tuple[int, int, int]) -> _Place:
        place = self._places.pop(key)
        self.held[place.first] -= _ENTRY_BYTES * self.size
        for rank, part in enumerate(place.parts):
            if part is not None:
                self.held[rank] -= _weight(part)
        return place

    def _collect(self, rank: int, piece: Piece, payload: memoryview) -> list[Action]:
        key = (piece.sequence, piece.target, piece.offset)
        place = self._places.get(key)
        if place is None:
            place = _Place([None] * self.size, rank, self.size, piece.tensor.numel, piece.tensor.dtype)
            self._places[key] = place
            self.held[rank] += _ENTRY_BYTES * self.size
        if place.parts[rank] is not None or (place.numel, place.dtype) != (piece.tensor.numel, piece.tensor.dtype):
            return self.end(f"{self.who([rank])} sent a piece of operation {piece.sequence} that fits no other rank's")
        place.parts[rank] = payload
        self.held[rank] += _weight(payload)
        place.missing -= 1
        if place.missing:
            return []
        self._drop_place(key)
        onward = _onward(piece, -1)
        return [Reduce(self._receivers(piece.target, None), onward, [part for part in place.parts if part is not None])]

    def _receivers(self, target: int, but: int | None) -> tuple[int, ...]:
        if target == EVERYONE:
            return tuple(range(self.size)) if but is None else tuple([rank for rank in range(self.size) if rank != but])
        return (target,) if 0 <= target < self.size else ()

    def _pass_on(self, ranks: Iterable[int], message: Message, payload: memoryview) -> list[Action]:
        actions: list[Action] = []
        for rank in ranks:
            deliver = Deliver(rank, message, payload)
            if rank in self.members:
                actions.append(deliver)
            else:
                self._waiting.setdefault(rank, []).append(deliver)
                self.held[_source(message)] += _weight(payload)
        return actions

    def _fail(
        self, sequence: int, call: _Call, reason: str, timed_out: bool = False, missing: tuple[int, ...] = ()
    ) -> list[Action]:
        call.failure = OperationFailed(
            self.name, sequence, f"operation {sequence} of group {self.name!r}: {reason}", timed_out, missing
        )
        self._note_failed(sequence)
        for key in [key for key in self._places if key[0] == sequence]:
            self._drop_place(key)
        return [Deliver(rank, call.failure) for rank in call.specs]
