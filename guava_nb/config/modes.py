"""The ways to spread a model, by the name a user says, and the settings that each stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guava_nb.config.mesh import Mesh
from guava_nb.config.values import near
from guava_nb.errors import ConfigError

__all__ = [
    "MODES",
    "MODE_DEFAULTS",
    "PLAN_KINDS",
    "SCHEDULES",
    "check_combination",
    "check_plan",
    "mode_name",
    "mode_settings",
]

MODES = ("data", "pipeline", "tensor", "zero", "hybrid")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "auto")
#: What a tensor plan may say of a module.
PLAN_KINDS = ("colwise", "rowwise", "vocab", "replicate", "partial")

#: What a mode is chosen with where nothing else is said: an earlier choice's pipeline does not linger.
MODE_DEFAULTS = {
    "micro_batches": 4,
    "pipeline_schedule": "1f1b",
    "stages_per_worker": 1,
    "pipeline_split": "",
    "pipeline_balance": "parameters",
    "checkpoint_activations": "",
    "path": "auto",
}


def mode_settings(
    mode: str,
    dp: int | None = None,
    pp: int | None = None,
    tp: int | None = None,
    zero_stage: int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the fields of `DistributedConfig` that a mode stands for; all that belong to modes, so that none lingers.

    Args:
        mode: one of `MODES`.
        dp: replicas; None takes what the other axes leave.
        pp: pipeline stages; None takes all workers in pipeline mode.
        tp: workers that share each layer; None takes all workers in tensor mode.
        zero_stage: 1, 2 or 3 in zero mode (2 when left out), 0 to 3 in hybrid mode.
        others: further fields of the configuration, passed on.

    Raises:
        ConfigError: an unknown mode, a size that the mode has no axis for, or settings that contradict each other.
    """
    stage = 2 if mode == "zero" and zero_stage is None else zero_stage or 0
    _check_axes(mode, {"dp": dp, "pp": pp, "tp": tp}, zero_stage, stage)
    settings = {
        **MODE_DEFAULTS,
        "data_parallel": mode in ("data", "zero", "hybrid"),
        "model_parallel": False,
        "pipeline_parallel": mode == "pipeline" or (mode == "hybrid" and pp is not None and pp > 1),
        "tensor_parallel": mode == "tensor" or (mode == "hybrid" and tp is not None and tp > 1),
        "data_parallel_size": dp,
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "zero_stage": stage,
        **others,
    }
    check_combination(
        mode, pp or 1, stage, str(settings["pipeline_schedule"]), settings["stages_per_worker"],
        bool(settings.get("sync_batchnorm")),
    )  # fmt: skip
    return settings


def _check_axes(mode: str, sizes: Mapping[str, int | None], asked_stage: int | None, stage: int) -> None:
    """Refuse sizes that the mode has no axis for, and axes that it lacks."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; it is one of: {', '.join(MODES)}")
    axes = {"data": "", "pipeline": "pp", "tensor": "tp", "zero": "dp", "hybrid": "dp pp tp"}[mode].split()
    for name, size in sizes.items():
        if size is not None and name not in axes:
            raise ConfigError(f"{mode} mode has no axis {name}; leave --{name} out, or use hybrid mode")
    if asked_stage is not None and mode not in ("zero", "hybrid"):
        raise ConfigError(f"{mode} mode has no ZeRO stage; use zero or hybrid mode")
    if mode == "hybrid" and all(size is None for size in sizes.values()):
        raise ConfigError(
            "hybrid mode needs its axes: how many replicas (dp, --dp), stages (pp, --pp) and workers that share a layer "
            "(tp, --tp), two of them at least, such as %guava_mode hybrid --dp 2 --pp 2; of those "
            "left out dp follows from the workers, the others are 1"
        )
    if mode == "zero" and not stage:
        raise ConfigError("zero mode needs stage 1, 2 or 3: it says what is sharded (optimizer, gradients, parameters)")


def check_combination(
    mode: str, stages: int, zero_stage: int, schedule: str, stages_per_worker: int, sync_batchnorm: bool = False
) -> None:
    """Refuse settings that contradict each other with any model and any workers; called again where they are used.

    Raises:
        ConfigError: with what to choose instead.
    """
    pipeline = mode == "pipeline" or stages > 1
    if pipeline and zero_stage >= 2:
        raise ConfigError(
            f"ZeRO {zero_stage} would gather its parameters for every micro-batch of a pipeline; with stages use "
            "zero_stage=1 (--zero 1), or tp (--tp) instead of pp (--pp)"
        )
    if stages_per_worker < 1 or (stages_per_worker > 1 and schedule != "interleaved"):
        raise ConfigError(
            f"stages_per_worker is {stages_per_worker} (--stages-per-worker) with schedule {schedule!r}; more than one stage "
            "on a worker needs pipeline_schedule='interleaved' (--schedule interleaved), and none is too few"
        )
    if pipeline and sync_batchnorm:
        raise ConfigError(
            "sync_batchnorm with a pipeline: its stages see micro-batches, whose statistics are not those of the batch; "
            "leave it off (--sync-batchnorm off), use GroupNorm or LayerNorm, or a mode without stages"
        )


def check_plan(plan: Mapping[str, str]) -> None:
    """Refuse a tensor plan that names ways to split which do not exist; whether its patterns fit, only a model shows.

    Raises:
        ConfigError: with the ways there are.
    """
    for pattern, kind in plan.items():
        if kind not in PLAN_KINDS:
            known = ", ".join(PLAN_KINDS)
            raise ConfigError(
                f"tensor_plan (--plan) {pattern!r}: {kind!r} is unknown; choose one of {known}{near(str(kind), PLAN_KINDS)}"
            )


def mode_name(mesh: Mesh, zero_stage: int, layers: bool, tensor: bool) -> str:
    """Return the mode that a mesh stands for.

    Args:
        layers: the pipeline axis is in use.
        tensor: the tensor axis is in use.
    """
    axes = [mesh.data > 1, layers and (mesh.stages > 1 or not tensor), tensor and (mesh.tensor > 1 or not layers)]
    if axes[1] or axes[2]:
        alone = sum(axes) == 1 and not zero_stage
        return ("pipeline" if axes[1] else "tensor") if alone else "hybrid"
    return "zero" if zero_stage else "data"
