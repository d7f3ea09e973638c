"""What every wire format does, and the checks that all of them share.

A message is the elements of one flat tensor and nothing else: the format, the number of elements and their type are known to
both sides, so a message has one length only, which a formula gives. Formats work on the tensor's own device; messages are host
memory, little endian.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from guava_nb.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["Device", "WireFormat", "accumulation_dtype"]

Device = torch.device | str


class WireFormat(ABC):
    """How the elements of a flat tensor travel.

    Attributes:
        name: as a user writes it, or as a person reads it.
        is_exact: float32 and float64 arrive as they were.
    """

    name: str
    is_exact: bool = False

    @abstractmethod
    def encoded_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the length of every message of `numel` elements, in bytes."""

    def encode(self, flat: Tensor) -> memoryview:
        """Return the message of a flat tensor, `[numel]`, in host memory; errors as of `encode_tensor`."""
        return self.encode_tensor(flat).cpu().numpy().data

    def encode_tensor(self, flat: Tensor) -> Tensor:
        """Return the message of a flat tensor, `[numel]`, of float32 or float64, or of a half type, which counts as float32.

        It is `[bytes]` of uint8 on the tensor's device. Values that are too large for the format become its largest one; NaN and
        Inf stay visible: `decode` gives at least one value that is not finite.

        Raises:
            LocalProtocolError: it is not flat, or of another type.
        """
        if flat.dim() != 1:
            raise LocalProtocolError(f"a tensor of {flat.dim()} axes was to be encoded; flatten it first")
        values = flat.detach().to(accumulation_dtype(flat.dtype))
        parts = [part.reshape(-1).contiguous().view(torch.uint8) for part in self._encode(values) if part.numel()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=flat.device)

    def decode(self, message: Any, numel: int, dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """Return the flat tensor of a message: `[numel]` of float32, or of float64 where `dtype` is that; its own memory.

        The same bytes give the same bits on every device and every version of torch.

        Args:
            message: bytes-like, of a peer that is not believed.
            numel: elements that were asked for; nothing larger is allocated, however the bytes look.
            dtype: of the tensor that was encoded.
            device: where the result is made.

        Raises:
            RemoteProtocolError: the message has another length, or holds what `encode` never writes.
        """
        return self.decode_tensor(self.checked(message, numel, dtype, device), numel, dtype)

    def decode_tensor(self, raw: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return what `decode` does, on the device of the bytes.

        Args:
            raw: what `checked` gave, `[bytes]` of uint8.
            numel, dtype: as for `decode`.
        """
        dtype = accumulation_dtype(dtype)
        return self._decode(raw, numel, dtype) if raw.numel() else torch.zeros(numel, dtype=dtype, device=raw.device)

    def checked(self, message: Any, numel: int, dtype: torch.dtype, device: Device) -> Tensor:
        """Return the bytes of a message whose length is right, `[bytes]` of uint8; errors as of `decode`.

        Args:
            message, numel, dtype, device: as for `decode`.
        """
        expected = self.encoded_bytes(numel, accumulation_dtype(dtype))
        if len(message) != expected:
            raise RemoteProtocolError(
                f"{len(message)} bytes came for {numel} elements as {self.name}, which take {expected}"
            )
        # The copy is aligned, writable and our own, whatever the payload's memory was.
        return torch.frombuffer(bytearray(message) or bytearray(1), dtype=torch.uint8)[:expected].to(device)

    def left_out(self, values: Tensor, message: Any) -> Tensor:
        """Return what the message of `values`, `[numel]` of float32 or float64, lacks of them; its own memory."""
        return values - self.decode(message, values.numel(), values.dtype, values.device)

    @abstractmethod
    def _encode(self, values: Tensor) -> Sequence[Tensor]:
        """Return the parts of the message of values `[numel]`, float32 or float64, in order; each of any dtype and shape."""

    @abstractmethod
    def _decode(self, raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return values `[numel]` of `dtype` from the message's bytes, `[bytes]` of uint8; their length is right and above 0."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of that type are added: float64 stays, halves become float32.

    Raises:
        LocalProtocolError: it is no real floating-point type.
    """
    if not dtype.is_floating_point:
        raise LocalProtocolError(f"elements of {dtype} have no wire format; they travel as they are")
    return torch.float64 if dtype == torch.float64 else torch.float32
