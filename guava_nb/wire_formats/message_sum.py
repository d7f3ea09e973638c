"""Messages of several members added up, and the shorter of the two ways to send the sum back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guava_nb.wire_formats.wire_format import Device, WireFormat, accumulation_dtype

__all__ = ["WayDown", "mean_of_senders", "shorter_way_down", "sum_of_messages"]


def sum_of_messages(
    wire_format: WireFormat,
    messages: Iterable[Any],
    numel: int,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Tensor:
    """Return the sum of the messages, added in their order in float32, or in float64 where `dtype` is that; `[numel]`.

    The same messages in the same order give the same bits wherever they are added: at the hub, or at each member.

    Raises:
        RemoteProtocolError: one of them is none of that format and size.
    """
    total: Tensor | None = None
    for message in messages:
        decoded = wire_format.decode(message, numel, dtype, device)
        total = decoded if total is None else total.add_(decoded)
    return torch.zeros(numel, dtype=accumulation_dtype(dtype), device=device) if total is None else total


def mean_of_senders(
    wire_format: WireFormat,
    messages: Iterable[Any],
    numel: int,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Tensor:
    """Return of each element the mean of the messages in which it is not 0, `[numel]`, in the types of `sum_of_messages`.

    Raises:
        RemoteProtocolError: as `sum_of_messages`.
    """
    total = torch.zeros(numel, dtype=accumulation_dtype(dtype), device=device)
    senders = torch.zeros(numel, dtype=torch.int32, device=device)
    for message in messages:
        decoded = wire_format.decode(message, numel, dtype, device)
        total += decoded
        senders += decoded != 0
    return total.div_(senders.clamp_(min=1))


class WayDown(NamedTuple):
    """How the sum of several messages goes to one member.

    Attributes:
        is_forwarded: it gets the messages of all others, and adds them up with its own; else it gets the encoded sum.
        nbytes: what it gets.
    """

    is_forwarded: bool
    nbytes: int


def shorter_way_down(
    up: WireFormat, down: WireFormat, numel: int, members: int, dtype: torch.dtype = torch.float32
) -> WayDown:
    """Return the way of fewer bytes; of equal ones the forwarding, which loses nothing more and leaves the hub no residual.

    Args:
        up: the format of the members' messages.
        down: that of the sum; it needs error feedback of the hub's own unless it is exact.
        numel: elements of the tensor.
        members: how many send and receive.
        dtype: of the tensor.
    """
    forwarded = (members - 1) * up.encoded_bytes(numel, dtype)
    encoded = down.encoded_bytes(numel, dtype)
    return WayDown(True, forwarded) if forwarded <= encoded else WayDown(False, encoded)
