"""%guava_mode: from its line to the orchestrator's settings, and a sentence on what they mean."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from guava_nb.config import DistributedConfig, check_plan, mode_settings
from guava_nb.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from guava_nb.config.mesh import Mesh

__all__ = ["OTHER_MODE_NAMES", "mode_arguments", "mode_sentence"]

#: What other programs call these modes.
OTHER_MODE_NAMES = {
    **dict.fromkeys(("ddp", "dp", "dataparallel", "distributeddataparallel"), "data"),
    **dict.fromkeys(("fsdp", "fsdp2", "zero3", "zero-3"), "zero --zero 3"),
    "zero1": "zero --zero 1",
    "zero2": "zero --zero 2",
    "deepspeed": "zero",
    **dict.fromkeys(("pp", "stages", "gpipe"), "pipeline"),
    **dict.fromkeys(("tp", "megatron"), "tensor"),
    **dict.fromkeys(("3d", "2d"), "hybrid"),
}
#: Options of the line that the orchestrator knows by another name.
_NAMES = {
    "zero": "zero_stage",
    "schedule": "pipeline_schedule",
    "split": "pipeline_split",
    "balance": "pipeline_balance",
    "plan": "tensor_plan",
}
#: What else stands in a parsed line.
_NO_SETTINGS = ("mode", "help", "_given")
_PIPELINE_ONLY = ("micro_batches", "schedule", "stages_per_worker", "split", "balance")


def mode_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Orchestrator.set_mode` that a line gives.

    Raises:
        UsageError: an option that the mode has no use for or that has no mode, or options that contradict each other.
    """
    given = {name: value for name, value in vars(args).items() if name not in _NO_SETTINGS and value is not None}
    if args.mode is None:
        if given:
            raise UsageError(f"--{next(iter(given)).replace('_', '-')} needs the mode before it: %guava_mode MODE ...")
        return {}
    wrong = [name for name in _PIPELINE_ONLY if name in given and args.mode not in ("pipeline", "hybrid")]
    wrong += ["plan"] if "plan" in given and args.mode not in ("tensor", "hybrid") else []
    if wrong:
        raise UsageError(f"--{wrong[0].replace('_', '-')} means nothing in {args.mode} mode; leave it out")
    if "sync_batchnorm" in given:
        given["sync_batchnorm"] = given["sync_batchnorm"] == "on"
    chosen = {_NAMES.get(name, name): value for name, value in given.items()}
    try:
        mode_settings(args.mode, **{name: value for name, value in chosen.items() if name != "tensor_plan"})
        check_plan(chosen.get("tensor_plan", {}))
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return {"mode": args.mode, **chosen}


def mode_sentence(
    config: DistributedConfig, num_workers: int | None, asked: str | None = None, num_local: int = 0, going: str = ""
) -> str:
    """Say what the settings mean for so many workers.

    Args:
        config: that holds them.
        num_workers: that are here; None: those that are expected.
        asked: the mode that was asked for.
        num_local: how many of the workers were started by this notebook.
        going: the run that goes on in the mode that held before; "" for none.
    """
    return _sentence(config, num_workers, asked, num_local) + (
        f" This holds from the next run on; {going} goes on as it began." if going else ""
    )


def _sentence(config: DistributedConfig, num_workers: int | None, asked: str | None, num_local: int) -> str:
    try:
        mode, mesh = config.mode(num_workers), config.mesh(num_workers)
    except MeshError as error:
        return _not_yet(error, asked, num_local)
    meaning = _meaning(config, mode, mesh)
    if asked == "hybrid" and mode != "hybrid":
        amounts = f"Hybrid with these axes on {_count(mesh.size, 'worker')} amounts to {mode} mode"
        return f"{amounts} (%guava_mode {mode}): {meaning}."
    return f"Mode {mode}: {meaning}."


def _not_yet(error: MeshError, asked: str | None, num_local: int) -> str:
    what = f"Mode {asked}" if asked else "This mode"
    if error.missing < 0:
        return f"{what} cannot be made of the workers that are here. {error}."
    return (
        f"{what} waits for more workers: {error.arithmetic}. Start {error.missing} more: %guava_up --local "
        f"{num_local + error.missing}, or %guava_worker elsewhere; the mode is kept until then."
    )


def _meaning(config: DistributedConfig, mode: str, mesh: Mesh) -> str:
    sharded = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and parameters"}
    stages, workers = _count(mesh.stages * config.stages_per_worker, "stage"), _count(mesh.size, "worker")
    parts = (
        f"{config.micro_batches} micro-batches that flow" if config.micro_batches > 1 else "1 micro-batch that flows"
    )
    parts = "micro-batches that flow" if config.pipeline_schedule == "auto" else parts
    zero = f"{sharded.get(config.zero_stage, 'nothing')} shared out among the replicas (ZeRO {config.zero_stage})"
    same = "; with one stage per worker that is 1f1b, --stages-per-worker 2 interleaves"
    order = config.pipeline_schedule
    order += same if order == "interleaved" and config.stages_per_worker == 1 else ""
    order += ": measured, and chosen, when a run begins" if order == "auto" else ""
    texts = {
        "data": "every worker has the whole model and trains on its part of each batch",
        "pipeline": f"the model is cut into {stages} on {workers}, each batch into {parts} through them ({order})",
        "tensor": f"every layer that can be divided is shared by {workers}, which all work on the whole batch",
        "zero": f"{workers}, each with its part of every batch; {zero}",
        "hybrid": f"{mesh}: {_count(mesh.data, 'replica')} of {stages}, each stage's layers shared by {mesh.tensor}"
        + (f"; {zero}" if config.zero_stage else ""),
    }
    return texts[mode]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")
