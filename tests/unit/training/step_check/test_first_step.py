"""A first step and what the whole model gave for it: which are compared, when they differ, and what is said."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.step_check.first_step import can_be_compared, difference, sentence_on

CHECK: dict[str, Any] = {
    "outcome": "same", "known": False, "replaced_by_constants": [], "samples": 8, "batch_samples": 8, "loss_whole": 2.0,
    "gradient_norm": 3.0, "precision": "fp64", "run_precision": "fp64", "wire": "fp32", "worker": "w1", "seconds": 0.1,
}  # fmt: skip
STEP: dict[str, Any] = {"samples": 8, "loss": 2.0, "gradient_norm": 3.0, "skipped": False}


def test_only_a_check_of_all_samples_of_the_step_without_anything_random_is_compared() -> None:
    assert can_be_compared(CHECK, STEP) and not can_be_compared(None, STEP)
    odd = [
        {"outcome": "differs"},
        {"known": True},
        {"replaced_by_constants": ["dropout"]},
        {"samples": 4},
        {"samples": 4, "batch_samples": 4},  # the step has several batches
    ]
    assert not any(can_be_compared({**CHECK, **one}, STEP) for one in odd)
    assert not can_be_compared(CHECK, {**STEP, "skipped": True})
    assert not can_be_compared({"outcome": "not checked", "known": False}, STEP)


@pytest.mark.parametrize(
    ("check", "run", "allowed"),
    [
        ("fp64", "fp64", 1e-6),
        ("fp32", "fp32", 1e-3),
        ("fp64", "fp32", 1e-3),
        ("fp32", "bf16", 5e-2),
        ("bf16", "fp32", 5e-2),
    ],
)
def test_what_rounding_may_explain_is_no_difference(check: str, run: str, allowed: float) -> None:
    known = {**CHECK, "precision": check, "run_precision": run}
    for name in ("loss", "gradient_norm"):
        near, far = ({**STEP, name: STEP[name] * (1 + times * allowed)} for times in (0.5, 2.0))
        assert difference(known, near) == 0 and difference(known, far) == pytest.approx(2 * allowed, rel=0.2)


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_larger_difference_counts(loss: float, norm: float) -> None:
    found = difference(CHECK, {**STEP, "loss": loss, "gradient_norm": norm})
    wanted = max(abs(a - b) / max(a, b) for a, b in ((2.0, loss), (3.0, norm)))
    assert found == pytest.approx(wanted if wanted > 1e-6 else 0.0)


def test_a_loss_that_is_no_number_differs_and_an_unknown_norm_is_not_compared() -> None:
    assert difference(CHECK, {**STEP, "loss": math.inf}) == math.inf
    assert difference(CHECK, {**STEP, "loss": math.nan}) == math.inf
    assert difference(CHECK, {**STEP, "gradient_norm": None}) == 0


def test_the_sentence_has_both_and_the_way_out() -> None:
    assert "has the loss and gradient of the whole model, which w1 computed" in sentence_on(CHECK, STEP, "tensor")
    text = sentence_on(CHECK, {**STEP, "loss": 2.5, "gradient_norm": None}, "pipeline")
    assert "a loss of 2.5 and a gradient of norm not known; with the whole model w1 computed 2 and 3" in text
    assert "In pipeline mode" in text and "take data mode or zero_stage=1" in text


def test_what_each_forward_changes_is_named_as_the_cause() -> None:
    text = sentence_on({**CHECK, "moved": ("weight_u",)}, {**STEP, "loss": 2.5}, "pipeline")
    assert (
        "changes in each forward, and a pipeline makes one for each micro-batch" in text
        and "takes what another" not in text
    )
