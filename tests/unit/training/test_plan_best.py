from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.training.plan import Best


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("loss", ("loss", "min")),
        ("accuracy", ("accuracy", "max")),
        ("f1:max", ("f1", "max")),
        ("loss:max", ("loss", "max")),
    ],
)
def test_the_better_direction_is_known_or_said(text: str, made: tuple[str, str]) -> None:
    assert Best.of(text, ["f1"]) == made


@pytest.mark.parametrize(
    ("text", "has_accuracy", "said"),
    [
        ("f1", True, "only you know what is better of f1: write f1:max"),
        ("f1:up", True, "write f1:max"),
        ("f2", True, "no validation of this run gives; it gives loss, accuracy, perplexity, f1"),
        ("accuracy", False, "it gives loss, perplexity, f1"),
    ],
)
def test_what_would_be_guessed_is_refused(text: str, has_accuracy: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Best.of(text, ["f1"], has_accuracy)


@given(st.lists(st.floats(), min_size=1), st.sampled_from(["min", "max"]))
def test_the_newest_is_best_where_no_number_before_is_as_good(values: list[float], direction: str) -> None:
    found = Best("x", direction).is_newest([{"x": value} for value in values])
    *before, newest = values
    pick = max if direction == "max" else min
    numbers = [value for value in before if not math.isnan(value)]
    assert found is (
        not math.isnan(newest) and (not numbers or (pick(newest, *numbers) == newest and newest not in numbers))
    )


def test_what_is_no_number_is_neither() -> None:
    assert Best("accuracy", "max").is_newest([{"accuracy": None}]) is None
    assert Best("accuracy", "max").is_newest([{"accuracy": None}, {"accuracy": 0.5}]) is True
