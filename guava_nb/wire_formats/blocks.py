"""Whole numbers of 8 or 4 bits with one scale for each block of elements.

A scale is a bfloat16, rounded up, so that the largest element of a block fits; NaN as a
scale says that the elements that are not 0 were not finite.
Scales below 2**-110 are 0: no product or difference is then denormal, which some devices flush to zero.

Shapes: N elements, K = ceil(N / block) blocks. A message is K scales of 2 bytes, then N numbers of `bits` bits, lowest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats.packed_bits import packed, packed_bytes, unpacked
from guava_nb.wire_formats.wire_format import WireFormat

__all__ = ["Blocks", "checked_scales", "rounded_up"]

_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = 2.0**-110


class Blocks(WireFormat):
    """`int8` or `int4`: elements as multiples of their block's scale, from -(2**(bits - 1) - 1) to 2**(bits - 1) - 1.

    An element is off by at most half a scale, and the scale is at most 1/127 (1/7) of the block's largest element, plus 1/128 of
    that.
    """

    def __init__(self, bits: int, block: int) -> None:
        """Send numbers of `bits` bits, 4 or 8, in blocks of `block` elements."""
        self.name, self.bits, self.block = f"int{bits}", bits, block
        self._most = 2 ** (bits - 1) - 1

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return 2 bytes a block and `bits` bits an element."""
        return 2 * -(-numel // self.block) + packed_bytes(numel, self.bits)

    def _encode(self, values: Tensor) -> Sequence[Tensor]:
        """Return the scales, `[K]` of bfloat16, and the packed numbers, `[packed_bytes(N, bits)]` of uint8, of values `[N]`."""
        numel = values.numel()
        if not numel:
            return ()
        rows = torch.nn.functional.pad(values, (0, -numel % self.block)).view(-1, self.block)
        scales = rounded_up(rows.abs().amax(1) / self._most, _LARGEST / (self._most + 1))
        divisors = scales.to(values.dtype).unsqueeze(1)
        numbers = torch.where(divisors > 0, rows / divisors, 0.0).round_().clamp_(-self._most, self._most)
        if bool(scales.isnan().any()):  # then the numbers say which elements are not finite
            numbers = torch.where(divisors.isnan(), (~rows.isfinite()).to(rows.dtype), numbers)
        codes = numbers.to(torch.int16).add_(self._most + 1).to(torch.uint8)
        return scales, packed(codes.view(-1)[:numel], self.bits)

    def _decode(self, raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the values, `[N]`, of a message; errors as of `checked_scales`."""
        blocks = -(-numel // self.block)
        scales = checked_scales(raw[: 2 * blocks], _LARGEST / (self._most + 1))
        numbers = unpacked(raw[2 * blocks :], numel, self.bits).to(torch.float32).sub_(self._most + 1)
        rows = torch.nn.functional.pad(numbers, (0, -numel % self.block)).view(-1, self.block)
        if bool(scales.isnan().any()):
            rows = torch.where(rows == 0, 0.0, rows * scales.unsqueeze(1))
        else:
            rows.mul_(scales.unsqueeze(1))
        return rows.view(-1)[:numel].to(dtype)


def rounded_up(scales: Tensor, most: float) -> Tensor:
    """Return scales `[K]`, at least 0, as bfloat16: rounded up, at most `most`; NaN for one that is not finite."""
    single = scales.to(torch.float32)
    # A float64 may have become smaller: one step up in the last place of float32.
    bits = single.view(torch.int32) + (single.to(scales.dtype) < scales)
    up = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    limit = torch.tensor(most).view(torch.int32).bitwise_and(-0x10000).view(torch.float32).to(torch.bfloat16)
    up = torch.where(single < _SMALLEST, torch.zeros_like(up), up.minimum(limit.to(up.device)))
    return torch.where(scales.isfinite(), up, torch.full_like(up, float("nan")))


def checked_scales(raw: Tensor, most: float) -> Tensor:
    """Return the scales that `rounded_up` wrote, `[K]` of float32, from their bytes, `[2 K]` of uint8.

    Raises:
        RemoteProtocolError: one is below 0, above `most`, or too small.
    """
    scales = raw.view(torch.bfloat16).to(torch.float32)
    is_scale = ((scales >= _SMALLEST) & (scales <= most)) | scales.isnan() | (scales.view(torch.int32) == 0)
    if not bool(is_scale.all()):
        wrong = scales[~is_scale][0].item()
        raise RemoteProtocolError(
            f"a block has the scale {wrong:g}; it is 0, from {_SMALLEST:.3g} to {most:.3g}, or NaN"
        )
    return scales
