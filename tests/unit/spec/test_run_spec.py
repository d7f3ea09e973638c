from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError, SourceError
from guava_nb.protocol.messages import Cell, Factory
from guava_nb.spec.run_spec import (
    build_spec,
    factory_name,
    optimizer_arguments,
    parallel_spec,
    plain_arguments,
    uses_gather,
)
from guava_nb.spec.training_options import TrainingOptions


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
    assert optimizer_arguments("SGD", {"lr": 1.0}, config) == {"lr": 1.0}
    spec = build(precision="bf16", max_grad_norm=2.0)
    assert (spec.precision, spec.max_grad_norm, spec.optimizer_site) == ("bf16", 2.0, "workers")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; it is one of: fp32, bf16, fp16, fp64"),
        ({"optimizer_site": "hub"}, "optimizer_site is 'hub'"),
        ({"scheduler_interval": "batch"}, "scheduler_interval is 'batch'"),
        ({"seed": 2**70}, "give a whole number from 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; give a number above 0"),
    ],
)
def test_wrong_choices_name_the_right_ones(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build(**changes)


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
