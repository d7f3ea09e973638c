"""Each setting changes something that is used, or stands in the table of those without effect: found by changing it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from guava_nb import CPULoader, Orchestrator
from guava_nb.cluster import host as session_host
from guava_nb.config import DistributedConfig
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import GuavaError
from guava_nb.evaluation.validation import Validation
from guava_nb.link.options import link_options
from guava_nb.protocol.messages import Factory
from guava_nb.spec.run_spec import build_spec, parallel_spec
from guava_nb.spec.training_options import TrainingOptions
from guava_nb.split import GPUTrainer
from guava_nb.training.byte_budget import chosen_limit
from guava_nb.training.plan import TrainingPlan

FOLDER = tempfile.TemporaryDirectory(prefix="guava-settings-")  # goes at the end of this process
SESSION_FILE = str(Path(FOLDER.name) / "session.json")
#: Another value than the default, and one that fits the contexts below.
OTHER: dict[str, Any] = {
    "d_model": 30, "n_heads": 5, "n_layers": 3, "num_epochs": 4, "batch_size": 2, "learning_rate": 0.5, "weight_decay": 0.2,
    "max_grad_norm": 1.0, "accumulation_steps": 3, "precision": "bf16", "use_amp": True, "optimizer_site": "orchestrator",
    "scheduler_interval": "epoch", "sync_batchnorm": True, "count_flops": True, "seed": 5, "deterministic": True,
    "threads_per_worker": 3, "master_ip": "127.0.0.9", "master_port": 45678, "gpu_host": "127.0.0.8", "tunnel": "direct",
    "workers_on": "nowhere:2", "num_workers": 8, "tls": False, "session_file": SESSION_FILE,
    "loader_workers": 2, "prefetch_steps": 7, "prefetch_bytes": 1 << 20,
    "worker_cache": "disk", "worker_cache_mb": 3, "worker_cache_dir": "rows", "data_parallel": False,
    "model_parallel": True, "pipeline_parallel": True, "tensor_parallel": True, "data_parallel_size": 1,
    "pipeline_parallel_size": 2, "tensor_parallel_size": 4, "micro_batches": 5, "zero_stage": 2,
    "pipeline_schedule": "gpipe", "stages_per_worker": 2, "pipeline_split": "3", "pipeline_balance": "time",
    "checkpoint_activations": "*", "path": "relay", "connect_timeout_s": 3.0, "heartbeat_s": 1.0, "silence_s": 9.0,
    "grace_s": 4.0, "rejoin_timeout_s": 6.0, "interrupt_grace_s": 2.0, "socket_buffer_mb": 2, "window_mb": 8,
    "bucket_mb": 1.0, "compression": "off", "budget_bytes": 10**9, "checkpoint_dir": "elsewhere", "save_interval": 3,
    "snapshot_place": "worker",
    "snapshot_every_steps": 2, "hash_every_steps": 9, "log_step_every": 7, "vocab_size": 3, "d_ff": 4, "max_seq_len": 5,
    "dropout": 0.3, "activation_timeout": 1.0, "ack_timeout": 1.0, "max_resends": 2, "resend_probe_interval": 1.0,
    "compact_log": False, "log_act": True,
}  # fmt: skip

#: What the settings of an axis, or of a cache, need beside them to say anything.
CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"worker_cache": "disk"},
    {"data_parallel": False, "pipeline_parallel": True, "num_workers": 4},
    {"num_workers": 4, "tensor_parallel": True},
    {"num_workers": 4, "pipeline_parallel": True, "pipeline_schedule": "interleaved"},
)


#: Fields of a plan that are made anew for each run.
OBJECTS = ("feed", "val_feed", "validation", "start")


class Seen(Exception):
    pass


def told(call: Any) -> Any:
    """What a call gives, or the sentence with which it refuses."""
    try:
        return repr(call())
    except GuavaError as error:
        return str(error)


@contextlib.contextmanager
def listener_seen() -> Iterator[list[Any]]:
    seen: list[Any] = []

    def listen(*arguments: Any, **words: Any) -> Any:
        seen.append(([one for one in arguments if isinstance(one, str | int | bool)], sorted(words.items(), key=str)))
        raise Seen

    with mock.patch.object(session_host, "Listener", listen):
        yield seen


def opened(config: DistributedConfig) -> Any:
    """Where and how a session would listen."""
    with listener_seen() as seen, contextlib.suppress(Seen):
        Orchestrator(config).open()
    return [repr(one) for one in seen]


def loaded(config: DistributedConfig) -> Any:
    loader = CPULoader(config=config)
    loader.setup_dataset(torch.utils.data.TensorDataset(torch.zeros(9)))
    made = loader._train_loader()
    return made.batch_size, made.num_workers, made.generator.initial_seed()


def used(config: DistributedConfig) -> list[Any]:
    """Every record that is made of the settings, as text."""
    options = TrainingOptions(scheduler="StepLR", scheduler_args={"step_size": 1}).settled(config)
    feed = LoaderFeed([1, 2, 3])

    def spec() -> Any:
        parallel = parallel_spec(config, config.num_workers, {}, lambda: False)
        return build_spec(config, None, Factory("Net"), options, parallel)

    def plan() -> Any:
        made = TrainingPlan.of(options, config, (feed, None), Validation)
        return {one.name: getattr(made, one.name) for one in dataclasses.fields(made) if one.name not in OBJECTS}

    def session() -> Any:
        made = Orchestrator(config)
        made._saved()
        kept = made.run_path
        made._let_file_go(forget=True)
        return made._patience_s, made.expected_workers, kept

    return [
        told(call)
        for call in (
            lambda: options, spec, plan, session, lambda: link_options(config), lambda: chosen_limit(config, None, None),
            config.validate, config.mesh, config.mode, config.get_layers_per_gpu, config.tensor_parallel_groups,
            config.get_parallelism_strategy, lambda: opened(config), lambda: loaded(config),
            lambda: GPUTrainer(config=config, device="cpu").config.gpu_host,
        )
    ]  # fmt: skip


@functools.cache
def used_by_default(context: tuple[tuple[str, Any], ...]) -> list[Any]:
    """What a context alone comes to: the same for each setting."""
    return used(DistributedConfig(**dict(context)))


def differs(name: str, context: dict[str, Any]) -> bool:
    try:
        changed = DistributedConfig(**context).replace(**{name: OTHER[name]})
        return used_by_default(tuple(context.items())) != used(changed)
    except GuavaError:  # the context has no place for it
        return False


def test_the_table_has_every_setting() -> None:
    default = DistributedConfig().to_dict()
    assert sorted(OTHER) == sorted(default)
    assert [name for name, value in OTHER.items() if value == default[name]] == []


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_has_an_effect_or_says_that_it_has_none(name: str) -> None:
    without = list(DistributedConfig(**{name: OTHER[name]}).without_effect()) == [name]
    found = any(differs(name, {key: value for key, value in context.items() if key != name}) for context in CONTEXTS)
    assert found != without
