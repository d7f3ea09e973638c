"""Values, ranges and what follows from the settings."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import guava_nb
from guava_nb import Orchestrator
from guava_nb.config import DistributedConfig, mode_settings, version
from guava_nb.config.mesh import divide_layers, largest_divisor, make_mesh
from guava_nb.errors import ConfigError, MeshError
from guava_nb.protocol.messages import RunSpec
from guava_nb.training.plan import TrainingPlan

PACKAGE = Path(guava_nb.__file__).parent
#: Fields of records that are filled with the settings of the same names.
SAME_NAMED = {*RunSpec.__struct_fields__, *(spec.name for spec in dataclasses.fields(TrainingPlan))}


def test_the_seeds_own_example_works() -> None:
    config = DistributedConfig(
        vocab_size=50257,
        d_model=768,
        n_heads=12,
        n_layers=12,
        d_ff=3072,
        max_seq_len=1024,
        dropout=0.1,
        batch_size=8,
        learning_rate=3e-4,
        weight_decay=0.01,
        max_grad_norm=1.0,
        use_amp=False,
        master_ip="0.0.0.0",
        master_port=29500,
        num_workers=2,
        data_parallel=True,
        model_parallel=False,
        pipeline_parallel=False,
        tensor_parallel=False,
        micro_batches=4,
        tensor_parallel_size=2,
        activation_timeout=0.0,
        ack_timeout=0.0,
        max_resends=0,
        resend_probe_interval=5.0,
        checkpoint_dir="./model/checkpoints",
        save_interval=1000,
    )
    config.validate()
    assert config.get_parallelism_strategy() == "DATA_PARALLEL"


def test_every_field_is_in_the_docstring() -> None:
    text = DistributedConfig.__doc__ or ""
    assert [name for name in DistributedConfig().to_dict() if name not in text] == []


def _read_somewhere(name: str) -> bool:
    """Whether some code beyond the declaration, and beyond a mode's way of setting it, takes the setting."""
    taken = re.compile(rf"(?:config|_given|chosen|\))\.{name}\b|setting=\"{name}\"")
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")]
    own = (PACKAGE / "config" / "settings.py").read_text(encoding="utf-8")
    return name in SAME_NAMED or f"self.{name}" in own or any(taken.search(text) for text in texts)


def test_settings_without_effect_are_those_that_nothing_reads() -> None:
    marked = {spec.name for spec in dataclasses.fields(DistributedConfig) if spec.metadata.get("instead") is not None}
    assert marked == {name for name in DistributedConfig().to_dict() if not _read_somewhere(name)}
    told = (DistributedConfig.__doc__ or "").partition("without effect")[2]
    assert [name for name in marked if name not in told] == []


def test_a_setting_without_effect_is_accepted_and_told_once() -> None:
    assert Orchestrator().status().notes == ()
    config = DistributedConfig.from_env({"ACK_TIMEOUT_SEC": "2"}).replace(vocab_size=50, dropout=0.1)
    assert (config.ack_timeout, config.vocab_size) == (2.0, 50)
    assert list(config.without_effect()) == ["vocab_size", "ack_timeout"]
    orchestrator = Orchestrator(config)
    orchestrator.set_mode("zero")
    [note] = orchestrator.status().notes
    assert note.startswith("accepted, without effect here: vocab_size, ack_timeout (silence_s takes its place);")


def test_round_trip_through_json() -> None:
    config = DistributedConfig(num_workers=3, max_grad_norm=0.5, threads_per_worker=2, checkpoint_dir="x")
    again = DistributedConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.origin("num_workers") == "dictionary"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 0, r"batch_size is 0 \(from argument\); it must be at least 1"),
        ("batch_size", "8", "whole number, not str"),
        ("batch_size", 8.0, "whole number, not float"),
        ("batch_size", True, "whole number, not bool"),
        ("batch_size", None, "whole number, not NoneType"),
        ("dropout", 1.0, "less than 1"),
        ("learning_rate", float("nan"), "finite"),
        ("learning_rate", float("inf"), "finite"),
        ("learning_rate", "fast", "a number or none, not str"),
        ("master_port", 70000, "at most 65535"),
        ("heartbeat_s", 0, "greater than 0"),
        ("precision", "fp23", 'one of fp32, bf16, fp16, fp64, auto. Did you mean "fp32"'),
        ("precision", 16, "a text, not int"),
        ("use_amp", "yes", "true or false, not str"),
        ("use_amp", 2, "true or false"),
        ("seed", 10**400, "at most"),
        ("learning_rate", 10**400, "a number"),
        ("max_grad_norm", [], "a number or none, not list"),
    ],
)
def test_wrong_values_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**{name: value})
    config = DistributedConfig()
    with pytest.raises(ConfigError, match=message):
        setattr(config, name, value)
    assert config == DistributedConfig()


def test_exact_types_come_back() -> None:
    config = DistributedConfig(batch_size=np.int64(4), learning_rate=np.float32(0.5), grace_s=3, use_amp=1)
    assert type(config.batch_size) is int
    assert type(config.learning_rate) is float
    assert type(config.grace_s) is float
    assert config.use_amp is True


def test_unknown_names_are_refused_everywhere() -> None:
    config = DistributedConfig()
    for act in (
        lambda: DistributedConfig.from_dict({"batchsize": 1}),
        lambda: config.replace(batchsize=1),
        lambda: setattr(config, "batchsize", 1),
        lambda: config.origin("batchsize"),
    ):
        with pytest.raises(ConfigError, match='Did you mean "batch_size"'):
            act()


def test_replace_keeps_origins_and_assignment_takes_over() -> None:
    config = DistributedConfig.from_env({"BATCH_SIZE": "3"}).replace(seed=4)
    assert (config.batch_size, config.seed) == (3, 4)
    assert config.origin("batch_size") == "environment variable BATCH_SIZE"
    config.batch_size = 5
    assert config.origin("batch_size") == "argument"
    assert dataclasses.replace(config, seed=9).seed == 9


def test_effective_precision() -> None:
    assert DistributedConfig().effective_precision == "fp32"
    assert DistributedConfig(use_amp=True).effective_precision == "fp16"
    assert DistributedConfig(use_amp=True, precision="bf16").effective_precision == "bf16"


# ------------------------------------------------------------------------------------------------------- arithmetic

HYBRID = {"data_parallel": True, "pipeline_parallel": True, "tensor_parallel": True}


def test_the_arithmetic_is_shown() -> None:
    config = DistributedConfig(**HYBRID, data_parallel_size=2, pipeline_parallel_size=2, num_workers=6)
    with pytest.raises(
        ConfigError, match="^dp 2 x pp 2 x tp 2 needs 8 workers, 6 are here: start 2 more with %guava_worker"
    ):
        config.validate()
    config.validate(num_workers=8)
    with pytest.raises(ConfigError, match="needs 8 workers, 1 is here"):
        config.validate(num_workers=1)


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ({}, "DATA_PARALLEL"),
        ({"data_parallel": False, "model_parallel": True}, "MODEL_PARALLEL"),
        ({"data_parallel": False, "pipeline_parallel": True}, "PIPELINE_PARALLEL"),
        ({"data_parallel": False, "pipeline_parallel": True, "model_parallel": True}, "PIPELINE_PARALLEL"),
        ({"data_parallel": False, "tensor_parallel": True}, "TENSOR_PARALLEL"),
        ({"tensor_parallel": True}, "HYBRID"),
        (HYBRID, "HYBRID"),
    ],
)
def test_strategy(flags: dict[str, bool], strategy: str) -> None:
    assert DistributedConfig(**flags).get_parallelism_strategy() == strategy


def test_no_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parallelism is on"):
        DistributedConfig(data_parallel=False).validate()


def test_tensor_groups_and_layers() -> None:
    config = DistributedConfig(tensor_parallel=True, num_workers=4)
    assert config.tensor_parallel_groups() == [[0, 1], [2, 3]]
    config = DistributedConfig(data_parallel=False, pipeline_parallel=True, num_workers=3, n_layers=8)
    assert config.get_layers_per_gpu() == {0: (0, 3), 1: (3, 6), 2: (6, 8)}
    assert config.layers_per_gpu == config.get_layers_per_gpu()
    assert config.tensor_parallel_groups() == [[0], [1], [2]]
    config = DistributedConfig(**HYBRID, data_parallel_size=2, num_workers=8, n_layers=4)
    assert config.get_layers_per_gpu() == {r: (0, 2) if r % 4 < 2 else (2, 4) for r in range(8)}


def test_adapt_to_gpus() -> None:
    config = DistributedConfig(tensor_parallel=True, tensor_parallel_size=4, data_parallel_size=2, num_workers=8)
    assert config.adapt_to_gpus(6) is config
    assert (config.num_workers, config.tensor_parallel_size, str(config.mesh())) == (6, 3, "dp 2 x pp 1 x tp 3")
    config.adapt_to_gpus(5)
    assert (config.data_parallel_size, str(config.mesh())) == (None, "dp 5 x pp 1 x tp 1")
    with pytest.raises(ConfigError, match="num_workers is 0"):
        config.adapt_to_gpus(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"silence_s": 1.0}, "silence_s 1 .from argument. must be at least twice heartbeat_s 2 .from default"),
        ({"use_amp": True, "precision": "fp64"}, "contradict"),
        (
            {"pipeline_parallel": True, "num_workers": 2, "batch_size": 3},
            "micro_batches 4 cannot be cut from batch_size",
        ),
        ({"model_parallel": True, "num_workers": 4, "n_layers": 3}, "n_layers 3 cannot fill 4 stages"),
        ({"tensor_parallel": True, "num_workers": 2, "n_heads": 3}, "n_heads 3 cannot be shared by"),
        ({"tensor_parallel": True, "num_workers": 2, "d_model": 30}, "d_model 30 is no multiple of n_heads 12"),
    ],
)
def test_validate_refuses(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(**fields).validate()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 64), st.none() | st.integers(1, 8), st.none() | st.integers(1, 8), st.integers(1, 8))
def test_a_mesh_has_exactly_the_workers_that_are_here(n: int, dp: int | None, pp: int | None, tp: int) -> None:
    try:
        mesh = make_mesh(n, dp, pp, tp)
    except ConfigError as error:
        assert f"{n} are here" in str(error) or "1 is here" in str(error)
        return
    assert mesh.size == n
    assert mesh.data == dp or dp is None
    assert mesh.stages == pp or pp is None
    assert {mesh.stage_of(rank) for rank in range(n)} == set(range(mesh.stages))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 200))
def test_layers_are_divided_whole_and_evenly(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        with pytest.raises(ConfigError, match="cannot fill"):
            divide_layers(num_layers, num_stages)
        return
    spans = divide_layers(num_layers, num_stages)
    assert [layer for start, end in spans for layer in range(start, end)] == list(range(num_layers))
    sizes = [end - start for start, end in spans]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 500), st.integers(1, 500))
def test_largest_divisor(number: int, most: int) -> None:
    size = largest_divisor(number, most)
    assert number % size == 0
    assert size <= most
    assert not any(number % other == 0 for other in range(size + 1, min(number, most) + 1))


def test_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise version.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", lambda name: f"1.2 of {name}")
    assert version.installed_version() == "1.2 of guava-nb"
    monkeypatch.setattr(version, "version", missing)
    assert version.installed_version() == "0+unknown"


@pytest.mark.parametrize(
    ("sizes", "count", "told", "missing"),
    [
        ((2, 2, 1), 3, "start 1 more with", 1),
        ((2, 1, 1), 3, "such as dp 3 x pp 1 x tp 1, leave one of them out, or let 1 worker leave", -1),
        ((1, 2, 2), 6, "such as dp 1 x pp 3 x tp 2, leave one of them out, or let 2 workers leave", -2),
        ((2, 2, 1), 5, "such as dp 5 x pp 1 x tp 1", -1),
    ],
)
def test_a_wrong_number_of_workers_says_what_to_do(
    sizes: tuple[int, int, int], count: int, told: str, missing: int
) -> None:
    with pytest.raises(MeshError, match=f"{count} are here: .*{told}") as caught:
        make_mesh(count, *sizes)
    assert caught.value.missing == missing


@settings(deadline=None)
@given(st.tuples(*[st.integers(1, 4)] * 3), st.integers(1, 32))
def test_proposed_axes_always_fit(sizes: tuple[int, int, int], count: int) -> None:
    try:
        make_mesh(count, *sizes)
    except MeshError as error:
        found = re.search(r"such as dp (\d+) x pp (\d+) x tp (\d+)", str(error))
        assert (found is None) == (error.missing > 0)
        if found is not None:
            make_mesh(count, *map(int, found.groups()))


@pytest.mark.parametrize(
    ("mode", "given_", "told"),
    [
        ("hybrid", {}, "hybrid mode needs its axes"),
        ("hybrid", {"dp": 2, "pp": 2, "zero_stage": 2}, "ZeRO 2 would gather its parameters for every micro-batch"),
        ("pipeline", {"stages_per_worker": 2}, "more than one stage on a worker needs pipeline_schedule='interleaved'"),
        ("pipeline", {"sync_batchnorm": True}, "sync_batchnorm with a pipeline"),
    ],
)
def test_settings_of_a_mode_that_contradict_each_other_are_refused(
    mode: str, given_: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        mode_settings(mode, **given_)


def test_settings_of_a_mode_are_passed_on() -> None:
    chosen = mode_settings("pipeline", pipeline_schedule="interleaved", stages_per_worker=2)
    assert (chosen["pipeline_schedule"], chosen["stages_per_worker"], chosen["micro_batches"]) == ("interleaved", 2, 4)
