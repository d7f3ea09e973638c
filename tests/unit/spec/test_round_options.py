"""Options of rounds that contradict each other are refused, and what was not given is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError
from guava_nb.spec.round_options import filled
from guava_nb.spec.training_options import TrainingOptions


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sync_delay": 30}, "sync_delay is 30, and a round has 30 steps"),
        ({"sync_delay": 5, "sync_every": 5}, "sync_delay is 5, and a round has 5 steps"),
        ({"sync_delay": -1}, "sync_delay is -1; give a whole number, at least 0"),
        ({"mixing": 0.5}, "mixing is 0.5, and sync_delay 0; give .* only with a sync_delay"),
        ({"mixing": 0.5, "sync_delay": 0}, "only with a sync_delay"),
        ({"mixing": 1.0, "sync_delay": 2}, "mixing is 1, and sync_delay 2; give a mixing from 0 to below 1"),
        ({"mixing": -0.1, "sync_delay": 2}, "mixing is -0.1"),
    ],
)
def test_a_delay_that_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainingOptions(sync="local", **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sync": "step", "sync_delay": 1}, "sync_delay has no effect without sync='local'"),
        ({"sync": "auto", "sync_delay": 1}, "sync_delay has no effect without sync='local'"),
        ({"sync": "local", "mixing": 0.3}, "mixing has no effect without sync_delay"),
        ({"sync": "local", "mixing": 0.3, "sync_delay": 0}, "mixing has no effect without sync_delay"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainingOptions.of("start_training", **given)


def test_what_was_not_given_is_filled_in() -> None:
    plain = filled(TrainingOptions(sync="local"))
    assert plain == {
        "sync_every": 30, "outer": "average", "outer_lr": 1.0, "outer_momentum": 0.0, "sync_delay": 0
    }  # fmt: skip
    for every, density, step in ((5, 1 / 64, 1.0), (15, 1 / 64, 1.4), (60, 1 / 32, 1.4), (60, 1 / 8, 1.0)):
        rounds = filled(
            TrainingOptions(sync="local", outer="partial", sync_every=every, outer_args={"density": density})
        )
        assert rounds["outer_lr"] == step
    assert filled(TrainingOptions(sync="local", outer="partial"))["outer_lr"] == 1.4
    settled = TrainingOptions(sync="local", outer="nesterov", sync_delay=4).settled(DistributedConfig(num_workers=1))
    assert (settled.sync_every, settled.sync_delay, settled.mixing, settled.outer_momentum) == (30, 4, None, 0.9)
    assert TrainingOptions(sync="local", sync_delay=4, mixing=0.0).settled(DistributedConfig(num_workers=1)).mixing == 0
