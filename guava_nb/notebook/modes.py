"""%guava_mode: from its line to the orchestrator's settings, and a sentence on what they mean."""

from __future__ import annotations

import argparse
from typing import Any

from IPython.core.error import UsageError

from guava_nb.config import DistributedConfig, mode_settings
from guava_nb.errors import ConfigError

__all__ = ["mode_arguments", "mode_sentence"]

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
    "balance": "pipeline_balance",
    "plan": "tensor_plan",
    "checkpoint_activations": "checkpoint_activations",
    "sync_batchnorm": "sync_batchnorm",
    "path": "path",
}
_PIPELINE_ONLY = ("micro_batches", "schedule", "stages_per_worker", "split", "balance")


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
    if "sync_batchnorm" in given:
        given["sync_batchnorm"] = given["sync_batchnorm"] == "on"
    return {"mode": args.mode, **{_NAMES[name]: value for name, value in given.items()}}


def mode_sentence(config: DistributedConfig, num_workers: int | None) -> str:
    """Say what the settings mean for so many workers; None: for those that are expected."""
    try:
        mode, mesh = config.mode(num_workers), config.mesh(num_workers)
    except ConfigError as error:
        return f"This mode cannot be made of the workers that are here: {error}."
    sharded = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and parameters"}
    stages, workers = _count(mesh.stages * config.stages_per_worker, "stage"), _count(mesh.size, "worker")
    parts = (
        f"{config.micro_batches} micro-batches that flow" if config.micro_batches > 1 else "1 micro-batch that flows"
    )
    zero = f"{sharded.get(config.zero_stage, 'nothing')} shared out among the replicas (ZeRO {config.zero_stage})"
    texts = {
        "data": "every worker has the whole model and trains on its part of each batch",
        "pipeline": f"the model is cut into {stages} on {workers}, each batch into {parts} "
        f"through them ({config.pipeline_schedule})",
        "tensor": f"every layer that can be divided is shared by {workers}, who all work on the whole batch",
        "zero": f"{workers}, each with its part of every batch; {zero}",
        "hybrid": f"{mesh}: {_count(mesh.data, 'replica')} of {stages}, each stage's layers shared by {mesh.tensor}"
        + (f"; {zero}" if config.zero_stage else ""),
    }
    return f"Mode {mode}: {texts[mode]}."


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
