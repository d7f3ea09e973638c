"""How losses are said: a mean over rows where the run's counts followed its rows, else a sum with its count."""

from __future__ import annotations

from typing import Any

import pytest

from guava_nb.errors import ConfigError
from guava_nb.export.loss import loss_text
from guava_nb.protocol.messages import Cell, Factory
from tests.support.training import spec

PAIR = [("float32", (4, 3)), ("int64", (4,))]
EVEN = [{"count": 8.0, "samples": 8}, {"count": 4.0, "samples": 4}]
UNEVEN = [{"count": 8.0, "samples": 8}, {"count": 3.0, "samples": 4}]


def said(
    name: str, history: list[dict[str, Any]], args: dict[str, Any] | None = None, text: str = "", look: Any = PAIR
) -> Any:
    cells = [Cell("loss", text)] if text else []
    return loss_text(spec(criterion=Factory(name, args or {}), step=None), cells, history, look)


def test_a_criterion_of_torch_is_a_mean_over_rows_where_the_run_shows_it() -> None:
    assert said("CrossEntropyLoss", EVEN).kind == "mean"
    assert said("cross_entropy", EVEN).name == "CrossEntropyLoss"
    assert said("MSELoss", [{"count": 16.0, "samples": 8}]).kind == "mean"


def test_ignored_labels_and_weights_give_a_sum_with_its_count() -> None:
    found = said("CrossEntropyLoss", UNEVEN, {"ignore_index": 2})
    assert (found.kind, found.args, found.count) == (
        "count",
        {"ignore_index": 2, "reduction": "sum"},
        "(targets != 2).sum()",
    )
    weighted = said("CrossEntropyLoss", EVEN, {"weight": [1.0, 2.0, 1.0]})
    assert weighted.kind == "count" and weighted.count.startswith("criterion.weight[targets[")


def test_before_the_first_step_nothing_is_taken_for_granted() -> None:
    assert said("CrossEntropyLoss", []).kind == "count"


def test_a_plain_sum_stays_one() -> None:
    assert said("MSELoss", UNEVEN, {"reduction": "sum"}).kind == "sum"


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        ("(outputs - targets).square().mean()", "mean"),
        ("(outputs.sum(), targets.numel())", "count"),
        ("outputs.sum(), None", "sum"),
        ("pair", "count"),
    ],
)
def test_a_function_of_the_users_is_read(returned: str, kind: str) -> None:
    text = f"def f(outputs, targets):\n    pair = outputs.sum(), 3\n    return {returned}\n"
    assert said("f", UNEVEN if kind != "mean" else EVEN, text=text).kind == kind


def test_what_cannot_be_read_is_refused() -> None:
    both = "def f(o, t):\n    if o:\n        return o, t\n    return o\n"
    with pytest.raises(ConfigError, match="sometimes a mean and sometimes a sum"):
        said("f", EVEN, text=both)
    with pytest.raises(ConfigError, match="other counts than its samples"):
        said("f", UNEVEN, text="def f(o, t):\n    return helper(o, t)\n")
    with pytest.raises(ConfigError, match="cannot be seen"):
        said("package:f", UNEVEN)
