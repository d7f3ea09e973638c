"""Each option of a run is written once, and reaches every place that knows options."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from guava_nb import Orchestrator
from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError
from guava_nb.notebook.commands import TRAIN, run_options
from guava_nb.notebook.train import training_arguments
from guava_nb.protocol.messages import RunSpec
from guava_nb.spec.training_options import OptionInfo, TrainingOptions, option, option_infos, takes_options
from guava_nb.training.plan import TrainingPlan

CALLS = ("start_training", "forecast")
#: A word of the line and the value that it stands for, for every kind that a line can say.
WORDS: dict[str, tuple[str, Any]] = {
    "name": ("package.module:thing", "package.module:thing"),
    "arguments": ('{"a": [1, 2]}', {"a": [1, 2]}),
    "metrics": ("top5", {"top5": "top5"}),
    "count": ("7", 7),
    "seed": ("0", 0),
    "text": ("accuracy", "accuracy"),
    "period": ("10min", "10min"),
    "norm": ("0.5", 0.5),
    "size": ("2MB", 2_000_000),
    "policies": ("vq.*=first,sum", "vq.*=first,sum"),
    "weights": ("2,1", (2.0, 1.0)),
    "file": ("~/a.pt", Path("~/a.pt").expanduser()),
    "words": ("'cut: x; whole: y'", "cut: x; whole: y"),
    "several": ("csv", "csv"),
    "objects": ("loader", [1]),
}
#: Of the kinds that no line says.
VALUES = {"function": len, "whole": 3, "switch": True}


def value_of(info: OptionInfo) -> Any:
    """A value that is not the default."""
    if info.choices and info.kind != "several":
        return info.choices[-1]
    if info.kind == "switch":
        return not info.default
    return WORDS[info.kind][1] if info.kind in WORDS else VALUES[info.kind]


class Reached(Exception):
    def __init__(self, options: TrainingOptions) -> None:
        self.options = options


@pytest.fixture
def stop_at_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(options: TrainingOptions, config: DistributedConfig) -> TrainingOptions:
        raise Reached(options)

    monkeypatch.setattr(TrainingOptions, "settled", reached)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("info", option_infos(), ids=lambda info: info.name)
def test_every_option_reaches_both_calls(stop_at_the_record: None, call: str, info: OptionInfo) -> None:
    value = value_of(info)
    assert value != info.default
    needed = {"val": {"val_loader": [1]}, "scheduler": {"scheduler": "S"}, "sync": {"sync": "local"},
              "sync_delay": {"sync": "local", "sync_delay": 2}}  # fmt: skip
    companions: dict[str, Any] = needed.get(info.needs, {})  # type: ignore[assignment]
    with pytest.raises(Reached) as reached:
        getattr(Orchestrator(), call)([1], **companions, **{info.name: value})
    assert getattr(reached.value.options, info.name) == value
    with pytest.raises(Reached) as reached:
        getattr(Orchestrator(), call)([1])
    assert getattr(reached.value.options, info.name) == info.default


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("of", [Orchestrator, Orchestrator()], ids=["class", "object"])
def test_help_shows_every_option_with_its_meaning_and_its_default(call: str, of: Any) -> None:
    shown = inspect.signature(getattr(of, call)).parameters
    text = " ".join((getattr(of, call).__doc__ or "").split())
    for info in option_infos():
        assert shown[info.name].default == info.default
        assert info.text and f" {info.name} (default {info.default!r}): {info.text}" in text
    assert not [one for one in shown.values() if one.kind is one.VAR_KEYWORD]
    assert "{options}" not in text


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"log": "csv,tensorbord"}, "log is 'csv,tensorbord'; give one or several of: csv, tensorboard, wandb, mlflow"),
        ({"log": []}, "give one or several of"),
        ({"log": ("csv", "mlflow", "mlflow")}, r"install what is not here: pip install mlflow$"),
        ({"callbacks": [int]}, r"give a list of objects, not of classes"),
    ],
)
def test_a_wrong_log_or_callback_is_refused_before_any_work(
    given: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mlflow").mkdir()  # what a library of that name left behind is no library
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(ConfigError, match=told):
        TrainingOptions(**given)


def test_the_help_of_the_line_says_what_counts_where_an_option_is_left_out() -> None:
    text = " ".join(TRAIN.help().split())
    for told in ("(default: AdamW)", "(default: step)", "(default: warn)", "(default: fp32)", "(default: all)"):
        assert told in text
    assert "by default the configuration's, fp32" in text and "by default the configuration's, workers" in text


def test_a_step_takes_the_place_of_the_criterion(stop_at_the_record: None) -> None:
    with pytest.raises(Reached) as reached:
        Orchestrator().start_training([1], step="one")
    assert (reached.value.options.criterion, reached.value.options.step) == (None, "one")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"step": "one", "criterion": "MSELoss"}, "step and criterion contradict each other"),
        ({"step": "one", "criterion": "CrossEntropyLoss"}, "step and criterion contradict"),
        ({"step": "one", "criterion_args": {"a": 1}}, "step and criterion_args contradict"),
        ({"resume": "a.pt", "fresh": True}, "resume and fresh contradict"),
        ({"scheduler_args": {"step_size": 3}}, "scheduler_args has no effect without scheduler: give scheduler too"),
        ({"scheduler_interval": "epoch"}, "scheduler_interval has no effect without scheduler"),
        ({"scheduler_metric": "accuracy"}, "scheduler_metric has no effect without scheduler"),
        ({"val_interval": 3}, "val_interval has no effect without val_loader"),
        ({"metrics": {"f1": "f1"}}, "metrics has no effect without val_loader"),
    ],
)
def test_an_option_that_another_leaves_without_effect_is_refused(call: str, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        getattr(Orchestrator(), call)([1], **given)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("wrong", "right"), [("optimiser", "optimizer"), ("epochs", "num_epochs"), ("zzz", "")])
def test_a_wrong_name_is_refused_with_the_near_one(call: str, wrong: str, right: str) -> None:
    told = f"{call}\\(\\) got an unexpected keyword argument '{wrong}'" + (
        f".*did you mean '{right}'" if right else "$"
    )
    with pytest.raises(TypeError, match=told):
        getattr(Orchestrator(), call)([1], **{wrong: 1})


@pytest.mark.parametrize("info", option_infos(), ids=lambda info: info.name)
def test_a_line_says_every_option_or_the_reason_is_known(info: OptionInfo) -> None:
    assert bool(info.flag) != bool(info.unsayable)
    if not info.flag:
        return
    flag, value = f"--{info.flag}", value_of(info)
    word = "" if info.kind == "switch" else WORDS[info.kind][0] if info.kind in WORDS else value
    assert flag in TRAIN.flags() and flag in TRAIN.help()
    assert flag in TRAIN.completions([], flag, {})
    companions = {"val": "--val loader", "scheduler": "--scheduler S", "budget": "--budget 1MB",
                  "sync": "--sync local", "sync_delay": "--sync local --sync-delay 2"}  # fmt: skip
    loss = "" if info.name in ("criterion", "step") else "--loss L"
    line = f"--model Net --data loader {loss} {companions.get(info.needs, '')} {flag} {word}"
    args = TRAIN.parse(line, {"loader": [1]})
    assert args is not None
    assert training_arguments(args, {"loader": [1]})[info.name] == value


def test_the_configuration_gives_what_is_left_out() -> None:
    changed = {
        "scheduler_interval": "epoch", "max_grad_norm": 2.0, "accumulation_steps": 3, "precision": "bf16", "seed": 5,
        "optimizer_site": "orchestrator", "worker_cache": "disk", "count_flops": True, "budget_bytes": 9,
        "num_epochs": 4, "save_interval": 6, "checkpoint_dir": "elsewhere",
    }  # fmt: skip
    config = DistributedConfig(**changed)
    settled = TrainingOptions().settled(config)
    infos = [info for info in option_infos() if info.setting]
    assert {info.setting.removeprefix("effective_") for info in infos} == set(changed)
    for info in infos:
        assert getattr(settled, info.name) == getattr(config, info.setting) != info.default
        given = TrainingOptions(**{info.name: value_of(info)}).settled(config)
        assert getattr(given, info.name) == value_of(info)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(option_infos()), st.integers() | st.text() | st.floats() | st.booleans() | st.just([]))
def test_a_value_is_taken_as_it_is_or_refused_by_name(info: OptionInfo, value: Any) -> None:
    try:
        made = TrainingOptions(**{info.name: value})
    except ConfigError as error:
        assert info.name in str(error) or "criterion" in str(error)
    else:
        assert getattr(made, info.name) is value


# --------------------------------------------------------------------------------------------------- one field is enough


@dataclass(frozen=True, kw_only=True)
class More(TrainingOptions):
    """Options of a later day.

    Attributes:
        endurance: epochs without a better
            loss, 100% of them.
    """

    endurance: int | None = option(None, "count", flag="endurance", setting="num_epochs")


def test_a_new_field_is_picked_up_everywhere() -> None:
    *_, info = option_infos(More)
    assert (info.name, info.text) == ("endurance", "epochs without a better loss, 100% of them.")

    @takes_options(More)
    def train(loader: Any, num_epochs: int = 1, **options: Any) -> More:
        """Train.

        Args:
            {options}
        """
        return More.of("train", num_epochs=num_epochs, **options)

    assert inspect.signature(train).parameters["endurance"].default is None
    assert "endurance (default None): epochs without a better loss, 100% of them." in (train.__doc__ or "")
    assert train([], endurance=3).endurance == 3
    assert More().settled(DistributedConfig(num_epochs=4)).endurance == 4
    with pytest.raises(ConfigError, match="endurance is 0; give a whole number, at least 1"):
        train([], endurance=0)
    with pytest.raises(TypeError, match="did you mean 'endurance'"):
        train([], enduranse=0)
    entry = run_options(More)[-1]
    assert entry.flags == ("--endurance",) and len(run_options(More)) == len(run_options()) + 1
    assert entry.settings["help"] == "epochs without a better loss, 100%% of them"


#: Options that become no field of a record, and what they do instead.
USED_AT_ONCE = {
    "detach": "returns before the end", "progress": "shows a bar", "resume": "names a file", "fresh": "drops a state",
    "budget_bytes": "makes a budget", "save_path": "goes into it", "save_every": "becomes steps or seconds",
    "checkpoint_dir": "becomes the folder of a plan", "weights": "names a file", "save_only": "becomes digests of a base",
    "criterion_args": "goes into the criterion's factory",
    "sync": "goes into the record of rounds", "outer": "goes there", "outer_lr": "goes there", "outer_momentum": "goes there",
    "outer_args": "goes there", "sync_delay": "goes there", "mixing": "goes there",
    "optimizer_args": "goes into the optimizer's factory", "scheduler_args": "goes into the scheduler's factory",
}  # fmt: skip


def test_every_option_is_a_field_of_a_record_or_is_used_at_once() -> None:
    """`same_named` copies what a record has a field for: an option without one would do nothing, and say nothing."""
    recorded = {field.name for field in (*structs.fields(RunSpec), *fields(TrainingPlan))}
    assert {field.name for field in fields(TrainingOptions)} - recorded == set(USED_AT_ONCE)


def test_the_record_is_read_without_torch() -> None:
    source = inspect.getsource(sys.modules[TrainingOptions.__module__])
    assert "import torch" not in source
    assert [one.name for one in fields(TrainingOptions)] == [info.name for info in option_infos()]


def test_local_sync_fills_in_its_rounds_and_step_sync_has_none() -> None:
    config = DistributedConfig()
    step = TrainingOptions().settled(config)
    assert (step.sync_every, step.outer, step.outer_lr) == (1, None, None)
    local = TrainingOptions(sync="local").settled(config)
    assert (local.sync_every, local.outer, local.outer_lr, local.outer_momentum) == (30, "average", 1.0, 0.0)
    auto = TrainingOptions(sync="auto").settled(config)
    assert (auto.sync, auto.sync_every, auto.outer) == ("auto", 1, None)
    partial = TrainingOptions(sync="local", sync_every=15, outer="partial").settled(config)
    assert auto.synced("local", 15, outer="partial") == partial
    assert (partial.outer_lr, partial.outer_momentum) == (1.4, 0.0)
    assert auto.synced("local", 5, outer="partial").outer_lr == 1.0
    short = TrainingOptions(sync="auto", wire="int8").settled(config).synced("local", 15)
    assert short == TrainingOptions(sync="local", sync_every=15, wire="int8").settled(config)
    assert auto.synced("step", 1) == step
    diloco = TrainingOptions(sync="local", sync_every=5, outer="nesterov").settled(config)
    assert (diloco.sync_every, diloco.outer, diloco.outer_lr, diloco.outer_momentum) == (5, "nesterov", 0.7, 0.9)
    sparse = TrainingOptions(sync="local", outer="sparse").settled(config)
    assert (sparse.outer_lr, sparse.outer_momentum) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync_every": 5}, "sync_every has no effect without sync='local'"),
        ({"sync": "auto", "sync_every": 5}, "sync_every has no effect without sync='local'"),
        ({"sync": "step", "outer": "average"}, "outer has no effect without sync='local'"),
        ({"sync": "local", "outer": "average", "outer_momentum": 0.5}, "an average has none"),
        ({"sync": "local", "outer": "partial", "outer_momentum": 0.5}, "nor has partial"),
        ({"sync": "local", "outer": "partial", "sync_delay": 2, "mixing": 0.5}, "mixing out"),
        ({"sync": "local", "outer": "partial", "wire": "int8"}, "outer='partial' has a format of its own"),
        ({"sync": "local", "outer_momentum": 1.0}, "below 1"),
        ({"sync": "local", "outer": "sparse", "outer_momentum": 0.9}, "sparse has its error feedback instead"),
        ({"sync": "local", "outer": "sparse", "wire": "int8"}, "has a format of its own: leave wire at 'fp32'"),
        ({"sync": "local", "check": "strict"}, "no step is taken on a whole batch"),
        ({"sync": "local", "sync_every": 0}, "at least 1"),
    ],
)
def test_what_contradicts_local_sync_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingOptions.of("start_training", **options)
