"""What a worker says when memory runs out: only what is true of the work that it did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guava_nb.protocol.messages import FailureKind, ParallelSpec
from guava_nb.worker.steps import StepRunner
from tests.support.star import spec


def said(parallel: ParallelSpec | None, request: int = 0) -> str:
    sent: list[Any] = []
    runner = StepRunner(
        lambda message, buffers: sent.append(message), torch.device("cpu"), None, None, lambda: None, lambda *_: None
    )
    runner.begin(SimpleNamespace(spec=spec(parallel=parallel)), 0)  # type: ignore[arg-type]
    runner.fail(torch.OutOfMemoryError("CUDA out of memory"), "run-1", request=request)
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
