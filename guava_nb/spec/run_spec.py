"""From what a user says about a model, a loss and an optimizer to the records that a worker can follow.

Everything wrong with it is found here, on the orchestrator, before any worker is asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import msgspec
import torch

from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError, SourceError
from guava_nb.protocol.messages import CacheSpec, Factory, ParallelSpec, RunSpec

__all__ = ["build_spec", "cache_spec", "factory_name", "mode_of", "parallel_spec", "plain_arguments"]

#: Settings with few choices, here so that a wrong one is refused whatever it came from.
_CHOICES = {
    "scheduler_interval": ("step", "epoch", "validation"),
    "optimizer_site": ("workers", "orchestrator"),
    "precision": ("fp32", "bf16", "fp16", "fp64"),
}

Reference = str | Callable[..., Any] | type


def plain_arguments(what: str, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments that can travel as plain data.

    Raises:
        ConfigError: a value is not a number, text, bool, None, or a list or dict of these.
    """
    plain = dict(arguments or {})
    for name, value in plain.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError) as error:
            raise ConfigError(
                f"{what}: argument {name!r} is a {type(value).__name__}, and only numbers, text, bools, None, lists and dicts "
                "travel to workers. Make the object inside a function of a %%guava_share cell and name that function"
            ) from error
    return plain


def factory_name(what: str, reference: Reference, shared: ModuleType | None) -> str:
    """Return the name under which workers find something: shared, importable, or torch's own.

    Raises:
        SourceError: it exists in this notebook or script only.
    """
    if isinstance(reference, str):
        return reference
    name, module = getattr(reference, "__qualname__", ""), getattr(reference, "__module__", "")
    if shared is not None and hasattr(shared, name):
        return name
    if module in ("__main__", "", None) or "<locals>" in name or "<lambda>" in name:
        raise SourceError(
            f"{what} {name or reference!r} exists only here. Put its definition into a %%guava_share cell (in a script: "
            "orch.share(source)), or into a module that the workers can import, and give its name"
        )
    return f"{module}:{name}"


def _factory(what: str, ref: Reference, args: Mapping[str, Any] | None, shared: ModuleType | None) -> Factory:
    if isinstance(ref, str) and "(" in ref:
        option = {"criterion": "loss"}.get(what, what)
        raise ConfigError(
            f"{what} {ref!r}: give the name alone, {ref.partition('(')[0]}, and its arguments beside it: {what}_args={{...}}, "
            f"in a notebook --{option}-args as JSON"
        )
    return Factory(factory_name(what, ref, shared), plain_arguments(what, args))


def optimizer_arguments(
    optimizer: Reference, given: Mapping[str, Any] | None, config: DistributedConfig
) -> dict[str, Any]:
    """Return the optimizer's arguments; without any, learning rate and weight decay come from the configuration."""
    if given is not None:
        return dict(given)
    torch_class = getattr(torch.optim, optimizer, None) if isinstance(optimizer, str) else optimizer
    accepted = inspect.signature(torch_class).parameters if callable(torch_class) else {}
    defaults = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    return {name: value for name, value in defaults.items() if name in accepted}


def parallel_spec(
    config: DistributedConfig,
    num_workers: int,
    tensor_plan: Mapping[str, str] | None = None,
    reach: Callable[[], bool] = lambda: False,
) -> ParallelSpec | None:
    """Return how a model is spread over the workers that are here; None: whole replicas that meet at the hub.

    Args:
        config: axes, zero stage and path.
        num_workers: that are here.
        tensor_plan: see `ParallelSpec`.
        reach: asked in data mode with path "auto": would whole replicas be served better by a direct group?

    Raises:
        ConfigError: the axes do not multiply to the number of workers.
    """
    mesh, mode = config.mesh(num_workers), config.mode(num_workers)
    if mode == "data" and not config.sync_batchnorm and not _direct_replicas(config, num_workers, reach):
        return None
    return ParallelSpec(
        mode=mode,
        dp=mesh.data,
        pp=mesh.stages,
        tp=mesh.tensor,
        zero_stage=config.zero_stage,
        schedule=config.pipeline_schedule,
        micro_batches=config.micro_batches if config.pipeline_parallel else 1,
        stages_per_rank=config.stages_per_worker,
        split=_names(config.pipeline_split),
        balance=config.pipeline_balance if config.pipeline_parallel and not config.pipeline_split else "parameters",
        tensor_plan=dict(tensor_plan or {}),
        checkpoint_activations=_names(config.checkpoint_activations),
        path=config.path,
    )


def _direct_replicas(config: DistributedConfig, num_workers: int, reach: Callable[[], bool]) -> bool:
    """Whether whole replicas form a process group; at the hub they can come and go within a step, and may be unlike."""
    if num_workers < 2 or config.path == "relay":
        return False
    return config.path == "direct" or (config.optimizer_site == "workers" and reach())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def cache_spec(config: DistributedConfig, mode: str | None = None) -> CacheSpec | None:
    """Return what workers keep of batches; `mode` replaces the configuration's `worker_cache`.

    Raises:
        ConfigError: there is no such mode.
    """
    chosen = config.worker_cache if mode is None else mode
    if chosen not in ("off", "memory", "disk"):
        raise ConfigError(f"cache is {chosen!r}; it is one of: off, memory, disk")
    if chosen == "off":
        return None
    return CacheSpec(chosen, config.worker_cache_mb << 20, config.worker_cache_dir if chosen == "disk" else "")


def mode_of(spec: RunSpec) -> str:
    """Return the mode that a run's record stands for."""
    return "data" if spec.parallel is None else spec.parallel.mode


def _check_numbers(chosen: Mapping[str, Any]) -> None:
    if not (isinstance(chosen["seed"], int) and 0 <= chosen["seed"] < 2**63):
        raise ConfigError(f"seed is {chosen['seed']!r}; give a whole number from 0 to 2**63 - 1")
    clip = chosen["max_grad_norm"]
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ConfigError(f"max_grad_norm is {clip!r}; give a number above 0, or None for no clipping")


def build_spec(
    config: DistributedConfig,
    shared: ModuleType | None,
    *,
    model: Factory,
    criterion: Reference | None,
    criterion_args: Mapping[str, Any] | None,
    step: Reference | None,
    optimizer: Reference,
    optimizer_args: Mapping[str, Any] | None,
    scheduler: Reference | None,
    scheduler_args: Mapping[str, Any] | None,
    threads: int | None,
    parallel: ParallelSpec | None = None,
    preprocess: Reference | None = None,
    augment: Reference | None = None,
    tokens: Reference | None = None,
    **overrides: Any,
) -> RunSpec:
    """Return the records for a run; `overrides` replace the configuration's values where they are not None.

    Raises:
        ConfigError, SourceError: something is wrong or exists only here.
    """
    if (criterion is None) == (step is None):
        raise ConfigError(
            "give either a criterion (loss of outputs and targets) or a step (of model and batch), not both"
        )
    chosen: dict[str, Any] = {
        "scheduler_interval": config.scheduler_interval,
        "optimizer_site": config.optimizer_site,
        "precision": config.effective_precision,
        "max_grad_norm": config.max_grad_norm,
        "seed": config.seed,
        "sync_batchnorm": config.sync_batchnorm,
        "count_flops": config.count_flops,
        **{name: value for name, value in overrides.items() if value is not None},
    }
    for name, allowed in _CHOICES.items():
        if chosen[name] not in allowed:
            raise ConfigError(f"{name} is {chosen[name]!r}; it is one of: {', '.join(allowed)}")
    _check_numbers(chosen)
    if parallel is not None and chosen["optimizer_site"] == "orchestrator":
        raise ConfigError(
            f"optimizer_site is 'orchestrator' and the mode {parallel.mode}: there the workers hold parts of the model, and each "
            "steps its own; leave optimizer_site at 'workers', or use data mode"
        )
    return RunSpec(
        model=model,
        criterion=None if criterion is None else _factory("criterion", criterion, criterion_args, shared),
        step=None if step is None else _factory("step", step, None, shared),
        optimizer=_factory("optimizer", optimizer, optimizer_arguments(optimizer, optimizer_args, config), shared),
        scheduler=None if scheduler is None else _factory("scheduler", scheduler, scheduler_args, shared),
        bucket_bytes=int(config.bucket_mb * (1 << 20)),
        hash_every_steps=config.hash_every_steps,
        threads=threads or config.threads_per_worker,
        deterministic=config.deterministic,
        parallel=parallel,
        preprocess=None if preprocess is None else _factory("preprocess", preprocess, None, shared),
        augment=None if augment is None else _factory("augment", augment, None, shared),
        tokens=None if tokens is None else _factory("tokens", tokens, None, shared),
        **chosen,
    )
