"""A run's schedule before the run: what it follows, and whether it lasts as long as the run does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import RunSpec
from guava_nb.replica.base_replica import load_scheduler
from guava_nb.replica.optimizer import build_optimizer, build_scheduler, follows_metric
from guava_nb.replica.rng import seeded
from guava_nb.replica.state_dict import copied, plain
from guava_nb.spec.factories import near
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.plan import TrainingPlan

__all__ = ["check_schedule", "followed"]

#: Ticks that are tried one by one, half a second's worth; of a longer run also the last one.
MOST_TICKS = 20_000
#: Schedules that most programs advance once an epoch, and the part of the learning rate of which nothing is learned.
_OF_EPOCHS, _VANISHED = ("StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR"), 1e-4


def check_schedule(replica_set: ReplicaSet, plan: TrainingPlan, notice: Callable[[str], None]) -> None:
    """Refuse a schedule that follows the wrong figure, never ticks, or fails within the run.

    Args:
        replica_set: at the state in which the run begins.
        plan: of the run.
        notice: takes a sentence on what is odd, and on what could not be tried.

    Raises:
        ConfigError: with the numbers, and what to change.
    """
    spec, master = replica_set.spec, replica_set.master
    if spec.scheduler is None:
        return
    name = spec.scheduler.name.rpartition(":")[2]
    if spec.scheduler_interval == "validation" and plan.val_feed is None:
        raise ConfigError(
            f"scheduler {name} ticks after each validation, and this run has none: give val_loader, or another "
            "scheduler_interval"
        )
    _check_metric(name, master.scheduler, spec, plan)
    ticks = _ticks(spec.scheduler_interval, plan, replica_set.step)
    if ticks is None:
        notice(
            f"scheduler {name} was not tried beforehand: the data has no length, so how long the run is cannot be known"
        )
    else:
        _rehearse(name, replica_set, ticks, notice)


def followed(scheduler: Any, metric: str | None, record: Mapping[str, Any]) -> float | None:
    """Return the figure of a record that a scheduler follows; None where it follows none.

    Raises:
        ConfigError: it is no number.
    """
    if scheduler is None or not follows_metric(scheduler):
        return None
    name = metric or "loss"
    value = record.get(name)
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(
            f"{type(scheduler).__name__} follows {name!r}, and this validation gave {value!r} for it: choose a "
            f"scheduler_metric that is one number, of {', '.join(n for n in record if n not in ('step', 'samples'))}"
        ) from None


def _check_metric(name: str, scheduler: Any, spec: RunSpec, plan: TrainingPlan) -> None:
    metric, mode = plan.scheduler_metric, str(getattr(scheduler, "mode", ""))
    if not follows_metric(scheduler):
        if metric is not None:
            raise ConfigError(
                f"scheduler_metric is {metric!r}, and {name} follows no figure: leave scheduler_metric out"
            )
        return
    known = ("loss", "accuracy", *(one.name for one in spec.metrics))
    if metric is not None and metric not in known:
        raise ConfigError(
            f"scheduler_metric is {metric!r}, which no validation of this run gives{near(metric, known)}; it gives "
            f"{', '.join(known)}, and what metrics= names"
        )
    if metric not in (None, "loss") and plan.val_feed is None:
        raise ConfigError(f"scheduler_metric is {metric!r}, which a validation measures: give val_loader")
    if metric == "accuracy" and spec.step is not None:
        raise ConfigError(
            "scheduler_metric is 'accuracy', and a step gives only a loss: train with a criterion, or follow it"
        )
    wrong = {("max", "loss"): ("loss", "min", "accuracy"), ("min", "accuracy"): ("accuracy", "max", "loss")}
    if (mode, metric or "loss") in wrong:
        what, right, other = wrong[mode, metric or "loss"]
        raise ConfigError(
            f"{name} has mode {mode!r} and follows the {what}, whose better values are those of mode {right!r}: it would lower "
            f"the learning rate while training goes well. Give scheduler_args={{'mode': {right!r}}}, or "
            f"scheduler_metric={other!r}"
        )


def _ticks(interval: str, plan: TrainingPlan, step: int) -> int | None:
    """How often the schedule advances from here on; None: that cannot be known."""
    steps = plan.steps_left(step)
    if interval == "step":
        return steps
    if interval == "epoch" or plan.val_interval is None:
        return plan.epoch_ends_left()
    return None if steps is None else (step + 1 + steps) // plan.val_interval - (step + 1) // plan.val_interval


def _rehearse(name: str, replica_set: ReplicaSet, ticks: int, notice: Callable[[str], None]) -> None:
    spec = replica_set.spec
    with warnings.catch_warnings(), seeded(spec.seed, torch.device("cpu")):
        warnings.simplefilter("ignore")  # that no optimizer steps in between
        optimizer, scheduler = _twin(replica_set)
        arguments = (0.0,) if follows_metric(scheduler) else ()
        rates: list[float] = []
        first, began = (
            getattr(scheduler, "last_epoch", None),
            max(float(group["lr"]) for group in optimizer.param_groups),
        )
        for tick in range(min(ticks, MOST_TICKS)):
            _tick(name, spec, scheduler, arguments, tick + 1, ticks)
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if not all(map(math.isfinite, rates)):
                raise _fails(name, spec, tick + 1, ticks, f"the learning rate becomes {rates[0]:g}")
            if min(rates) < 0:
                notice(
                    f"scheduler {name}: the learning rate is below 0 from tick {tick + 1} of {ticks} on, which climbs"
                )
                return
        if spec.scheduler_interval == "step" and name in _OF_EPOCHS and rates and max(rates) < _VANISHED * began:
            notice(
                f"scheduler {name} counts optimizer steps, and brings the learning rate from {began:.3g} to {max(rates):.3g} in "
                f"{min(ticks, MOST_TICKS)} of them: where it should count epochs, as most do with {name}, give "
                "scheduler_interval='epoch' (--scheduler-interval epoch)"
            )
        if ticks > MOST_TICKS and isinstance(first, int) and not arguments:
            scheduler.last_epoch = first + ticks - 1
            _tick(name, spec, scheduler, arguments, ticks, ticks)


def _twin(replica_set: ReplicaSet) -> tuple[torch.optim.Optimizer, Any]:
    """Optimizer and scheduler like those of the run at its beginning, over stand-in parameters."""
    master, spec, left = replica_set.master, replica_set.spec, replica_set.schedule
    groups = master.optimizer.param_groups if left is None else left["groups"]
    state = plain(master.scheduler.state_dict(), "scheduler") if left is None else left["scheduler"]
    named = [(n, nn.Parameter(torch.empty_like(p), p.requires_grad)) for n, p in master.model.named_parameters()]
    optimizer = build_optimizer(spec.optimizer, named, master.resolve)
    schedule = build_scheduler(spec.scheduler, optimizer, master.resolve, spec.scheduler_interval)
    assert schedule is not None
    for ours, theirs in zip(optimizer.param_groups, groups, strict=left is None):
        ours.update(copied({key: value for key, value in theirs.items() if key != "params"}))
    load_scheduler(schedule.scheduler, state)
    return optimizer, schedule.scheduler


def _tick(name: str, spec: RunSpec, scheduler: Any, arguments: tuple[float, ...], tick: int, ticks: int) -> None:
    try:
        scheduler.step(*arguments)
    except Exception as error:
        raise _fails(name, spec, tick, ticks, f"{type(error).__name__}: {error}") from error


def _fails(name: str, spec: RunSpec, tick: int, ticks: int, why: str) -> ConfigError:
    unit = {"step": "optimizer step"}.get(spec.scheduler_interval, spec.scheduler_interval)
    return ConfigError(
        f"scheduler {name} fails after {unit} {tick} of the {ticks} that this run will do ({why}). Nothing was trained: make "
        f"scheduler_args right for {ticks}, or change num_epochs; fresh=True (--fresh) begins the schedule anew"
    )
