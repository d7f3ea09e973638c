"""Values between stages in a wire format: as float words, because torch wants a gradient of what it sent in the same form.

A message is a function of its values alone: nothing of an earlier one is in it. So no rank keeps a residual that a lost one would
take along, and a batch that is done again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.wire_formats.wire_format import WireFormat

__all__ = ["from_words", "is_shorter", "showing_dependence", "to_words", "words_of"]

_WORD_BYTES = 4


def is_shorter(wire: WireFormat, dtype: torch.dtype) -> bool:
    """Whether values of a real type take fewer bytes in that format than as they are."""
    many = 4096
    return not wire.is_exact and wire.encoded_bytes(many, dtype) < many * dtype.itemsize


def words_of(wire: WireFormat, numel: int) -> int:
    """Return how many float32 hold the message of `numel` elements."""
    return -(-wire.encoded_bytes(numel) // _WORD_BYTES)


def to_words(flat: Tensor, wire: WireFormat, length: int) -> Tensor:
    """Return the message of a flat tensor, `[numel]`, as float32, `[length]`; its gradient comes back in the same form."""
    return _applied(_Sent, flat, wire, length)


def from_words(words: Tensor, wire: WireFormat, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the values of a message of `to_words`, `[numel]`; their gradient goes back in the same form.

    Raises:
        RemoteProtocolError: the words hold what no rank writes.
    """
    return _applied(_Received, words, wire, numel, dtype)


def _applied(function: type[torch.autograd.Function], *given: Any) -> Tensor:
    found: Tensor = function.apply(*given)  # type: ignore[no-untyped-call]
    return found


def _encoded(flat: Tensor, wire: WireFormat, length: int) -> Tensor:
    """Return the message of `[numel]` as float32, `[length]`; the bytes behind its end are 0."""
    message = wire.encode_tensor(flat)
    raw = torch.zeros(length * _WORD_BYTES, dtype=torch.uint8, device=flat.device)
    raw[: message.numel()] = message
    return raw.view(torch.float32)


def _decoded(words: Tensor, wire: WireFormat, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the values `[numel]` of a message, `[length]` float32."""
    raw = words.detach().contiguous().view(torch.uint8)[: wire.encoded_bytes(numel)]
    return wire.decode_tensor(raw, numel, dtype).to(dtype)


class _Sent(torch.autograd.Function):
    """See `to_words`; the gradient comes as a message, `[length]`, and becomes `[numel]`."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, wire: WireFormat, length: int) -> Tensor:
        ctx.form = (wire, flat.numel(), flat.dtype)
        return _encoded(flat, wire, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _decoded(gradient, *ctx.form), None, None


class _Received(torch.autograd.Function):
    """See `from_words`; the gradient `[numel]` goes back as a message, `[length]`."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, wire: WireFormat, numel: int, dtype: torch.dtype) -> Tensor:
        ctx.form = (wire, words.numel())
        return _decoded(
            words, wire, numel, dtype
        ).clone()  # no view, which an in-place operation of the stage would refuse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _encoded(gradient, *ctx.form), None, None, None


@contextmanager
def showing_dependence(model: nn.Module, wire: WireFormat) -> Iterator[None]:
    """Run what is inside so that values which depend on parameters, frozen ones too, say so by `requires_grad`; else without.

    Masks, tables and what a model is given do not: they travel as they are, since a rounded mask is another mask.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    with ExitStack() as stack:
        if wire.is_exact:
            stack.enter_context(torch.no_grad())
        else:
            stack.enter_context(torch.enable_grad())
            for parameter in frozen:
                stack.callback(parameter.requires_grad_, False)
                parameter.requires_grad_(True)
        yield
