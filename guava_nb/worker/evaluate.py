"""A worker's answers in a pass over data: validation and prediction of one batch at the last committed state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from guava_nb.data.codec import pack
from guava_nb.parallel.loss_interface import Forward
from guava_nb.protocol.messages import Evaluate, Evaluated, Message, MetricSpec, Predict, Predicted, Tree, Wanted
from guava_nb.replica.base_replica import BaseReplica
from guava_nb.replica.metrics import Measure, build_metrics
from guava_nb.replica.objective import user_function
from guava_nb.replica.outputs import columns_of, inputs_of, joined
from guava_nb.spec.factories import Resolve

__all__ = ["Evaluator"]

Reply = tuple[Message, Sequence[memoryview]]


class Evaluator:
    """Answers for one replica; metrics are made once and used for every batch.

    Args:
        replica: of the run.
        resolve: finds shared and importable objects by name.
        metrics: of the run's own validations, made at once so that what is missing here is told before training.
    """

    def __init__(self, replica: BaseReplica, resolve: Resolve, metrics: Sequence[MetricSpec] = ()) -> None:
        """Make the run's metrics; raises as `guava_nb.replica.metrics.build_metric`."""
        self._replica, self._resolve = replica, resolve
        self._specs: tuple[MetricSpec, ...] = tuple(metrics)
        self._measures: list[Measure] = build_metrics(metrics, resolve, replica.device)
        self._wanted: Wanted | None = None
        self._forward: Forward = _call

    def evaluate(self, message: Evaluate, batch: Any) -> Reply:
        """Return the sums over a batch, and the states of its metrics."""
        if message.metrics != self._specs:
            self._measures = build_metrics(message.metrics, self._resolve, self._replica.device)
            self._specs = message.metrics
        for measure in self._measures:
            measure.begin()
        observer = self._see if self._measures else None
        sums = self._replica.evaluate(batch, message.rows, observer, message.axes)
        rows = sums.rows if message.grouped else message.rows
        tree = Tree(b"")
        buffers: Sequence[memoryview] = ()
        if self._measures and sums.rows:  # a rank whose figures do not count has 0 rows
            tree, buffers = pack([measure.state() for measure in self._measures])
        reply = Evaluated(
            run_id=message.run_id,
            request_id=message.request_id,
            loss_sum=sums.loss_sum,
            count=sums.count,
            correct=sums.correct,
            scored=sums.scored,
            nll=sums.nll,
            rows=rows,
            metrics=tree,
        )
        return reply, buffers

    def _see(self, outputs: Any, targets: Any, rows: int) -> None:
        for measure in self._measures:
            measure.see(outputs, targets, rows)

    def predict(self, message: Predict, batch: Any) -> Reply:
        """Return what was asked for of the outputs on a batch."""
        if message.wanted != self._wanted:
            step = message.wanted.step
            self._forward = _call if step is None else user_function("predict_step", step, self._resolve, 2)
            self._wanted = message.wanted
        parts = self._replica.predict(batch, message.rows, self._forward, message.axes)
        if not parts:
            return Predicted(message.run_id, message.request_id, 0), ()
        columns = [columns_of(outputs, rows, message.wanted) for outputs, rows in parts]
        tree, buffers = pack(joined(columns))
        return Predicted(message.run_id, message.request_id, message.rows, tree), buffers


def _call(model: nn.Module, batch: Any) -> Any:
    return model(inputs_of(batch))
