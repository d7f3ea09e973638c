"""What the first step came to, against what one worker computed with the whole model before it. Pure.

Where a model lies in parts, a step may be another one than the whole model's though each part does what it should: what a
layer leaves in a global, and another one or the loss reads, is elsewhere. No rule finds that in a user's code; loss and
gradient show it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from guava_nb.config.units import show_time

__all__ = ["can_be_compared", "difference", "sentence_on"]

#: Relative difference of loss, or of the gradient's norm, that rounding may explain, by precision.
_SLACK = {"fp64": 1e-6, "fp32": 1e-3}
_HALF_SLACK = 5e-2


def can_be_compared(check: Mapping[str, Any] | None, step: Mapping[str, Any]) -> bool:
    """Whether a check's record is of the very samples of a step, with its weights and nothing random.

    Args:
        check: record of the one-step check; None where none was made.
        step: of the history.
    """
    if check is None or check.get("outcome") != "same" or check.get("known") or check["replaced_by_constants"]:
        return False
    return bool(check["samples"] == check["batch_samples"] == step["samples"] and not step["skipped"])


def difference(check: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    """Return the larger relative difference of loss and gradient norm; 0 where rounding may explain it.

    Args:
        check, step: as for `can_be_compared`.
    """
    pairs = [(check["loss_whole"], step["loss"])]
    if step["gradient_norm"] is not None:
        pairs.append((check["gradient_norm"], step["gradient_norm"]))
    each = [abs(a - b) / max(abs(a), abs(b), 1e-3) for a, b in pairs]
    found = max(one if math.isfinite(one) else math.inf for one in each)
    slack = max(_SLACK.get(name, _HALF_SLACK) for name in (check["precision"], check["run_precision"]))
    if check["wire"] != "fp32":  # of what passes between stages
        slack = _HALF_SLACK
    return 0.0 if found <= slack else found


#: What a first step that differs in a pipeline comes from where the check has named what each forward changes.
_MOVED = (
    "what the one-step check has named changes in each forward, and a pipeline makes one for each micro-batch. Take "
    "--micro-batches 1 or data mode"
)
_APART = (
    "one part, or the loss, takes what another one keeps outside its outputs, such as a global, an object that layers share, or "
    "weights. Hand it on as an output of the layer, or take data mode or zero_stage=1 (--zero 1)"
)


def sentence_on(check: Mapping[str, Any], step: Mapping[str, Any], mode: str) -> str:
    """Return what is said of the comparison.

    Args:
        check, step: as for `can_be_compared`.
        mode: of the run.
    """
    worker, seconds = check["worker"], show_time(check["seconds"])
    if not difference(check, step):
        return f"The first step has the loss and gradient of the whole model, which {worker} computed before it ({seconds})"
    norm = "not known" if step["gradient_norm"] is None else f"{step['gradient_norm']:.6g}"
    return (
        f"The first step has a loss of {step['loss']:.6g} and a gradient of norm {norm}; with the whole model {worker} computed "
        f"{check['loss_whole']:.6g} and {check['gradient_norm']:.6g} for it. In {mode} mode, whose workers have parts of the "
        f"model, this run trains on other numbers than plain PyTorch: {_MOVED if check.get('moved') else _APART}"
    )
