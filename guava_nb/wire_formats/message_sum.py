"""Messages of several members added up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import Device, WireFormat, accumulation_dtype

__all__ = ["mean_of_senders", "sum_of_messages"]


def sum_of_messages(
    wire_format: WireFormat,
    messages: Iterable[Any],
    numel: int,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Tensor:
    """Return the sum of the messages, added in their order in float32, or in float64 where `dtype` is that; `[numel]`.

    The same messages in the same order give the same bits wherever they are added: at the hub, or at each member.

    Args:
        wire_format: that encoded them.
        messages: as `WireFormat.encode` made them.
        numel: elements of each.
        dtype: of the tensors that were encoded.
        device: of the sum.

    Raises:
        RemoteProtocolError: one of them is none of that format and size.
    """
    total: Tensor | None = None
    for message in messages:
        decoded = wire_format.decode(message, numel, dtype, device)
        total = decoded if total is None else total.add_(decoded)
    return torch.zeros(numel, dtype=accumulation_dtype(dtype), device=device) if total is None else total


def mean_of_senders(
    wire_format: TopK,
    messages: Iterable[Any],
    numel: int,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Tensor:
    """Return of each element the mean of the messages in which it is not 0, `[numel]`, in the types of `sum_of_messages`.

    Args:
        wire_format, messages, numel, dtype, device: as for `sum_of_messages`.

    Raises:
        RemoteProtocolError: as `sum_of_messages`.
    """
    total = torch.zeros(numel, dtype=accumulation_dtype(dtype), device=device)
    senders = torch.zeros(numel, dtype=torch.int32, device=device)
    touched = list[Tensor]()
    for message in messages:  # only what is sent is looked at: no message names a place twice
        places, values = wire_format.sent(message, numel, dtype, device)
        total[places] += values
        senders[places] += values != 0
        touched.append(places)
    if touched:
        places = torch.cat(touched)
        total[places] = total[places] / senders[places].clamp_(min=1)
    return total
