"""Validation: sums of all batches and states of all metrics, put together in the loader's order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from guava_nb.config.mesh import Mesh
from guava_nb.data.codec import unpack
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.errors import RemoteProtocolError
from guava_nb.evaluation.batch_orders import Answer
from guava_nb.protocol.messages import Evaluate, Evaluated, Generated, Message, MetricSpec, Tree
from guava_nb.replica.metrics import Merge
from guava_nb.sync.group_exchange import parts_for

__all__ = ["EvaluationResult", "Validation"]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What a validation came to.

    Attributes:
        loss: the mean.
        accuracy: share of right predictions, 0 to 1; None where it has no meaning. Ignored targets do not count.
        samples: how many.
        perplexity: exp of the mean negative log-likelihood of a language model's targets; None for all others.
        metrics: the user's.
    """

    loss: float
    accuracy: float | None
    samples: int
    perplexity: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return it as plain data; a metric of the user's may have the name "perplexity"."""
        language = {} if self.perplexity is None else {"perplexity": self.perplexity}
        return {"loss": self.loss, "accuracy": self.accuracy, "samples": self.samples, **language, **self.metrics}


class Validation:
    """The question that a validation asks; a `guava_nb.evaluation.batch_orders.Question`.

    Args:
        specs: metrics beside loss and accuracy.
        merges: one for each.
    """

    verb = "validating"

    def __init__(self, specs: Sequence[MetricSpec] = (), merges: Sequence[Merge] = ()) -> None:
        """Start with nothing counted."""
        self._specs, self._merges = tuple(specs), list(merges)
        self._loss_sum = self._count = 0.0
        self._correct: int | None = 0
        self._nll: float | None = 0.0
        self._rows = self._scored = 0

    def part(self, batch: Any, wants_whole: bool) -> Any:
        """Return the whole batch: the loss needs the targets."""
        return batch

    def for_stage(self, mesh: Mesh, stage: int, piece: Any, wants_whole: bool) -> Any:
        """Return inputs for the first stage, targets for the last; for both the whole batch where it is preprocessed."""
        return parts_for(mesh, stage, [piece], wants_whole)[0]

    def message(self, run_id: str, request: int, rows: int, tree: Tree, grouped: bool) -> Evaluate:
        """Return the record that asks for the sums over a batch."""
        return Evaluate(run_id=run_id, request_id=request, rows=rows, batch=tree, grouped=grouped, metrics=self._specs)

    def check(self, answer: Message, payload: memoryview, rows: int) -> None:
        """Check an answer on a batch of so many rows; errors as in `Question.check`."""
        if not isinstance(answer, Evaluated) or not 0 <= answer.rows <= rows:
            raise RemoteProtocolError(f"it is no validation of {rows} rows")
        if answer.metrics.structure:
            states = unpack(answer.metrics, payload)
            if not isinstance(states, list) or len(states) != len(self._merges):
                raise RemoteProtocolError(f"it has no state for each of the {len(self._merges)} metrics")

    def heard(self, message: Generated) -> None:
        """A validation makes no tokens."""

    def take(self, batch: LoadedBatch, answers: Sequence[Answer]) -> None:
        """Add the sums of one batch."""
        for message, payload in answers:
            assert isinstance(message, Evaluated)
            self._loss_sum += message.loss_sum
            self._count += message.count
            self._rows += message.rows
            self._scored += message.scored
            self._correct = _added(self._correct, message.correct)
            self._nll = _added(self._nll, message.nll)
            if message.metrics.structure:
                for merge, state in zip(self._merges, unpack(message.metrics, payload), strict=True):
                    merge.add(state)

    def result(self) -> EvaluationResult:
        """Return the figures of all batches."""
        return EvaluationResult(
            loss=self._loss_sum / self._count if self._count else float("nan"),
            accuracy=self._correct / self._scored if self._scored and self._correct is not None else None,
            samples=self._rows,
            perplexity=_exp(self._nll / self._scored) if self._scored and self._nll is not None else None,
            metrics={spec.name: merge.result() for spec, merge in zip(self._specs, self._merges, strict=True)},
        )

    def notes(self) -> dict[str, str]:
        """Return what to know of metrics whose figure over all batches need not be what it seems to be, by name."""
        return {
            spec.name: f"metric {spec.name!r} is no mean over its rows: it gives {merge.no_mean[0]:.4g} of a batch, and "
            f"{merge.no_mean[1]:.4g} as the mean of the halves of that batch. What is shown is the mean of its values of the "
            "batches, weighted by their rows, not its value of all samples together. For that let it return (sum, count) where "
            "it is a sum over a count, else give a torchmetrics metric, or take the outputs from predict(raw=True)"
            for spec, merge in zip(self._specs, self._merges, strict=True)
            if merge.no_mean
        }


def _added(total: Any, more: Any) -> Any:
    """A sum that has no meaning once a part of it has none."""
    return None if total is None or more is None else total + more


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700.0 else math.inf
