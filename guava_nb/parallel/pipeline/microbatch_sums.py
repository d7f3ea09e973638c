"""Sums over the micro-batches of a batch."""

from __future__ import annotations

from torch import Tensor

from guava_nb.parallel.loss_interface import Loss, Measured

__all__ = ["MicrobatchSums"]


class MicrobatchSums:
    """Adds up what the micro-batches measured, without waiting for a device."""

    def __init__(self) -> None:
        self._loss: list[Tensor] = []
        self._counts: list[float | Tensor | None] = []
        self._scores: list[Tensor] = []

    def add(self, loss: Loss) -> None:
        """Add what one micro-batch measured."""
        self._loss.append(loss.value.detach() * loss.weight)
        self._counts.append(loss.count.detach() if isinstance(loss.count, Tensor) else loss.count)
        if loss.scores is not None:
            self._scores.append(loss.scores)

    def measured(self, rows: int) -> Measured:
        """Return the sums; on a rank without the last stage, or for a stand-in, they are nothing."""
        if not self._loss or rows == 0:
            return Measured(0.0, 0.0, None, rows)
        counts = [count for count in self._counts if count is not None]
        count = sum(counts[1:], counts[0]) if counts else None
        scores = sum(self._scores[1:], self._scores[0]) if self._scores else None
        return Measured(sum(self._loss[1:], self._loss[0]), count, scores, rows)
