"""A schedule is tried before the run: what torch, or the user's function, would raise in its middle is said at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Factory, MetricSpec
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from guava_nb.training import schedule_check
from guava_nb.training.plan import Position
from guava_nb.training.schedule_check import check_schedule, followed
from tests.support.training import loader, plan_for, replica, spec

OWN = f"{__name__}:"
SGD = Factory("SGD", {"lr": 0.1, "momentum": 0.9})


def falls_at(optimizer: torch.optim.Optimizer, step: int, value: Any = None) -> LRScheduler:
    def factor(at: int) -> Any:
        if at == step and value is None:
            raise IndexError(f"no rate for step {at}")
        return value if at == step else 1.0

    return LambdaLR(optimizer, factor)


def sequence(optimizer: torch.optim.Optimizer, bad: int) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), falls_at(optimizer, bad)], [3])


def chain(optimizer: torch.optim.Optimizer, bad: int) -> LRScheduler:
    return ChainedScheduler([ExponentialLR(optimizer, 0.9), falls_at(optimizer, bad)])


class Follower:
    """A user's own schedule that follows a figure; it has no mode."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] *= 1.0 + value

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def checked(
    scheduler: Factory, *, interval: str = "step", epochs: int = 3, val: bool = False, step: int = -1,
    data: Any = None, before: Callable[[WholeReplicaSet], None] = lambda made: None, metrics: tuple[str, ...] = (),
    **plan: Any,
) -> list[str]:  # fmt: skip
    """Check a run of 4 steps an epoch; returns what is told."""
    run_spec = spec(
        optimizer=SGD, scheduler=scheduler, scheduler_interval=interval,
        metrics=tuple(MetricSpec(name, Factory("m")) for name in metrics),
    )  # fmt: skip
    made = WholeReplicaSet("run-1", run_spec, (), replica(run_spec))
    made.step = made.master_step = step
    before(made)
    chosen = plan_for(loader() if data is None else data, epochs, **plan)
    if val:
        chosen.val_feed = chosen.feed
    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_schedule(made, chosen, told.append)
    return told


@pytest.mark.parametrize(
    ("scheduler", "told"),
    [
        (
            Factory("OneCycleLR", {"max_lr": 0.1, "total_steps": 9}),
            r"OneCycleLR fails after optimizer step 10 of the 12",
        ),
        (
            Factory(OWN + "falls_at", {"step": 7}),
            r"falls_at fails after optimizer step 7 of the 12 .*no rate for step 7",
        ),
        (Factory(OWN + "sequence", {"bad": 4}), r"sequence fails after optimizer step 7 of the 12"),
        (Factory(OWN + "chain", {"bad": 12}), r"chain fails after optimizer step 12 of the 12"),
        (
            Factory(OWN + "falls_at", {"step": 5, "value": "half"}),
            r"fails after optimizer step 5 of the 12 .*TypeError",
        ),
        (
            Factory(OWN + "falls_at", {"step": 5, "value": float("nan")}),
            r"step 5 of the 12 .*learning rate becomes nan",
        ),
    ],
)
def test_what_would_fail_in_the_run_is_refused_with_its_numbers(scheduler: Factory, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        checked(scheduler)
    assert "Nothing was trained: make scheduler_args right for 12" in str(refused.value)


@pytest.mark.parametrize(
    "scheduler",
    [
        Factory("OneCycleLR", {"max_lr": 0.1, "total_steps": 12}),
        Factory("CosineAnnealingWarmRestarts", {"T_0": 5}),
        Factory("CosineAnnealingLR", {"T_max": 5}),
        Factory(OWN + "sequence", {"bad": 10}),
        Factory(OWN + "chain", {"bad": 13}),
        Factory("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1}),
        Factory("PolynomialLR", {"total_iters": 3}),
    ],
)
def test_what_lasts_is_let_through_and_the_masters_own_does_not_move(scheduler: Factory) -> None:
    states: list[Any] = []

    def note(made: WholeReplicaSet) -> None:
        states.append((made, made.master.state()["scheduler"], made.master.learning_rate))

    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    assert checked(scheduler, before=note) == []
    [(made, state, rate)] = states
    assert (made.master.state()["scheduler"], made.master.learning_rate) == (state, rate)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("interval", "changes", "ticks"),
    [
        ("step", {}, 12), ("step", {"accumulation_steps": 3}, 6), ("epoch", {}, 3), ("validation", {"val": True}, 3),
        ("validation", {"val": True, "val_interval": 5}, 2), ("step", {"step": 6}, 5),
        ("epoch", {"start": Position(epoch=1), "step": 3}, 2),
    ],
)  # fmt: skip
def test_a_schedule_ticks_as_often_as_its_interval_says(interval: str, changes: dict[str, Any], ticks: int) -> None:
    assert checked(Factory(OWN + "falls_at", {"step": ticks + 1}), interval=interval, **changes) == []
    unit = "optimizer step" if interval == "step" else interval
    with pytest.raises(ConfigError, match=f"fails after {unit} {ticks} of the {ticks} that"):
        checked(Factory(OWN + "falls_at", {"step": ticks}), interval=interval, **changes)


def test_a_resumed_schedule_begins_where_it_stands() -> None:
    def resumed(made: WholeReplicaSet) -> None:
        for _ in range(7):
            made.master.optimizer.step()
            made.master.scheduler.step()

    scheduler = Factory("OneCycleLR", {"max_lr": 0.1, "total_steps": 12})
    assert checked(scheduler, step=6, before=resumed) == []
    with pytest.raises(ConfigError, match="fails after optimizer step 6 of the 9 "):
        checked(scheduler, epochs=4, step=6, before=resumed)


def test_data_without_a_length_says_that_it_cannot_be_known() -> None:
    batches = (batch for batch in loader())
    [told] = checked(Factory("OneCycleLR", {"max_lr": 0.1, "total_steps": 2}), data=batches)
    assert "OneCycleLR was not tried beforehand: the data has no length" in told
    assert checked(Factory("StepLR", {"step_size": 1}), data=iter([1]), interval="epoch") == []


def test_a_rate_below_zero_is_told() -> None:
    [told] = checked(Factory(OWN + "falls_at", {"step": 4, "value": -0.5}))
    assert "the learning rate is below 0 from tick 4 of 12" in told


def test_of_a_long_run_the_beginning_and_the_end_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_check, "MOST_TICKS", 5)
    with pytest.raises(ConfigError, match="OneCycleLR fails after optimizer step 12 of the 12"):
        checked(Factory("OneCycleLR", {"max_lr": 0.1, "total_steps": 11}))
    assert checked(Factory("OneCycleLR", {"max_lr": 0.1, "total_steps": 12})) == []


PLATEAU = "ReduceLROnPlateau"


@pytest.mark.parametrize(
    ("mode", "metric", "told"),
    [
        ("max", None, "mode 'max' and follows the loss, .*'mode': 'min'.*scheduler_metric='accuracy'"),
        ("max", "loss", "mode 'max' and follows the loss"),
        ("min", "accuracy", "mode 'min' and follows the accuracy, .*'mode': 'max'.*scheduler_metric='loss'"),
        ("max", "acuracy", "no validation of this run gives.*did you mean 'accuracy'.*loss, accuracy, f1"),
        ("max", "accuracy", ""), ("max", "f1", ""), ("min", "f1", ""), ("min", None, ""), ("min", "loss", ""),
    ],
)  # fmt: skip
def test_mode_and_metric_of_a_plateau_agree_or_are_refused(mode: str, metric: str | None, told: str) -> None:
    def check() -> list[str]:
        return checked(
            Factory(PLATEAU, {"mode": mode}), interval="validation", val=True, scheduler_metric=metric, metrics=("f1",)
        )

    if told:
        with pytest.raises(ConfigError, match=told):
            check()
    else:
        assert check() == []


def test_what_nothing_measures_is_refused() -> None:
    with pytest.raises(ConfigError, match="ticks after each validation, and this run has none: give val_loader"):
        checked(Factory("StepLR", {"step_size": 1}), interval="validation")
    with pytest.raises(
        ConfigError, match="scheduler_metric is 'accuracy', which a validation measures: give val_loader"
    ):
        checked(Factory(PLATEAU, {"mode": "max"}), interval="epoch", scheduler_metric="accuracy")
    with pytest.raises(ConfigError, match="StepLR follows no figure: leave scheduler_metric out"):
        checked(Factory("StepLR", {"step_size": 1}), scheduler_metric="loss")
    assert checked(Factory(PLATEAU), interval="epoch") == []
    assert checked(Factory(OWN + "Follower"), interval="epoch") == []
    with pytest.raises(ConfigError, match=r"Follower follows a metric: use scheduler_interval=\"validation\""):
        checked(Factory(OWN + "Follower"))


def test_the_figure_that_is_followed() -> None:
    made = replica(spec(optimizer=SGD, scheduler=Factory(PLATEAU), scheduler_interval="epoch")).scheduler
    record = {"step": 4, "loss": 0.5, "accuracy": None, "per_class": [1, 2], "f1": torch.tensor(0.25)}
    assert followed(made, None, record) == 0.5
    assert followed(made, "f1", record) == 0.25
    assert followed(None, None, record) is None
    assert followed(replica(spec(scheduler=Factory("StepLR", {"step_size": 1}))).scheduler, None, record) is None
    for name, value in (("accuracy", "None"), ("per_class", r"\[1, 2\]")):
        with pytest.raises(ConfigError, match=f"follows '{name}', and this validation gave {value} for it: choose"):
            followed(made, name, record)
