"""Small whole numbers side by side in bytes, lowest bits first. Knows torch; knows no formats."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["packed", "packed_bytes", "unpacked"]


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes that `count` numbers of `bits` bits take."""
    return (count * bits + 7) // 8


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers of any shape, from 0 to 2**bits - 1, as `[packed_bytes(numel, bits)]` of uint8; 0 bits take none."""
    flat = numbers.reshape(-1)
    if not bits:
        return flat.new_zeros(0, dtype=torch.uint8)
    if 8 % bits:  # they lie across bytes: cut into single bits
        flat = (flat.unsqueeze(-1) >> torch.arange(bits, device=flat.device)).bitwise_and_(1).reshape(-1)
        bits = 1
    per_byte = 8 // bits
    flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.numel() % per_byte)).view(-1, per_byte)
    out = flat[:, 0].clone()
    for place in range(1, per_byte):
        out |= flat[:, place] << place * bits
    return out


def unpacked(raw: Tensor, count: int, bits: int) -> Tensor:
    """Return the numbers that `packed` put into bytes, `[count]`: int64 where they are cut across bytes, else uint8.

    Args:
        raw: `[packed_bytes(count, bits)]` of uint8.
        count: of numbers.
        bits: of each.
    """
    if not bits:
        return raw.new_zeros(count)
    unit = 1 if 8 % bits else bits
    flat = raw.new_empty(raw.numel(), 8 // unit)
    for place in range(8 // unit):
        flat[:, place] = (raw >> place * unit) & (2**unit - 1)
    flat = flat.view(-1)[: count * bits // unit]
    if unit == bits:
        return flat
    return (flat.view(count, bits).long() << torch.arange(bits, device=raw.device)).sum(1)
