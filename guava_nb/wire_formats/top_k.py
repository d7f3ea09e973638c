"""The largest elements of each chunk: where they are, and their values at 32, 8, 4, 2 or 1 bits; all others count as zero.

The sparse updates of SparseLoCo (arXiv:2508.15706) are such messages.

Shapes: a section is R chunks of L elements each, [R, L], of which k are sent: places and values are [R, k]. A message has for
each section R pairs of levels (bfloat16; at 1 bit one of each chunk, at 32 bits none), then the places, then the values.
A sign has no zero: at 1 bit zeros are sent as places behind their chunk, which count as none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guava_nb.errors import ConfigError, RemoteProtocolError
from guava_nb.wire_formats.ascending_indices import decoded_indices, encoded_indices, index_bytes
from guava_nb.wire_formats.blocks import checked_scales, rounded_up
from guava_nb.wire_formats.packed_bits import packed, packed_bytes, unpacked
from guava_nb.wire_formats.wire_format import Device, WireFormat, accumulation_dtype

__all__ = ["TopK"]

_LARGEST = torch.finfo(torch.float32).max / 2
#: Magnitudes are averaged as whole numbers: sums of floats depend on their order, and with it on the version of torch.
_UNIT = 2.0**20
#: Elements that are looked at together on a CPU: 512 KiB of float32.
_IN_CACHE = 1 << 17
#: The smallest magnitude of float32 above zero.
_SMALLEST = 2.0**-149


class TopK(WireFormat):
    """The `count` largest of each `chunk` elements; of equal ones those that come first.

    The last chunk may be shorter and sends its share of `count`, at least one. With fewer than 32 bits a value is its sign and
    one of 2**(bits - 1) magnitudes, evenly spaced between two levels of its chunk: the smallest and the largest sent; at 2 bits
    the means of the smaller and of the larger ones. At 1 bit it is its sign and the mean magnitude of those sent.
    """

    def __init__(self, count: int = 64, chunk: int = 4096, bits: int = 2, of_senders: bool = False) -> None:
        """Send so many values of each chunk, at so many bits.

        Args:
            count: elements of each chunk that are sent.
            chunk: elements that are compared with each other.
            bits: of each value: 1, 2, 4, 8 or 32.
            of_senders: several messages come to the mean, element by element, of those that have it, not to their sum; only
                a receiver of all of them can tell.

        Raises:
            ConfigError: the numbers make no format.
        """
        if not 1 <= count <= chunk or bits not in (1, 2, 4, 8, 32):
            raise ConfigError(
                f"top-k of {count} of {chunk} elements at {bits} bits: give 1 to {chunk} elements, and 1, 2, 4, 8 or 32 bits"
            )
        self.count, self.chunk, self.bits, self.of_senders = count, chunk, bits, of_senders
        self._most, self._num_levels = (1 << bits - 1) - 1, {1: 1, 32: 0}.get(bits, 2)
        self.name, self.is_exact = f"top {count} of {chunk} at {bits} bits", count == chunk and bits == 32

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of levels, places and values."""
        return sum(sum(self._sizes(*section, dtype)) for section in self._sections(numel))

    def _sections(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """Chunks, elements of each, values of each: of the whole chunks, then of the rest."""
        whole, rest = divmod(numel, self.chunk)
        if whole:
            yield whole, self.chunk, self.count
        if rest:
            yield 1, rest, -(-self.count * rest // self.chunk)

    def _sizes(self, rows: int, length: int, count: int, dtype: torch.dtype) -> tuple[int, int, int]:
        values, levels = rows * count, 2 * rows * self._num_levels
        if self.bits == 32:
            return levels, index_bytes(rows, length, count), values * accumulation_dtype(dtype).itemsize
        return levels, index_bytes(rows, self._room(length, count), count), packed_bytes(values, self.bits)

    def _room(self, length: int, count: int) -> int:
        """Return below which number the places of a chunk lie."""
        return length + count if self.bits == 1 else length

    # ---------------------------------------------------------------------------------------------------------- encode

    def _encode(self, values: Tensor) -> Sequence[Tensor]:
        """Return levels, places and values of each section of values `[N]`, see the module."""
        parts: list[Tensor] = []
        for rows, length, count in self._sections(values.numel()):
            section, values = values[: rows * length].view(rows, length), values[rows * length :]
            places = _largest(section, count)
            # At 32 bits there are no levels, and the part has no bytes.
            chosen = section.gather(1, places)
            if self.bits == 1 and not bool(chosen.all()):
                behind = length + torch.arange(count, device=places.device)
                places, order = torch.where(chosen == 0, behind, places).sort(1)
                chosen = chosen.gather(1, order)
            levels, codes = (chosen[:, :0], chosen) if self.bits == 32 else self._quantised(chosen)
            parts += [levels, *encoded_indices(places, self._room(length, count)), codes]
        return parts

    def _quantised(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return levels, `[R, levels]` of bfloat16, and the packed codes, uint8, of chosen values `[R, k]`."""
        is_finite = chosen.isfinite().all(1, keepdim=True)
        sizes = torch.where(is_finite, chosen.abs(), 0.0)
        levels = torch.stack(self._levels(sizes), 1)
        levels = torch.where(
            is_finite, rounded_up(levels, _LARGEST), torch.full((), float("nan"), dtype=torch.bfloat16)
        )
        # The levels as the receiver will have them, rounded: else both sides would reckon with other magnitudes.
        low, step = self._scale(levels)
        steps = torch.where(step > 0, (sizes - low) / step, 0.0).round_().clamp_(0, self._most)
        return levels, packed(steps.to(torch.uint8) | (chosen < 0).to(torch.uint8) << self.bits - 1, self.bits)

    def _levels(self, sizes: Tensor) -> tuple[Tensor, ...]:
        """Return the lower and the upper level of each chunk, or the only one, each `[R]`, of magnitudes `[R, k]`."""
        largest = sizes.amax(1)
        if self.bits > 2:
            return sizes.amin(1), largest
        units = torch.where(sizes > 0, sizes / largest.unsqueeze(1) * _UNIT, 0.0).round_().long()
        if self.bits == 1:
            return (units.sum(1) // (sizes > 0).sum(1).clamp(min=1) / _UNIT * largest,)
        # Zeros stay zeros: where some are sent, they are the smaller ones, and all others the larger.
        border = torch.where(units.amin(1, keepdim=True) > 0, units.sum(1, keepdim=True), 0)
        is_large = units * units.shape[1] > border
        num_large, total_large = is_large.sum(1), (units * is_large).sum(1)
        low = (units.sum(1) - total_large) // (units.shape[1] - num_large)
        high = torch.where(num_large > 0, total_large // num_large.clamp(min=1), low)
        return low / _UNIT * largest, high / _UNIT * largest

    def _scale(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lower level and the step between magnitudes, each `[R, 1]` of float32, of levels `[R, levels]`."""
        each = levels.to(torch.float32).unsqueeze(2)
        low, high = each[:, 0], each[:, -1]
        return low, (high - low) / max(1, self._most)

    # ---------------------------------------------------------------------------------------------------------- decode

    def decode_sparse(self, message: Any, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return what `decode` does as a sparse tensor, `[numel]`, of the elements that were sent; errors as there.

        Adding it to a sum costs as much as it has elements, and so does keeping it until those before it have come.

        Args:
            message, numel, dtype: as for `decode`.
        """
        places, values = self.sent(message, numel, dtype)
        return torch.sparse_coo_tensor(places.unsqueeze(0), values, (numel,), is_coalesced=True, check_invariants=False)

    def _decode(self, raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the values, `[N]`, of a message, zeros where none was sent."""
        places, values = self._sent(raw, numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=raw.device).scatter_(0, places, values)

    def sent(
        self, message: Any, numel: int, dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Return where the elements of a message lie, ascending, and their values; errors as of `decode`.

        Args:
            message, numel, dtype, device: as for `decode`.

        Returns:
            Places, `[count]` of int64, and `[count]` of float32 or float64.
        """
        raw, dtype = self.checked(message, numel, dtype, device), accumulation_dtype(dtype)
        return self._sent(raw, numel, dtype)

    def left_out(self, values: Tensor, message: Any) -> Tensor:
        """Return what the message of `values`, `[N]`, lacks of them, `[N]`; see `WireFormat.left_out`."""
        places, sent = self.sent(message, values.numel(), values.dtype, values.device)
        rest = values.clone()
        rest[places] -= sent  # places are unique: this is no sum over equal ones
        return rest

    def _sent(self, raw: Tensor, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return places, `[count]` of int64, ascending, and values, `[count]`, of a message whose length is right."""
        found, first = list[tuple[Tensor, Tensor]](), 0
        for section in self._sections(numel):
            rows, length, count = section
            sizes = self._sizes(*section, dtype)
            # Cloned, since a view as a larger type needs an aligned beginning.
            levels, indices, codes = (part.clone() for part in torch.split_with_sizes(raw[: sum(sizes)], sizes))
            raw = raw[sum(sizes) :]
            starts = torch.arange(first, first + rows * length, length, device=raw.device).unsqueeze(1)
            places = decoded_indices(indices, rows, self._room(length, count), count)
            values = codes.view(dtype) if self.bits == 32 else self._values(levels, codes, rows, count).to(dtype)
            placed, values = (places + starts).view(-1), values.reshape(-1)
            if self.bits == 1:
                is_inside = places.view(-1) < length
                placed, values = placed[is_inside], values[is_inside]
            found.append((placed, values))
            first += rows * length
        if not found:
            return torch.zeros(0, dtype=torch.int64, device=raw.device), torch.zeros(0, dtype=dtype, device=raw.device)
        places, values = (torch.cat(parts) for parts in zip(*found, strict=True))
        return places, values

    def _values(self, raw_levels: Tensor, raw_codes: Tensor, rows: int, count: int) -> Tensor:
        """Return the values of a section, `[R, k]` of float32, from its bytes.

        Args:
            raw_levels: `[2 R * levels]` of uint8.
            raw_codes: `[packed_bytes(R k, bits)]` of uint8.
            rows: R.
            count: k.

        Raises:
            RemoteProtocolError: the levels are none that `encode` writes.
        """
        levels = checked_scales(raw_levels, _LARGEST).view(rows, self._num_levels)
        if not bool(((levels[:, 0] <= levels[:, -1]) | levels.isnan().all(1)).all()):
            raise RemoteProtocolError("the levels of a chunk do not ascend, or one alone is NaN")
        low, step = self._scale(levels)
        codes = unpacked(raw_codes, rows * count, self.bits).view(rows, count)
        sizes = (codes & self._most) * step + low
        return torch.where(codes > self._most, -sizes, sizes)


def _largest(section: Tensor, count: int) -> Tensor:
    """Return the places, `[R, k]`, ascending, of the k = `count` largest of each row of `[R, L]`.

    What is not finite counts as largest.
    """
    rows, length = section.shape
    if count == length:
        return torch.arange(length, device=section.device).expand(rows, length)
    if section.device.type != "cpu":
        return _largest_of(section, count)
    pieces = section.split(max(1, _IN_CACHE // length))  # type: ignore[no-untyped-call]
    return torch.cat([_largest_of(piece, count) for piece in pieces])


def _largest_of(section: Tensor, count: int) -> Tensor:
    """Return `_largest` of rows, `[R, L]`, that are longer than `count`, as `[R, k]`.

    The largest ones are found in any order, which says how large the smallest of them is; only where others are as large does
    it matter which came first.
    """
    rows, length = section.shape
    sizes = section.abs()
    largest = _top(sizes, count)
    if not bool(largest.isfinite().all()):
        sizes = torch.where(section.isfinite(), sizes, torch.inf)
        largest = _top(sizes, count)
    smallest = largest.amin(1, keepdim=True)
    if is_sparse := not bool(smallest.all()):  # most of a table's rows do not move in a round
        smallest.clamp_(min=math.ulp(0.0) if sizes.dtype == torch.float64 else _SMALLEST)
    is_chosen = sizes >= smallest
    if is_sparse:
        _choose_zeros(is_chosen, count)
    places = _true_places(is_chosen)
    if len(places) > rows * count:
        is_equal = sizes == smallest
        lacking = count - (sizes > smallest).sum(1, keepdim=True)
        is_chosen &= ~is_equal | (is_equal.cumsum(1, dtype=torch.int32) <= lacking)
        places = _true_places(is_chosen)
    return places.view(rows, count) % length


def _choose_zeros(is_chosen: Tensor, count: int) -> None:
    """Add their first zeros to what is chosen of rows, `[R, L]`, that have less than `count` others; in place."""
    # As many zeros as are lacking lie among the first `count` elements: there are no more others.
    lacking, is_zero = count - is_chosen.sum(1, keepdim=True), ~is_chosen[:, :count]
    is_chosen[:, :count] |= is_zero & (is_zero.cumsum(1) <= lacking)


def _top(sizes: Tensor, count: int) -> Tensor:
    """Return the k = `count` largest of each row of `[R, L]`, `[R, k]`, in no order.

    NumPy's selection takes a quarter of torch's time.
    """
    if sizes.device.type != "cpu":
        return sizes.topk(count, dim=1, sorted=False).values
    first = sizes.shape[1] - count
    return torch.from_numpy(np.partition(sizes.numpy(), first, axis=1)[:, first:])


def _true_places(marks: Tensor) -> Tensor:
    """Return where true values lie in `[R, L]` that is read row by row, `[how many]` of int64.

    NumPy takes a fifth of torch's time.
    """
    if marks.device.type != "cpu":
        return marks.view(-1).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(marks.numpy()))
