"""What a worker says when memory runs out: only what is true of the work that it did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guava_nb.protocol.messages import Failure, FailureKind, FetchState, ParallelSpec
from guava_nb.worker import steps
from guava_nb.worker.steps import StepRunner
from tests.support.star import spec


def said(parallel: ParallelSpec | None, request: int = 0, **more: Any) -> str:
    sent: list[Any] = []
    runner = StepRunner(
        lambda message, buffers: sent.append(message), torch.device("cpu"), None, None, lambda: None, lambda *_: None
    )
    runner.begin(SimpleNamespace(spec=spec(parallel=parallel)), 0)  # type: ignore[arg-type]
    runner.fail(torch.OutOfMemoryError("CUDA out of memory"), "run-1", request=request, **more)
    assert sent[0].kind is FailureKind.MEMORY
    return str(sent[0].text)


@pytest.mark.parametrize(
    ("parallel", "request_id", "words", "not_said"),
    [
        (None, 0, "One sample alone does not fit here", "validation"),
        (None, 3, "a batch of a validation or prediction does not fit: give a loader with smaller", "One sample"),
        (
            ParallelSpec(mode="zero", dp=2, zero_stage=3),
            0,
            "accumulation_steps, activation checkpointing",
            "One sample",
        ),
        (ParallelSpec(mode="pipeline", pp=2), 0, "accumulation_steps, more micro-batches", "One sample"),
    ],
)
def test_what_does_not_fit(parallel: ParallelSpec | None, request_id: int, words: str, not_said: str) -> None:
    text = said(parallel, request_id)
    assert words in text and not_said not in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"at": (steps._IN, 4), "rows": 3},
            "(in step 5). This worker's part of the batch, 3 samples, does not fit here",
        ),
        ({"at": (steps._IN, 4), "rows": 1}, "(in step 5). One sample alone does not fit here"),
        ({"at": (steps._APPLYING, 4)}, "(while step 5 was applied). The optimizer's own step did not fit here"),
        ({"at": (steps._COPYING, 4)}, "(while the state after step 5 was copied). The copy of the state did not fit"),
    ],
)
def test_an_error_names_the_step_and_what_was_done_of_it(more: dict[str, Any], words: str) -> None:
    text = said(None, **more)
    assert words in text and ("One sample" in words or "One sample" not in text)


class Torn:
    """A replica whose state cannot be copied now."""

    def state(self, model: bool, optimizer: bool) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_state_that_cannot_be_copied_is_told_and_stays() -> None:
    """The worker keeps the run: what it holds is what it held before."""
    sent: list[Any] = []
    runner = StepRunner(
        lambda message, buffers: sent.append(message), torch.device("cpu"), None, None, lambda: None, lambda *_: None
    )
    runner.send_state(Torn(), FetchState(1, "run-1"), 0)  # type: ignore[arg-type]
    assert [type(message) for message in sent] == [Failure] and sent[0].kind is FailureKind.MEMORY
    assert "while the state after step 0 was copied" in sent[0].text
