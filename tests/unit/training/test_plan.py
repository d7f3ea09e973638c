from __future__ import annotations

from typing import Any

import pytest

from guava_nb.data.loader_feed import Feed
from guava_nb.errors import ConfigError
from guava_nb.training.plan import TrainingPlan


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"num_epochs": "3"}, "num_epochs is '3'"),
        ({"num_epochs": float("nan")}, "num_epochs is nan"),
        ({"val_interval": 0}, "val_interval is 0"),
        ({"accumulation_steps": -1}, "accumulation_steps is -1"),
        ({"shares": []}, "shares is"),
        ({"shares": [0, 0]}, "shares is"),
        ({"shares": [1, float("nan")]}, "shares is"),
        ({"shares": ["a", "b"]}, "shares is"),
        ({"split_fn": 3}, "split_fn is a int"),
        ({"callbacks": 5}, "callbacks is a int"),
    ],
)
def test_what_would_fail_in_the_middle_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        TrainingPlan(**{"feed": Feed([1]), "val_feed": None, "num_epochs": 1, **changes})


def test_a_worker_may_have_no_share() -> None:
    assert TrainingPlan(Feed([1]), None, 1, shares=(1, 0)).shares == (1, 0)
