from __future__ import annotations

from typing import Any

import pytest

from guava_nb.config import DistributedConfig
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.evaluation.validation import Validation
from guava_nb.spec.training_options import TrainingOptions
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
        TrainingOptions(**changes)


def test_a_worker_may_have_no_share() -> None:
    config = DistributedConfig()
    options = TrainingOptions(shares=(1, 0)).settled(config)
    assert TrainingPlan.of(options, config, (LoaderFeed([1]), None), Validation).shares == (1, 0)


@pytest.mark.parametrize(
    ("shares", "seats", "team", "weights"),
    [
        (None, (), [0, 4], [1, 1]),
        ((3, 1), (), [0, 1], [3, 1]),
        ((3, 1), (2, 5), [2, 5], [3, 1]),
        ((3, 1), (2, 5), [5, 6], [1, 1]),  # who joins later gets the least
        ((1, 0), (), [0, 1, 2], [1, 0, 0]),  # and splits no batch that one worker did whole
        ((1, 0, 0), (), [1, 2], [1, 0]),  # those who were to do the work are gone
    ],
)
def test_shares_belong_to_the_workers_that_were_here(shares: Any, seats: Any, team: list[int], weights: Any) -> None:
    plan = TrainingPlan(LoaderFeed([1]), None, 1, shares=shares, seats=seats)
    assert plan.weights(team) == weights
