"""Formats that send each element by itself: unchanged, as bfloat16, as float16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from guava_nb.wire_formats.wire_format import WireFormat, accumulation_dtype

__all__ = ["Half", "Unchanged"]


class Unchanged(WireFormat):
    """`fp32`: float32 as it is; float64 stays float64. It loses nothing."""

    name, is_exact = "fp32", True

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of the elements."""
        return numel * accumulation_dtype(dtype).itemsize

    def _encode(self, values: Tensor) -> Sequence[Tensor]:
        """Return the values `[N]` themselves."""
        return (values,)

    def _decode(self, raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the bytes `[N * itemsize]` as values `[N]`; a view."""
        return raw.view(dtype)


class Half(WireFormat):
    """`bf16` or `fp16`: each element rounded to the nearest of that type, to even between two; 2 bytes each."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        """Send as that type."""
        self.name, self._dtype = name, dtype

    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return 2 bytes an element."""
        return 2 * numel

    def _encode(self, values: Tensor) -> Sequence[Tensor]:
        # A large finite value must not become the Inf that stops a run.
        """Return the values `[N]` as halves `[N]`."""
        largest = torch.finfo(self._dtype).max
        return (torch.where(values.isinf(), values, values.clamp(-largest, largest)).to(self._dtype),)

    def _decode(self, raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the halves of the bytes `[2 N]` as values `[N]`."""
        return raw.view(self._dtype).to(dtype)
