"""Outer steps over flat tensors: local SGD, DiLoCo, SparseLoCo.

A round begins with the same weights at every member (with "partial" less what that member's earlier messages left out). Each
takes its inner steps, and what it came away from the beginning is its pseudo-gradient. The outer step takes their mean,
weighted by samples (with "partial" of each element over those who sent it), as the gradient of the common weights at the
beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from guava_nb.wire_formats.dense import Unchanged
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import WireFormat

__all__ = ["OUTER_METHODS", "OuterMethod", "mixed", "pseudo_gradient", "sparse_format"]

#: Elements that are compared with each other. Of signs more, since the one level of a chunk is a fifth of a short one's bytes.
_CHUNK, _CHUNK_OF_SIGNS = 4096, 65_536


def pseudo_gradient(before: Tensor, after: Tensor) -> Tensor:
    """Return which way a member's inner steps went, as a gradient: what it began with less what it has, `[numel]`.

    Of half types the difference is taken in float32; complex numbers stay complex.
    """
    dtype = torch.promote_types(before.dtype, torch.float32)
    return before.detach().to(dtype) - after.detach().to(dtype)


def mixed(own: Tensor, sent: Tensor, common: Tensor, mixing: float | None = None) -> Tensor:
    """Return what a member goes on with when the weights come to which its last message led, and it has taken steps meanwhile.

    Args:
        own: its weights now, `[numel]`; `sent` and `common` alike.
        sent: those at its message.
        common: those that all messages led to.
        mixing: how much of its own weights it keeps, the rest are the common ones (Streaming DiLoCo's alpha, arXiv:2501.18512).
            None: all that its steps came to since its message, on top of the common ones (DaSGD, arXiv:2006.00441).
    """
    if mixing is not None:
        return torch.lerp(common.detach(), own.detach(), mixing)
    way = pseudo_gradient(sent, own)
    return (common.detach().to(way.dtype) - way).to(own.dtype)


@dataclass(frozen=True)
class OuterMethod:
    """One outer step, and how the pseudo-gradients travel to it.

    Attributes:
        name: as a user writes it.
        learning_rate: of the outer step.
        momentum: Nesterov's; 0 has no buffer.
        wire_format: of the pseudo-gradients.
        decay: how much of what a member did not send counts in its next round.
        keeps_rest: what a member did not send stays in its own weights, where its next round begins, and an element becomes the
            mean of those members only that sent it.
    """

    name: str
    learning_rate: float = 1.0
    momentum: float = 0.0
    wire_format: WireFormat = field(default_factory=Unchanged)
    decay: float = 1.0
    keeps_rest: bool = False

    def step(self, weights: Tensor, gradient: Tensor, buffer: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the new weights and the new momentum buffer; what was given stays as it is.

        Args:
            weights: those that the round began with, `[numel]`.
            gradient: the mean of the pseudo-gradients, `[numel]`.
            buffer: what the step before returned, `[numel]`; None in the first.

        Returns:
            As `torch.optim.SGD(nesterov=True)` steps, in the gradient's type, then in that of the weights.
        """
        if self.momentum:
            buffer = gradient.clone() if buffer is None else buffer * self.momentum + gradient
            gradient = gradient + buffer * self.momentum
        way = gradient if self.learning_rate == 1 else gradient * self.learning_rate
        moved = weights.detach().to(gradient.dtype) - way
        return moved.to(weights.dtype), buffer


def sparse_format(density: float = 1 / 64, bits: int = 2, of_senders: bool = False) -> TopK:
    """Return the format of sparse pseudo-gradients: of each chunk that part of the elements, at least one, at so many bits.

    Args:
        density: part of the elements that is sent.
        bits: of each value: 1, 2, 4, 8 or 32.
        of_senders: as of `TopK`.

    Raises:
        ConfigError: the numbers make no format.
    """
    chunk = _CHUNK_OF_SIGNS if bits == 1 else _CHUNK
    return TopK(max(1, round(density * chunk)), chunk, bits, of_senders)


#: `average`: local SGD, the mean of the members' weights. `nesterov`: DiLoCo (arXiv:2311.08105). `sparse`: SparseLoCo
#: (arXiv:2508.15706), whose error feedback takes the place of the outer momentum. Numbers as in the papers. `partial`: partial
#: averaging, the method of our own that `tests/benchmarks/RESULTS.md` has measured beside them.
OUTER_METHODS: Mapping[str, OuterMethod] = {
    one.name: one
    for one in (
        OuterMethod("average"),
        OuterMethod("nesterov", learning_rate=0.7, momentum=0.9),
        OuterMethod("sparse", wire_format=sparse_format(), decay=0.95),
        OuterMethod("partial", wire_format=sparse_format(of_senders=True), keeps_rest=True),
    )
}
