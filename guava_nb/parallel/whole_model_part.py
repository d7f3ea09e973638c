"""Modes without stages: every rank runs the whole forward, on whole layers or on its part of each."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import TrainingError
from guava_nb.parallel.foreign_use import PartsInUse
from guava_nb.parallel.interface import ModelPart
from guava_nb.parallel.loss_interface import Forward, Measured, Objective, Observer, Predicted, measured
from guava_nb.parallel.module_state import evaluating, kept_buffers
from guava_nb.parallel.replicas.batch_norm import explaining_few_rows, taking_one_row
from guava_nb.parallel.replicas.data_axis import DataAxis
from guava_nb.parallel.state.full_state import StatePiece
from guava_nb.parallel.state.gradient_norm import gradient_square
from guava_nb.parallel.state.local_tensors import LocalTensors
from guava_nb.parallel.step_errors import explained
from guava_nb.parallel.tensor.tensor_sums import TensorSums
from guava_nb.parallel.tensor.vocab_loss import whole_logits

__all__ = ["WholeModelPart"]

_NOTHING = Measured(0.0, 0.0, None, 0)


def _whole(observer: Observer) -> Observer:
    """Let a user's metric see whole logits: not everything it may do with them works on a part."""
    return lambda outputs, targets, rows: observer(whole_logits(outputs), targets, rows)


class WholeModelPart(ModelPart):
    """Runs the whole model's forward; one rank of those that share each layer reports."""

    def __init__(
        self,
        model: nn.Module,
        holding: LocalTensors,
        objective: Objective,
        optimizer: Optimizer,
        data: DataAxis,
        tensor: TensorSums,
        members: list[list[str]],
        owned: bool = False,
    ) -> None:
        """Join what `parallelize` made.

        Args:
            model: spread already.
            holding: what this rank holds.
            objective: runs the model and measures it.
            optimizer: of `holding.named`, or of a share of them.
            data: what replicas do together.
            tensor: what ranks that share each layer do together.
            members: full names of each group of `optimizer`.
            owned: ZeRO 1: `optimizer` was cut to what this replica owns.
        """
        self.model = model
        self.named = holding.named
        self.optimizer = optimizer
        self.reports = holding.axes.tp == 0
        self._holding = holding
        self._objective = objective
        self._data = data
        self._tensor = tensor
        self._members = members
        self._owned = owned
        self._parts_in_use = PartsInUse(model)

    # -------------------------------------------------------------------------------------------------------- training

    def train_batch(
        self, batch: Any, rows: int, factor: float, stand_in: bool = False, *, last: bool = False
    ) -> Measured:
        """Do forward and backward of one batch.

        Raises:
            TrainingError: the loss depends on no trainable parameter.
        """
        if not stand_in:
            with self._data.gathering(stand_in):
                return self._train(batch, rows, factor, last)
        if self._data.runs_stand_ins:
            with (
                self._data.standing_in(), taking_one_row(self.model), kept_buffers(self.model),
                self._data.gathering(stand_in),
            ):  # fmt: skip
                self._train(batch, rows, 0.0, last)
            self._rows, self._forwards = self._rows - rows, self._forwards - 1
        return _NOTHING

    def stand_in(self, batch: Any) -> None:
        """Run a forward of one row for what it changes of the parameters, where a stand-in would run none; else do nothing."""
        if self._data.runs_stand_ins:
            return
        gradients = [(p, p.grad) for p in self.named.values()]  # a step function may call backward by itself
        with taking_one_row(self.model), kept_buffers(self.model), self._data.gathering(True):
            self._objective(self.model, batch, 1, False)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def _train(self, batch: Any, rows: int, factor: float, last: bool) -> Measured:
        try:
            self._data.begin_forward()
            with explaining_few_rows(self.model), self._parts_in_use.watched():
                loss = self._objective(self.model, batch, rows, False)
            if not loss.value.requires_grad:
                raise TrainingError(
                    "the loss depends on no trainable parameter: check requires_grad, and that the loss is computed "
                    "from the model's outputs without detach(), item() or no_grad(). Where a worker's part of a batch may have "
                    "nothing that counts, return ((outputs * 0).sum(), 0) for it in this mode: all workers go backward together"
                )
            value = self._data.end_forward(loss.value)
            self._data.begin(last)
            (value * (loss.weight * factor * self._data.factor)).backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self._data.recover()
            if (told := explained(error, self._data.sharded is not None)) is not None:
                raise told from error
            raise
        self._data.end()
        self._rows, self._forwards = self._rows + rows, self._forwards + 1
        return measured(loss, rows)

    def finish_gradients(self, policies: str = "") -> Collection[str]:
        """Complete the step's sums."""
        unlike = self._data.finish(self.named, self._rows, self._forwards, policies)
        if self._tensor.is_active and self._data.apart is not None and bool(self._data.apart > 0):
            self._data.settle()
        self._tensor.finish(self.named)
        self._rows = self._forwards = 0
        return unlike

    def eval_batch(self, batch: Any, rows: int, stand_in: bool = False, observer: Observer | None = None) -> Measured:
        """Do a forward only, in evaluation mode."""
        if stand_in and not self._data.runs_stand_ins:
            return _NOTHING
        standing = self._data.standing_in() if stand_in else contextlib.nullcontext()
        passing, watched = self._data.forward_only("evaluation"), self._parts_in_use.watched()
        with torch.no_grad(), evaluating(self.model), standing, passing, watched, self._data.gathering(stand_in):
            loss = self._objective(
                self.model, batch, rows, True, None if stand_in or observer is None else _whole(observer)
            )
            self._data.end_gathers(loss.value.device)
        return _NOTHING if stand_in else measured(loss, rows)

    def predict_batch(self, batch: Any, rows: int, forward: Forward, stand_in: bool = False) -> list[Predicted]:
        """Return the outputs, in evaluation mode; none for a stand-in."""
        if stand_in and not self._data.runs_stand_ins:
            return []
        standing = self._data.standing_in() if stand_in else contextlib.nullcontext()
        with torch.no_grad(), evaluating(self.model), standing, self._data.forward_only("prediction"):
            outputs = whole_logits(forward(self.model, batch))  # all ranks that share the layers gather alike
        return [] if stand_in else [(outputs, rows)]

    # ------------------------------------------------------------------------------------------------------- gradients

    def gradient_square(self) -> float:
        """Return this rank's share of the squared norm of the full gradient. Here a step waits for the device, once."""
        axes, apart = self._holding.axes, self._data.apart
        square = gradient_square(self.named, self._holding.layouts, axes.dp, axes.tp)
        told, is_apart = (
            (float(square), 0.0) if apart is None else torch.stack([square.to(apart.device), apart]).tolist()
        )
        self._data.end_step()
        if is_apart > 0:
            self._data.settle()
            told = float(gradient_square(self.named, self._holding.layouts, axes.dp, axes.tp))
        return float(told)

    def drop_gradients(self) -> None:
        """Forget all gradients, and sums under way."""
        self._data.drop()
        super().drop_gradients()

    # ----------------------------------------------------------------------------------------------------------- state

    def model_pieces(self) -> list[StatePiece]:
        """Return this rank's share of the full model's state."""
        return self._holding.pieces()

    def optimizer_pieces(self) -> dict[str, Any]:
        """Return this rank's share of the full optimizer's state."""
        return self._holding.optimizer_pieces(self.optimizer, self._members, self._owned)

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None) -> None:
        """Take this rank's part of a full state, tensors of full shapes by name.

        Raises:
            CheckpointError: it is another model's.
        """
        self._data.release()
        self._holding.load(model)
        self._data.loaded()
        if optimizer is not None:
            self._holding.load_optimizer(self.optimizer, self._members, optimizer)
