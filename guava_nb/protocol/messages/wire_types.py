"""What every record is made of: channels, the base class, and how a payload's tensors are described."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

import msgspec

__all__ = ["Channel", "FlatTensor", "Message", "TensorSpec", "Tree", "CONTROL_CHANNELS"]


class Channel(IntEnum):
    """A traffic class. Lower numbers go first when several wait to be sent."""

    HEARTBEAT = 0
    CONTROL = 1
    METRICS = 2
    COLLECTIVE = 3
    GRADIENT = 4
    ACTIVATION = 5
    BATCH = 6
    CHECKPOINT = 7


#: Channels that live on the control connection; all others live on the bulk connection.
CONTROL_CHANNELS = frozenset({Channel.HEARTBEAT, Channel.CONTROL, Channel.METRICS})


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of every record.

    Attributes:
        NUMBER: tells the record in a frame's header. It is never used for another record.
        CHANNEL: where it travels once the session stands. Records that must stay in order share a channel.
    """

    NUMBER: ClassVar[int]
    CHANNEL: ClassVar[Channel] = Channel.CONTROL


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a payload.

    Attributes:
        dtype: torch's name without the prefix, for instance "float32", "bfloat16".
        shape: sizes of the axes; () is a scalar.
        offset: first byte within the payload.
        nbytes: bytes in the payload.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """A nested value whose tensors lie in the payload; made and read by `guava_nb.data.codec`."""

    structure: bytes
    tensors: tuple[TensorSpec, ...] = ()


class FlatTensor(msgspec.Struct, frozen=True, array_like=True):
    """The whole payload is one flat tensor."""

    dtype: str
    numel: int
