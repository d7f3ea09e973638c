"""What outputs are worth beside their loss: right predictions, and how likely a language model held the true tokens.

Pure; knows shapes only. Torch has the classes on axis 1 of outputs, [N, C, d1, ...] for targets [N, d1, ...]; every
language model has them last, [N, T, C] for [N, T]. Where the shapes allow one reading only, that one is meant. A loss of the
user's own is read by the cross entropy that it takes: which logits and targets these are is known there alone (shifted, cut,
padded).

Shapes: N samples, T tokens of each, C classes; outputs [N, C, ...] or [N, ..., C] for targets [N, ...].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from guava_nb.errors import ConfigError
from guava_nb.nested import leaves

__all__ = ["Scoring", "TokenScores"]


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
        """Return outputs and targets as torch's criteria of classes want them: `[N, C, ...]` and `[N, ...]`, or both flattened.

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
        is_language = self.takes_logits and is_last and outputs.ndim > 2
        return _scores(
            right, scored, _nll(outputs.flatten(0, -2), targets.flatten(), self.ignore_index) if is_language else None
        )


class TokenScores(TorchFunctionMode):
    """Watches a loss, entered as a context, for the cross entropy of a language model's tokens.

    Args:
        rows: samples of the batch; more targets than these are tokens.
    """

    def __init__(self, rows: int) -> None:
        """Begin with none."""
        super().__init__()
        self._rows, self._seen = rows, list[tuple[torch.Size, Tensor]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and score what a cross entropy was given."""
        if func in (functional.cross_entropy, functional.nll_loss):
            with torch.no_grad():
                self._note(**dict(zip(("input", "target"), args, strict=False)), **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _note(self, input: Tensor, target: Tensor, ignore_index: int = -100, **_: Any) -> None:
        """Score what a cross entropy was given: outputs `[N, C]` or `[N, C, T]`, labels `[N]` or `[N, T]`."""
        if input.ndim not in (2, 3) or target.is_floating_point() or target.numel() <= self._rows:
            return
        counts = target != ignore_index
        right = ((input.argmax(1) == target) & counts).sum()
        self._seen.append((input.shape, _scores(right, counts.sum(), _nll(input, target, ignore_index))))

    def of_outputs(self, outputs: Any) -> Tensor | None:
        """Return the scores, `Scoring.scores`, if the loss was one cross entropy of outputs [N, T, C]; else None."""
        floats = [one for one in leaves(outputs) if isinstance(one, Tensor) and one.ndim == 3]
        shapes = [one.shape for one in floats if one.is_floating_point() and len(one) == self._rows]
        if len(self._seen) != 1 or self._seen[0][0] in shapes:  # that one has its classes on axis 1
            return None
        return self._of_classes({shape[-1] for shape in shapes})

    def of_model(self, model: nn.Module) -> Tensor | None:
        """Return the scores, `[3]`, if the loss was one over the tokens of which the model has an embedding; else None."""
        # A part of an embedding, as tensor mode makes it, knows the number of all tokens by the same name.
        return self._of_classes({getattr(one, "num_embeddings", None) for one in model.modules()})

    def _of_classes(self, classes: set[int | None]) -> Tensor | None:
        """Return the scores, `[3]`, if the loss was one cross entropy of as many classes as one of these; else None."""
        found = [scores for shape, scores in self._seen if shape[1] in classes]
        return found[0] if len(found) == len(self._seen) == 1 else None


def _scores(right: Tensor, scored: Tensor, nll: Tensor | None) -> Tensor:
    """Return `[right, scored, nll]`, `[3]`, of scalars; float64, or float32 on a device that has no other."""
    scores = torch.stack([right, scored, torch.zeros_like(scored)])
    scores = scores.to(torch.float32 if scores.device.type == "mps" else torch.float64)
    scores[2] = float("nan") if nll is None else nll
    return scores


def _nll(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the summed negative log-likelihood, a scalar, of logits `[N, C, ...]` and labels `[N, ...]`."""
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return functional.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="sum")


def _fits(outputs: Tensor, targets: Tensor) -> tuple[bool, bool]:
    """Whether classes can be on axis 1, `[N, C, ...]`, and on the last axis, `[N, ..., C]`, where that is another one."""
    shape, wanted = outputs.shape, targets.shape
    if not outputs.shape[1] or not outputs.shape[-1]:
        return False, False
    return wanted == shape[:1] + shape[2:], outputs.ndim > 2 and wanted == shape[:-1]


def _misfit(outputs: Tensor, targets: Tensor) -> str:
    """Say how outputs, `[N, C, ...]` or `[N, ..., C]`, and targets, `[N, ...]`, do not fit."""
    if targets.numel() * outputs.shape[-1] == outputs.numel():
        way = "one of them is flattened: flatten both or neither"
    else:
        way = "it needs outputs [N, C, ...] or [N, ..., C] for targets [N, ...], with C classes"
    return f"outputs {_shape(outputs)} do not fit the targets {_shape(targets)} of this loss of classes; {way}"


def _shape(tensor: Tensor) -> str:
    """Return a shape as a person reads it."""
    return str(list(tensor.shape))
