"""Choosing modes one after the other, without a session."""

from __future__ import annotations

import re

import pytest

from guava_nb import ConfigError, Orchestrator


def test_a_mode_s_settings_do_not_linger_and_the_configuration_s_do() -> None:
    orchestrator = Orchestrator(path="relay", micro_batches=6)
    orchestrator.set_mode("pipeline", micro_batches=2, pipeline_split="3")
    assert (orchestrator.config.micro_batches, orchestrator.config.pipeline_split) == (2, "3")
    assert orchestrator.config.path == "relay"
    orchestrator.set_mode("zero", path="direct")
    assert orchestrator.config.path == "direct"
    orchestrator.set_mode("pipeline")
    assert (orchestrator.config.micro_batches, orchestrator.config.pipeline_split) == (6, "")
    assert orchestrator.config.path == "relay"


def test_nothing_that_a_mode_was_chosen_with_lingers() -> None:
    orchestrator = Orchestrator(precision="bf16", worker_cache="memory")
    kept = orchestrator.config.to_dict()
    settings = {
        "sync_batchnorm": True, "precision": "fp64", "accumulation_steps": 4, "seed": 3, "optimizer_site": "orchestrator",
        "worker_cache": "off", "max_grad_norm": 1.0,
    }  # fmt: skip
    orchestrator.set_mode("data", **settings)
    assert {name: getattr(orchestrator.config, name) for name in settings} == settings
    orchestrator.set_mode("data")
    assert orchestrator.config.to_dict() == {**kept, "tensor_parallel_size": None}
    orchestrator.set_mode("hybrid", dp=2, tp=2)
    orchestrator.set_mode("data")
    assert orchestrator.config.to_dict() == {**kept, "tensor_parallel_size": None}


@pytest.mark.parametrize(
    ("name", "value", "call"),
    [
        ("mode", "pipeline", "set_mode(mode=...)"),
        ("optimizer", "SGD", "start_training(optimizer=...)"),
        ("sync", "local", "start_training(sync=...)"),
    ],
)
def test_an_argument_of_a_mode_or_a_run_is_refused_with_the_call_that_takes_it(
    name: str, value: str, call: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name!r} is no setting of a session; give it to {call}")):
        Orchestrator(**{name: value})


def test_another_name_is_refused_with_the_setting_that_is_near() -> None:
    with pytest.raises(ConfigError, match="num_workers"):
        Orchestrator(num_worker=2)
