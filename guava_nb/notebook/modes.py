"""%guava_mode: from its line to the orchestrator's settings, and a sentence on what they mean."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError

from guava_nb.config import DistributedConfig, mode_settings
from guava_nb.errors import ConfigError

__all__ = ["mode_arguments", "mode_sentence", "planned_config"]

#: Option of the line to the name that the orchestrator knows.
_NAMES = {
    "dp": "dp",
    "pp": "pp",
    "tp": "tp",
    "zero": "zero_stage",
    "micro_batches": "micro_batches",
    "schedule": "pipeline_schedule",
    "stages_per_worker": "stages_per_worker",
    "split": "pipeline_split",
    "plan": "tensor_plan",
    "checkpoint_activations": "checkpoint_activations",
    "path": "path",
}
_PIPELINE_ONLY = ("micro_batches", "schedule", "stages_per_worker", "split")


def mode_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Orchestrator.set_mode` that a line gives.

    Raises:
        UsageError: an option that the mode has no use for, or that has no mode.
    """
    given = {name: value for name in _NAMES if (value := getattr(args, name)) is not None}
    if args.mode is None:
        if given:
            raise UsageError(f"--{next(iter(given)).replace('_', '-')} needs the mode before it: %guava_mode MODE ...")
        return {}
    wrong = [name for name in _PIPELINE_ONLY if name in given and args.mode not in ("pipeline", "hybrid")]
    wrong += ["plan"] if "plan" in given and args.mode not in ("tensor", "hybrid") else []
    if wrong:
        raise UsageError(f"--{wrong[0].replace('_', '-')} means nothing in {args.mode} mode")
    try:
        mode_settings(args.mode, **{_NAMES[n]: given[n] for n in ("dp", "pp", "tp", "zero") if n in given})
    except ConfigError as error:
        raise UsageError(str(error)) from None
    # A choice is made anew each time: what an earlier line said of the pipeline does not linger.
    defaults = {"micro_batches": 4, "pipeline_schedule": "1f1b", "stages_per_worker": 1, "pipeline_split": "",
                "checkpoint_activations": "", "path": "auto"}  # fmt: skip
    return {"mode": args.mode, **defaults, **{_NAMES[name]: value for name, value in given.items()}}


def planned_config(config: DistributedConfig, chosen: dict[str, Any]) -> DistributedConfig:
    """Return what a configuration becomes with a chosen mode, as `Orchestrator.set_mode` does it."""
    if not chosen:
        return config
    rest = {name: value for name, value in chosen.items() if name not in ("mode", "tensor_plan")}
    axes = {name: rest.pop(name) for name in ("dp", "pp", "tp", "zero_stage") if name in rest}
    return config.replace(**mode_settings(chosen["mode"], **axes), **rest)


def mode_sentence(config: DistributedConfig, num_workers: int | None) -> str:
    """Say what the settings mean for so many workers; None: for those that are expected."""
    try:
        mode, mesh = config.mode(num_workers), config.mesh(num_workers)
    except ConfigError as error:
        return f"This mode cannot be made of the workers that are here: {error}."
    sharded = {
        1: "optimizer state is",
        2: "optimizer state and gradients are",
        3: "optimizer state, gradients and parameters are",
    }
    parts = (
        "1 micro-batch that flows" if config.micro_batches == 1 else f"{config.micro_batches} micro-batches that flow"
    )
    texts = {
        "data": "every worker has the whole model and trains on its part of each batch",
        "pipeline": f"the model is cut into {mesh.stages * config.stages_per_worker} stages on {mesh.stages} workers, each batch "
        f"into {parts} through them ({config.pipeline_schedule})",
        "tensor": f"every layer that can be divided is shared by {mesh.tensor} workers, who all work on the whole batch",
        "zero": f"every worker trains on its part of each batch, {sharded.get(config.zero_stage, '')} shared out among "
        f"{mesh.data} workers (ZeRO {config.zero_stage})",
        "hybrid": f"{mesh}: {mesh.data} replicas, each of {mesh.stages} pipeline stages, each stage's layers shared by "
        f"{mesh.tensor}"
        + (f"; {sharded[config.zero_stage]} shared out (ZeRO {config.zero_stage})" if config.zero_stage else ""),
    }
    return f"Mode {mode}: {texts[mode]}."
