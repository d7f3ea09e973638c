from __future__ import annotations

import functools
import inspect
import re
import types
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from guava_nb.config import DistributedConfig, mode_settings
from guava_nb.errors import ConfigError, SourceError
from guava_nb.protocol.messages import Cell, Factory, Hello, ParallelSpec, RoundSpec
from guava_nb.replica.optimizer import build_optimizer
from guava_nb.spec.run_spec import (
    build_spec,
    factory_for,
    factory_name,
    optimizer_arguments,
    parallel_spec,
    plain_arguments,
    precision_for,
    uses_gather,
)
from guava_nb.spec.training_options import TrainingOptions, option_infos
from guava_nb.wire_formats.registry import WIRE_FORMATS


def build(**changes: Any) -> Any:
    config = DistributedConfig()
    return build_spec(config, None, Factory("Net"), TrainingOptions(**changes).settled(config))


def test_names_of_shared_importable_and_local_things() -> None:
    shared = types.ModuleType("guava_shared")
    shared.Net = torch.nn.Linear  # type: ignore[attr-defined]
    assert factory_name("model", "Net", shared) == "Net"
    assert factory_name("model", torch.nn.Linear, None) == "torch.nn.modules.linear:Linear"

    class Local(torch.nn.Module):
        pass

    with pytest.raises(SourceError, match=r"model .*Local' exists only here.*%%guava_share"):
        factory_name("model", Local, shared)
    with pytest.raises(SourceError, match="exists only here"):
        factory_name("criterion", lambda outputs, targets: 0, shared)


def test_arguments_must_be_plain_data() -> None:
    assert plain_arguments("model", {"sizes": [1, 2], "bias": True, "name": None}) == {
        "sizes": [1, 2], "bias": True, "name": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"model: argument 'act' is a ReLU, .*Make the object inside a function"):
        plain_arguments("model", {"act": torch.nn.ReLU()})


def test_a_partial_object_is_its_function_with_its_arguments() -> None:
    made = build(criterion=functools.partial(torch.nn.functional.cross_entropy, label_smoothing=0.3))
    assert made.criterion is not None and made.criterion.args == {"label_smoothing": 0.3}
    made = build(
        criterion=functools.partial(torch.nn.functional.cross_entropy, label_smoothing=0.3),
        criterion_args={"label_smoothing": 0.1},
    )
    assert made.criterion is not None and made.criterion.args == {"label_smoothing": 0.1}
    with pytest.raises(ConfigError, match="have no names: give them by name"):
        build(criterion=functools.partial(torch.nn.functional.cross_entropy, 1))


@pytest.mark.parametrize(
    ("loss", "name"), [("CrossEntropyLoss", "weight"), (torch.nn.BCEWithLogitsLoss, "pos_weight"), ("cross_entropy", "weight"),
                       (torch.nn.functional.cross_entropy, "weight")],
)  # fmt: skip
def test_class_weights_of_a_loss_of_torch_may_be_a_tensor(loss: Any, name: str) -> None:
    made = build(criterion=loss, criterion_args={name: torch.tensor([0.5, 2.0])})
    assert made.criterion is not None and made.criterion.args == {name: [0.5, 2.0]}
    with pytest.raises(ConfigError, match="'weight' is a Tensor"):
        factory_for("criterion", "mine", {"weight": torch.ones(2)}, None)


def test_exactly_one_of_criterion_and_step() -> None:
    with pytest.raises(ConfigError, match="either a criterion"):
        build(step="my_step")
    with pytest.raises(ConfigError, match="either a criterion"):
        build(criterion=None)
    assert build(criterion=None, step="my_step").step == Factory("my_step")


def test_the_configuration_gives_what_is_not_said() -> None:
    config = DistributedConfig(learning_rate=0.5, weight_decay=0.25)
    assert optimizer_arguments("AdamW", None, config) == {"lr": 0.5, "weight_decay": 0.25}
    assert optimizer_arguments("LBFGS", None, config) == {"lr": 0.5}
    assert optimizer_arguments("SGD", {"lr": 1.0}, config) == {"lr": 1.0, "weight_decay": 0.25}
    assert optimizer_arguments("SGD", {"weight_decay": 0}, DistributedConfig(learning_rate=0)) == {
        "lr": 0,
        "weight_decay": 0,
    }
    assert optimizer_arguments("SGD", {"momentum": 0.9}, DistributedConfig()) == {"momentum": 0.9}
    shared = types.ModuleType("guava_shared")
    shared.mine = lambda named, lr: torch.optim.SGD(named, lr)  # type: ignore[attr-defined]
    assert optimizer_arguments("mine", None, config, shared) == {"lr": 0.5}
    spec = build(precision="bf16", max_grad_norm=2.0)
    assert (spec.precision, spec.max_grad_norm, spec.optimizer_site) == ("bf16", 2.0, "workers")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; it is one of: fp32, bf16, fp16, fp64"),
        ({"optimizer_site": "hub"}, "optimizer_site is 'hub'"),
        ({"scheduler_interval": "batch"}, "scheduler_interval is 'batch'"),
        ({"seed": 2**70}, "give a whole number from 0"),
        ({"max_grad_norm": -0.5}, "max_grad_norm is -0.5; give a number above 0, or 0 for no clipping"),
    ],
)
def test_wrong_choices_name_the_right_ones(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(**changes)


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        ({"mode": "zero", "zero_stage": 2}, {}, "in mode zero the workers exchange gradients"),
        ({"path": "direct"}, {}, "path='direct' makes the workers exchange gradients among themselves"),
        ({"sync_batchnorm": True}, {}, "sync_batchnorm makes the workers"),
        ({}, {"precision": "fp16"}, "with precision 'fp16' a loss scale"),
        ({}, {"wire": "int2"}, "wire is 'int2'; it is one of: fp32, bf16, fp16, int8, int4"),
    ],
)
def test_a_wire_format_without_effect_is_refused(config: dict[str, Any], changes: dict[str, Any], text: str) -> None:
    settings = DistributedConfig(**{name: value for name, value in config.items() if name != "mode"})
    with pytest.raises(ConfigError, match=text):
        options = TrainingOptions(**{"wire": "int8", **changes}).settled(settings)
        build_spec(settings, None, Factory("Net"), options, parallel_spec(settings, 2))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_between_stages_a_wire_format_rounds_each_message_for_itself_so_a_loss_scale_may_change(precision: str) -> None:
    settings = DistributedConfig(**mode_settings("pipeline", pipeline_schedule="auto"))
    options = TrainingOptions(wire="int8", precision=precision).settled(settings)
    shape = parallel_spec(settings, 2)
    assert build_spec(settings, None, Factory("Net"), options, shape).wire == "int8"
    assert shape is not None and shape.schedule == "1f1b"  # until lines and steps are measured
    with pytest.raises(ConfigError, match="in mode tensor the workers exchange gradients"):
        build_spec(settings, None, Factory("Net"), options, replace(shape, mode="tensor", pp=1, tp=2))


def test_wire_formats_have_the_names_of_the_option() -> None:
    [info] = [info for info in option_infos() if info.name == "wire"]
    assert info.choices == tuple(WIRE_FORMATS) and build(wire="int4").wire == "int4"


@pytest.mark.parametrize("set_before", [None, 2.0])
def test_no_clipping_is_said_by_zero(set_before: float | None) -> None:
    """As the configuration's documentation says; a zero of the call wins over the configuration."""
    config = DistributedConfig(max_grad_norm=set_before)
    options = TrainingOptions(max_grad_norm=0).settled(config)
    assert build_spec(config, None, Factory("Net"), options).max_grad_norm is None
    assert TrainingOptions().settled(config).max_grad_norm == set_before
    assert TrainingOptions().settled(DistributedConfig(max_grad_norm=0)).max_grad_norm is None


def _optimizers() -> list[str]:
    found = (name for name, cls in vars(torch.optim).items() if isinstance(cls, type))
    return sorted(name for name in found if name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon"))


@pytest.mark.parametrize("words", [{}, {"lr": 0.02}, {"weight_decay": 0.3}])
@pytest.mark.parametrize("name", _optimizers())
def test_an_optimizer_of_torch_is_what_plain_pytorch_makes_of_the_same_words(name: str, words: dict[str, Any]) -> None:
    """The defaults are torch's own, and naming one of them leaves the others."""
    if not words.keys() <= inspect.signature(getattr(torch.optim, name)).parameters.keys():
        with pytest.raises(ConfigError, match="does not take 'weight_decay'"):
            build_optimizer(
                build(optimizer=name, optimizer_args=words).optimizer, torch.nn.Linear(1, 1).named_parameters(), len
            )
        return
    ours, plain = torch.nn.Linear(3, 2).double(), torch.nn.Linear(3, 2).double()
    plain.load_state_dict(ours.state_dict())
    factory = build(optimizer=name, optimizer_args=words or None).optimizer
    mine = build_optimizer(factory, ours.named_parameters(), lambda name: None)
    theirs = getattr(torch.optim, name)(plain.parameters(), **words)
    assert [{k: v for k, v in g.items() if k != "params"} for g in mine.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in theirs.param_groups
    ]
    data = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for optimizer, model in ((mine, ours), (theirs, plain)):
        for batch in data:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_the_defaults_that_are_told_are_torchs() -> None:
    [text] = [info.text for info in option_infos() if info.name == "optimizer_args"]
    told = re.findall(r"([\d.]+) \(([\w, ]+)\)[,;]", text.partition("; weight_decay")[0] + ";")
    rates = {name: rate for rate, names in told for name in names.split(", ")}
    [optimizers] = [info.known for info in option_infos() if info.name == "optimizer"]
    assert sorted(rates) == sorted(optimizers)
    for name, rate in rates.items():
        defaults = inspect.signature(getattr(torch.optim, name)).parameters
        assert float(defaults["lr"].default) == float(rate)
        assert defaults["weight_decay"].default == (0.01 if name == "AdamW" else 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_epochs": 0},
        {"accumulation_steps": 0},
        {"val_interval": -1},
        {"shares": [1, -1]},
        {"shares": [0, 0]},
        {"shares": []},
    ],
)
def test_a_plan_refuses_numbers_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        TrainingOptions(**changes)


@pytest.mark.parametrize(
    ("cells", "references", "found"),
    [
        ((), ("CrossEntropyLoss", None), False),
        ((Cell("loss", "from guava_nb import gather_batch"),), ("nce", None), True),
        ((Cell("net", "class Net: pass"),), ("tests.support.coupled:info_nce",), True),
        ((), ("tests.support.training:SmallNet", "no.such:module", torch.nn.functional.mse_loss), False),
    ],
)
def test_code_that_gathers_is_found_by_the_name(cells: Any, references: Any, found: bool) -> None:
    assert uses_gather(cells, references) is found


def test_data_mode_forms_a_group_for_a_loss_that_gathers() -> None:
    config = DistributedConfig(path="relay")
    assert parallel_spec(config, 2) is None
    shape = parallel_spec(config, 2, gather=True)
    assert shape is not None and (shape.mode, shape.dp, shape.gather) == ("data", 2, True)


def loud(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return 2 * function(*args)

    return wrapper


def test_an_object_whose_name_leads_to_another_one_is_refused() -> None:
    with pytest.raises(SourceError, match=r"step is not the plain_step that its module has.*@decorator above"):
        factory_name("step", loud(plain_step), None)
    assert factory_name("step", plain_step, None) == f"{__name__}:plain_step"


def plain_step(model: Any, batch: Any) -> Any:
    return model(batch)


def test_precision_auto_is_bf16_where_every_card_computes_it() -> None:
    def card(has_bf16: bool) -> Hello:
        return Hello(
            name="", program="", versions={}, hostname="", device="cuda:0", device_name="", device_uuid="", has_bf16=has_bf16
        )  # fmt: skip

    assert precision_for("auto", [card(True), card(True)]) == "bf16"
    assert precision_for("auto", [card(True), card(False)]) == "fp32"
    assert precision_for("auto", []) == "fp32"
    assert precision_for("fp16", [card(True)]) == "fp16"


def test_rounds_stand_in_the_record_without_their_length() -> None:
    assert build().rounds is None
    assert build(sync="local", accumulation_steps=2).rounds == RoundSpec("average", 1.0, 0.0, 2)
    assert build(sync="local", sync_every=7) == build(sync="local", sync_every=8)
    sparse = build(sync="local", outer="sparse", outer_args={"density": 0.1, "bits": 4}).rounds
    assert sparse == RoundSpec("sparse", 1.0, 0.0, 1, density=0.1, bits=4) and sparse.decay == 0.95
    assert build(sync="local", wire="int8").wire == "int8"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outer_args": {"bits": 4}}, "outer='average' takes none: leave it out, or choose outer='sparse'"),
        ({"outer": "sparse", "outer_args": {"densety": 1}}, "names 'densety'; it may name density, bits, decay"),
        ({"outer": "sparse", "outer_args": {"density": 0}}, "density is 0; give a number above 0, up to 1"),
        ({"outer": "sparse", "outer_args": {"density": "1"}}, "density is '1'; give a number above 0"),
        ({"outer": "sparse", "outer_args": {"bits": 3}}, "bits is 3; give 1, 2, 4, 8 or 32"),
        ({"outer": "sparse", "outer_args": {"decay": 2}}, "decay is 2; give a number from 0 to 1"),
        ({"outer": "partial", "outer_args": {"decay": 0.9}}, "all that was left out stays: leave decay out"),
    ],
)
def test_numbers_of_sparse_rounds_are_looked_at(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(sync="local", **options)


@pytest.mark.parametrize(
    ("changes", "parallel", "said"),
    [
        ({"optimizer_site": "orchestrator"}, None, "no worker has an optimizer"),
        ({"precision": "fp16"}, None, "use bf16 or fp32"),
        ({}, ParallelSpec(mode="zero", dp=2), "in mode zero workers hold parts"),
        ({}, ParallelSpec(dp=2, path="direct"), "past the orchestrator; choose path='relay'"),
        ({}, ParallelSpec(dp=2, gather=True), "gather_batch"),
    ],
)
def test_local_sync_is_refused_where_no_worker_takes_steps_alone(
    changes: dict[str, Any], parallel: ParallelSpec | None, said: str
) -> None:
    config = DistributedConfig()
    options = TrainingOptions(sync="local", **changes).settled(config)
    with pytest.raises(ConfigError, match=f"sync is 'local', and .*{said}.*leave sync at 'step'"):
        build_spec(config, None, Factory("Net"), options, parallel)
