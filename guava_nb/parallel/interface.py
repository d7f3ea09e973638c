"""The calls that every parallel mode has, for the replica that drives it, and what all modes do alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.nested import AxisOf
from guava_nb.parallel.loss_interface import Forward, Measured, Observer, Predicted
from guava_nb.parallel.state.full_state import StatePiece
from guava_nb.parallel.state.gradient_norm import nonfinite, scale_gradients
from guava_nb.parallel.unloaded import take_step

__all__ = ["ModelPart"]


class ModelPart(Protocol):
    """One rank's part of a spread model.

    Attributes:
        takes_inputs: this rank needs the inputs of a batch.
        takes_targets: this rank needs the targets.
        reports: what this rank measured counts; the others computed copies, or nothing.
        model: the local module.
        named: full name to local parameter, a tied one once.
        optimizer: of these parameters.
        first_group: the number in it of the whole optimizer's first group; None where that lies on other ranks.
        layout: how the whole model is spread, in words; "" for whole replicas.
        cut_along: how the next batch, a pair, is cut into micro-batches; None goes by length.
    """

    takes_inputs: bool = True
    takes_targets: bool = True
    reports: bool
    model: nn.Module
    named: dict[str, nn.Parameter]
    optimizer: Optimizer
    first_group: int | None = 0
    layout: str = ""
    cut_along: AxisOf | None = None
    _rows: int = 0
    _forwards: int = 0

    def train_batch(
        self, batch: Any, rows: int, factor: float, stand_in: bool = False, *, last: bool = False
    ) -> Measured:
        """Do forward and backward of one batch, this replica's rows; gradients of `loss_sum * factor` are added up.

        Args:
            batch: on the device; what this rank does not take may be None.
            rows: samples in it.
            factor: loss scale / rows of the whole step.
            stand_in: this replica got no rows, these only keep its collectives going: they count nothing.
            last: no batch of this step follows, so sums may begin during backward.
        """

    def stand_in(self, batch: Any) -> None:
        """Run a forward of one row for what it changes of the parameters, where a stand-in would run none; else do nothing."""

    def finish_gradients(self, policies: str = "") -> Collection[str]:
        """Complete the step's sums over replicas; every rank calls it once after its last `train_batch`.

        Args:
            policies: of buffers that the run's option leaves to us, the same on all ranks.

        Returns:
            Names of buffers that replicas changed differently, with no rule or choice for it.
        """

    def eval_batch(self, batch: Any, rows: int, stand_in: bool = False, observer: Observer | None = None) -> Measured:
        """Do a forward only and score the outputs; `observer` sees real outputs and targets where they are.

        Args:
            batch: `(inputs, targets)`, or what the user's step takes.
            rows: samples in it.
            stand_in: take part with nothing of one's own.
            observer: sees real outputs and targets where they are.
        """

    def predict_batch(self, batch: Any, rows: int, forward: Forward, stand_in: bool = False) -> list[Predicted]:
        """Do a forward only and return outputs and rows of each micro-batch, on ranks that have them; others have none.

        Args:
            batch: on the device; stages need (inputs, anything).
            rows: samples in it.
            forward: calls a whole model with a batch; stages have no whole model and do not call it.
            stand_in: this replica got no rows: nothing is returned.
        """

    def gradient_square(self) -> float:
        """Return this rank's share of the squared norm of the full gradient; waits for the device."""

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients in place."""
        scale_gradients(self.named, factor)

    def drop_gradients(self) -> None:
        """Forget all gradients, complete or not."""
        self._rows = self._forwards = 0
        for parameter in self.named.values():
            parameter.grad = None

    def nonfinite(self) -> str:
        """Return the first full name whose local gradient is not finite, or ""."""
        return nonfinite(self.named)

    def apply(self) -> None:
        """Step the optimizer; with ZeRO 1 the owners send their parameters at its end."""
        take_step(self.optimizer)

    def model_pieces(self) -> list[StatePiece]:
        """Return this rank's share of the full model's state."""

    def optimizer_pieces(self) -> dict[str, Any]:
        """Return this rank's share of the full optimizer's state."""

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None) -> None:
        """Take this rank's part of a state of full shapes, by name; without `optimizer` its state is left as it is."""
