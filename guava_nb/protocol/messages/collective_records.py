"""The shared store, and collectives through the hub."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from guava_nb.protocol.messages.wire_types import Channel, FlatTensor, Message

__all__ = ["CallSpec", "Expire", "GroupEnded", "LeaveGroup", "OpenGroup", "OperationFailed", "Parcel", "Piece"]
__all__ += ["StoreAsk", "StoreReply", "Taken"]


class StoreAsk(Message, frozen=True):
    """Member to hub: do this to the shared keys.

    Attributes:
        request_id: the reply carries it; counted by the asking session.
        op: "set", "get", "wait", "add", "compare_set", "check", "delete", "num_keys", "list_keys", "append",
            "multi_get", "multi_set", "lend" (set until this session ends), "claim" (lend if it is free; gives what
            holds then), "queue_push", "queue_pop", "queue_len", "forget" (every key that begins so), or "cancel"
            (request `number` is not waited for any more).
        keys: what it is about; "num_keys" and "list_keys" take a prefix.
        values: one per key, or for "compare_set" the expected and the wanted value.
        number: what "add" adds; for "queue_pop" 0 does not wait.
    """

    NUMBER: ClassVar[int] = 64

    request_id: int
    op: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class StoreReply(Message, frozen=True):
    """Hub to member: the answer to `StoreAsk`; a wait is answered when it is over."""

    NUMBER: ClassVar[int] = 65

    request_id: int
    values: tuple[bytes, ...] = ()
    number: int = 0
    problem: str = ""


class OpenGroup(Message, frozen=True):
    """Member to hub: this session is this rank of this group from now on. Sent before anything else of the group."""

    NUMBER: ClassVar[int] = 72
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    rank: int
    size: int
    member: str  # the worker's name, for sentences


class LeaveGroup(Message, frozen=True):
    """Member to hub: done with the group. Hub to the other members: that rank left."""

    NUMBER: ClassVar[int] = 73
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    rank: int = -1


class CallSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a rank called; all ranks of a group must call the same in the same order.

    Attributes:
        kind: name of the collective.
        reduce: name of the reduction, "" where nothing is reduced.
        dtype: torch's name of the element type.
        counts: numbers of elements, in an order that belongs to the kind; what ranks may disagree on is left out.
        root: rank of the root, -1 where there is none.
    """

    kind: str
    reduce: str = ""
    dtype: str = "uint8"
    counts: tuple[int, ...] = ()
    root: int = -1


class Piece(Message, frozen=True, kw_only=True):
    """A part of a collective (COLLECTIVE): up from one rank, or down as a part of a sum or passed on from a rank.

    Attributes:
        group: name of the group.
        sequence: number of the collective in its group, from 1.
        target: rank that gets it, -1 for all.
        source: rank it came from, set by the hub; -1 is the hub itself: a sum.
        offset: first element within what goes from this source to this target.
        total: elements of all pieces from this source to this target.
        tensor: the elements; empty with target -2: the rank only says that it has called.
        reduce: name of the reduction; "" passes the bytes on undecoded.
        confirm: answer with `Taken` when this piece, the rank's last one, has come.
        call: with the rank's first piece.
    """

    NUMBER: ClassVar[int] = 74
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    sequence: int
    target: int
    source: int
    offset: int
    total: int
    tensor: FlatTensor
    reduce: str = ""
    confirm: bool = False
    call: CallSpec | None = None


class Parcel(Message, frozen=True, kw_only=True):
    """A part of a tensor that one rank sends to another (COLLECTIVE); passed on undecoded.

    Attributes:
        group: name of the group.
        source: rank it came from, set by the hub.
        target: rank that gets it.
        tag: the receiver asks by source and tag.
        number: counts what this source sends to this target, from 1.
        offset: first element of this part.
        total: elements of the whole tensor.
        tensor: the elements of this part.
        confirm: answer with `Taken` (its `sequence` is minus this `number`) when this last part has come.
    """

    NUMBER: ClassVar[int] = 75
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    source: int
    target: int
    tag: int
    number: int
    offset: int
    total: int
    tensor: FlatTensor
    confirm: bool = False


class Taken(Message, frozen=True):
    """Hub to member (COLLECTIVE): the hub has all of what this rank sent; its memory may be used again."""

    NUMBER: ClassVar[int] = 76
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    sequence: int
    target: int = -1


class Expire(Message, frozen=True):
    """Member to hub (COLLECTIVE): this rank has waited long enough for this collective; end it for everyone."""

    NUMBER: ClassVar[int] = 77
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    sequence: int
    waited_s: float


class OperationFailed(Message, frozen=True):
    """Hub to member (COLLECTIVE): this collective ends with this error; `missing` are the ranks that did not call."""

    NUMBER: ClassVar[int] = 78
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    sequence: int
    reason: str
    timed_out: bool = False
    missing: tuple[int, ...] = ()


class GroupEnded(Message, frozen=True):
    """Hub to member (COLLECTIVE): the group is broken, nothing in it will ever complete; the reason names who."""

    NUMBER: ClassVar[int] = 79
    CHANNEL: ClassVar[Channel] = Channel.COLLECTIVE

    group: str
    reason: str
