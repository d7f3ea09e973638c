"""What the parallel modes ask of a loss and tell about it; a module that brings a loss need not import torch's spreading.

A loss is always a sum with its true denominator: the mean over a global batch is the sum of sums over the sum of
counts, however the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "Criterion",
    "Forward",
    "Learning",
    "Observer",
    "Loss",
    "MakeOptimizer",
    "Measured",
    "Objective",
    "Predicted",
    "measured",
]


class Loss(Protocol):
    """A loss in parts.

    Attributes:
        value: scalar with the graph; the sum over the batch is `value * weight`.
        weight: 1 for a sum, the number of samples for a mean.
        count: denominator of this batch; None: the plain sum over the global batch is minimised.
        scores: `[right, scored, nll]`, see `guava_nb.replica.scores`, where asked for and where they have a meaning.
    """

    @property
    def value(self) -> Tensor: ...  # noqa: D102 - described above
    @property
    def weight(self) -> float: ...  # noqa: D102
    @property
    def count(self) -> float | Tensor | None: ...  # noqa: D102
    @property
    def scores(self) -> Tensor | None: ...  # noqa: D102


#: Sees outputs, targets and rows, for code that measures something beside the loss.
Observer = Callable[[Any, Any, int], None]


class Objective(Protocol):
    """Runs a whole model on a batch of so many rows; with `want_scores` also scores the outputs."""

    def __call__(
        self, model: nn.Module, batch: Any, rows: int, want_scores: bool = False, observer: Observer | None = None
    ) -> Loss:
        """Return the loss; `observer` sees outputs and targets."""


#: Measures outputs against targets of so many rows: what the last stage of a pipeline calls.
Criterion = Callable[[Any, Any, int], Loss]
#: Calls a whole model with a batch and returns its outputs.
Forward = Callable[[nn.Module, Any], Any]
#: Outputs, and the rows that they are of.
Predicted = tuple[Any, int]
#: Makes the optimizer of named parameters, in the order given.
MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], Optimizer]


@dataclass(frozen=True, slots=True)
class Learning:
    """How a model learns.

    Attributes:
        objective: runs a whole model and measures it.
        make_optimizer: makes the optimizer of named parameters. It is called once for the whole model, to learn its
            groups, and once for what this rank holds.
        criterion: measures outputs against targets; only a pipeline needs it.
        buffers: what becomes of buffers that replicas change unlike, see `replicas.buffer_policy`.
        wire: name of the format in which activations and their gradients pass between the stages of a pipeline.
    """

    objective: Objective
    make_optimizer: MakeOptimizer
    criterion: Criterion | None = None
    buffers: str = "auto"
    wire: str = "fp32"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one batch gave on this rank. Tensors are read late, so that no thread waits for a device too early.

    Attributes:
        loss_sum: sum of the loss over the rows.
        count: its denominator; None where the plain sum is minimised.
        scores: `[right, scored, nll]`, None where they have no meaning.
        rows: samples; 0 for a stand-in.
    """

    loss_sum: float | Tensor
    count: float | Tensor | None
    scores: Tensor | None
    rows: int


def measured(loss: Loss, rows: int) -> Measured:
    """Return a loss without its graph."""
    count = loss.count.detach() if isinstance(loss.count, Tensor) else loss.count
    return Measured(loss.value.detach() * loss.weight, count, loss.scores, rows)
