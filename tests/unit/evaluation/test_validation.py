"""The figures of a validation are means over what they are counted over, and None where they have no meaning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.errors import RemoteProtocolError
from guava_nb.evaluation.validation import EvaluationResult, Validation
from guava_nb.protocol.messages import Evaluated, Message, Predicted, Tree


def result(*answers: dict[str, Any]) -> EvaluationResult:
    validation = Validation()
    batch: Any = LoadedBatch.__new__(LoadedBatch)
    for answer in answers:
        whole = {"run_id": "r", "request_id": 1, "loss_sum": 6.0, "count": 3.0, "correct": None, "rows": 2, **answer}
        validation.take(batch, [(Evaluated(**whole), memoryview(np.zeros(0)))])
    return validation.result()


def test_accuracy_counts_the_targets_that_are_scored_and_perplexity_is_exp_of_their_mean() -> None:
    found = result({"correct": 2, "scored": 5, "nll": 5.0}, {"correct": 1, "scored": 1, "nll": 1.0})
    assert found == EvaluationResult(loss=2.0, accuracy=0.5, samples=4, perplexity=pytest.approx(math.e))
    assert found.record() == {"loss": 2.0, "accuracy": 0.5, "samples": 4, "perplexity": pytest.approx(math.e)}


def test_what_has_no_meaning_in_one_batch_has_none() -> None:
    found = result({"correct": 2, "scored": 5, "nll": 5.0}, {})
    assert (found.accuracy, found.perplexity) == (None, None)
    assert "perplexity" not in found.record()
    assert result({"correct": 1, "scored": 2}).record() == {"loss": 2.0, "accuracy": 0.5, "samples": 2}
    assert result({"correct": 0, "scored": 2, "nll": 4000.0}).perplexity == math.inf


_SOUND: dict[str, Any] = {"run_id": "r", "request_id": 1, "loss_sum": 1.0, "count": 1.0, "correct": None, "rows": 2}


@pytest.mark.parametrize(
    "answer",
    [
        Predicted("r", 1, 2),
        Evaluated(**{**_SOUND, "rows": 3}),
        Evaluated(**{**_SOUND, "rows": -1}),
        Evaluated(**_SOUND, metrics=Tree(b"\xc1")),
        Evaluated(**_SOUND, metrics=Tree(b"\x01")),
    ],
    ids=["another record", "too many rows", "negative rows", "damaged metrics", "no list of metrics"],
)
def test_what_is_no_answer_to_a_batch_is_a_violation_of_its_sender(answer: Message) -> None:
    Validation().check(Evaluated(**_SOUND), memoryview(b""), 2)
    with pytest.raises(RemoteProtocolError):
        Validation().check(answer, memoryview(b""), 2)
