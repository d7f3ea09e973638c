"""What outputs are worth beside their loss: right predictions, and how likely a language model held the true tokens.

Pure; knows shapes only. Torch has the classes on axis 1 of outputs, [N, C, d1, ...] for targets [N, d1, ...]; every
language model has them last, [N, T, C] for [N, T]. Where the shapes allow one reading only, that one is meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from guava_nb.errors import ConfigError

__all__ = ["Scoring"]


@dataclass
class Scoring:
    """Reads and scores the outputs of one criterion.

    Attributes:
        ignore_index: targets that do not count.
        takes_logits: outputs are logits or log-probabilities of the classes, so that their likelihood is known.
        is_last: whether classes are on the last axis of outputs with more than two; None before a batch has told. Later
            batches whose shapes fit both follow it.
    """

    ignore_index: int = -100
    takes_logits: bool = False
    is_last: bool | None = field(default=None, init=False)

    def in_torchs_order(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets as torch's criteria of classes want them.

        Raises:
            ConfigError: the shapes of outputs and integer targets fit in no way, or in two.
        """
        if targets.is_floating_point() or outputs.ndim < 2:
            return outputs, targets  # probabilities of classes, or one sample without a batch
        first, last = _fits(outputs, targets)
        if not (first or last):
            raise ConfigError(_misfit(outputs, targets))
        if first and last and self.is_last is None:
            raise ConfigError(
                f"outputs {_shape(outputs)} for targets {_shape(targets)} can be read with the classes on axis 1 (torch's order) "
                "or on the last axis: share a loss function that says which, such as "
                "F.cross_entropy(outputs.flatten(0, -2), targets.flatten()) for the last"
            )
        if first != last:
            self.is_last = last
        # Flat, not transposed: logits of which each worker of a tensor group has some classes need not be put together.
        return (outputs.flatten(0, -2), targets.flatten()) if self.is_last else (outputs, targets)

    def scores(self, outputs: Any, targets: Any) -> Tensor | None:
        """Return `[right, scored, nll]`: right predictions, targets they are counted over, negative log-likelihood.

        None where outputs are not classes for integer targets. `nll`, in nats, is the sum over the scored targets of a
        language model, [N, T, C] for [N, T], and NaN for all others.
        """
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim < 2:
            return None
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            return None
        first, last = _fits(outputs, targets)
        is_last = last if first != last else self.is_last
        axis = outputs.ndim - 1 if is_last else 1
        if not (first or last) or (is_last is None and outputs.ndim > 2) or outputs.shape[axis] < 2:
            return None
        counts = (targets != self.ignore_index) & (targets >= 0)
        right, scored = ((outputs.argmax(dim=axis) == targets) & counts).sum(), counts.sum()
        scores = torch.stack([right, scored, torch.zeros_like(scored)])
        scores = scores.to(torch.float32 if scores.device.type == "mps" else torch.float64)
        scores[2] = self._nll(outputs, targets) if is_last and outputs.ndim > 2 else float("nan")
        return scores

    def _nll(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        if not self.takes_logits:
            return float("nan")
        flat = outputs.flatten(0, -2)
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat
        return functional.cross_entropy(flat, targets.flatten(), ignore_index=self.ignore_index, reduction="sum")


def _fits(outputs: Tensor, targets: Tensor) -> tuple[bool, bool]:
    """Whether classes can be on axis 1, and on the last axis where that is another one."""
    shape, wanted = outputs.shape, targets.shape
    if not outputs.shape[1] or not outputs.shape[-1]:
        return False, False
    return wanted == shape[:1] + shape[2:], outputs.ndim > 2 and wanted == shape[:-1]


def _misfit(outputs: Tensor, targets: Tensor) -> str:
    if targets.numel() * outputs.shape[-1] == outputs.numel():
        way = "one of them is flattened: flatten both or neither"
    else:
        way = "it needs outputs [N, C, ...] or [N, ..., C] for targets [N, ...], with C classes"
    return f"outputs {_shape(outputs)} do not fit the targets {_shape(targets)} of this loss of classes; {way}"


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
