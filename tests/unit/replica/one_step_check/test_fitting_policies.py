from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from guava_nb.replica.one_step_check.differences import Measured
from guava_nb.replica.one_step_check.fitting_policies import unlike_buffers

#: What two pieces change, and what the whole batch does.
CASES: dict[str, tuple[Any, Any, Any]] = {
    "tokens of each sample": (12, 12, 24),
    "length of a text": (12, 12, 12),
    "positives": (1, 3, 4),
    "mean": (0.2, 0.4, 0.3),
    "largest": (5, 7, 7),
    "the largest came first": (7, 5, 7),
}


def measured(values: Mapping[str, float]) -> Measured:
    return Measured(0.0, {}, {name: torch.tensor(value) for name, value in values.items()}, (), ())


def merged(policies: str) -> Measured:
    merge = {"first": lambda a, b: a, "sum": lambda a, b: a + b, "average": lambda a, b: (a + b) / 2}[policies]
    return measured({name: type(a)(merge(a, b)) for name, (a, b, _) in CASES.items()})


def found(many: str, option: str = "auto", counted: Mapping[str, bool] | None = None) -> Any:
    whole = measured({name: value for name, (_, _, value) in CASES.items()})
    return unlike_buffers(whole, merged(many), list(CASES), option, counted or {}, merged)


def test_the_policy_that_gives_what_the_whole_batch_gives_is_found_where_the_usual_rule_does_not() -> None:
    unlike, fits = found("sum")
    assert fits == {"tokens of each sample": "sum", "length of a text": "first", "positives": "sum", "mean": "average"}
    assert unlike == ("largest", "the largest came first"), "what the first one has by chance is no rule"


@pytest.mark.parametrize("counted", [False, True])
def test_what_is_added_up_where_it_differs_has_a_policy_where_it_may_be_alike(counted: bool) -> None:
    """A position that goes round its end counts samples by the usual rules, which tell where it does."""
    _, fits = found("sum", counted={"positives": counted})
    assert ("positives" in fits) is not counted


def test_what_a_person_chose_stays() -> None:
    unlike, fits = found("sum", option="length*=sum")
    assert "length of a text" in unlike and "length of a text" not in fits
