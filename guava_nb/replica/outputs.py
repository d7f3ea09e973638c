"""What comes back of a model's outputs: on the worker cut down to what was asked for, at the hub made whole again.

Pure. On the wire stand named columns, each a tensor with one row per sample:

| asked for | column | what it holds |
|---|---|---|
| classes | `predictions` | the best `top_k` classes of each row, in the smallest integer type that holds them all |
| classes | `confidences` | their probabilities, float32 |
| a threshold | `kept` | whether a row's best probability reaches it; the two above then hold the kept rows only |
| all probabilities | `probabilities` | float32, all rows |
| raw outputs | `outputs`, `outputs.NAME` | as the model gave them |

Classes are ranked by the outputs, not by their probabilities: in float32 many of these are exactly 0 or 1.
Outputs in float64 are ranked in float64, all others in float32.

Probabilities are those that the run's loss takes the outputs for: of each class by itself for torch's losses of classes
that do not exclude each other (`EACH_CLASS`); else the outputs as they are, where no entry is negative and every row sums
to 1, as a model that ends in a softmax gives them; else their softmax. The softmax of log-probabilities is the
probabilities again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guava_nb.errors import ConfigError, TrainingError
from guava_nb.nested import children
from guava_nb.protocol.messages import Wanted

__all__ = ["EACH_CLASS", "Columns", "columns_of", "inputs_of", "joined", "unpacked", "without_targets"]

Columns = dict[str, Tensor]

#: Torch's losses of classes that do not exclude each other, and the probability that they take an output for.
EACH_CLASS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.BCELoss: lambda outputs: outputs,
    nn.BCEWithLogitsLoss: torch.sigmoid,
    nn.MultiLabelSoftMarginLoss: torch.sigmoid,
}

_RAW = "take them as they are with raw=True (--raw), or let predict_step (--step) return [rows, classes]"


# ------------------------------------------------------------------------------------------------------ what goes in


def without_targets(batch: Any) -> Any:
    """Return what of a batch has to travel for a prediction: of (inputs, targets) the targets stay where they are."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return (batch[0], None)
    return batch


def inputs_of(batch: Any) -> Any:
    """Return what the model is called with.

    A tensor or array is the inputs; a list or tuple of one holds them; of two they are the first, and the second are
    targets. Nothing tells which part of other batches the model wants.

    Raises:
        ConfigError: the batch has another form.
    """
    if isinstance(batch, list | tuple) and len(batch) in (1, 2):
        return batch[0]
    if isinstance(batch, Tensor | np.ndarray):
        return batch
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, list | tuple) else "")
    raise ConfigError(
        f"a batch is {what}; predictions need inputs alone or (inputs, targets). For batches of another form give "
        "predict_step (--step): a shared function of (model, batch) that returns the outputs"
    )


# ------------------------------------------------------------------------------------------------------ on the worker


def columns_of(outputs: Any, rows: int, wanted: Wanted, loss: type[nn.Module] | None = None) -> Columns:
    """Return what was asked for of one batch's outputs, on the CPU.

    Args:
        outputs: what the model gave.
        rows: samples in the batch.
        wanted: what was asked for.
        loss: torch's class of the run's loss; None for another one.

    Raises:
        ConfigError: the outputs have no such form; the text says which they have.
    """
    columns = _raw(outputs, rows) if wanted.raw else _classes(outputs, rows, wanted, loss)
    return {name: column.detach().cpu().contiguous() for name, column in columns.items()}


def _classes(outputs: Any, rows: int, wanted: Wanted, loss: type[nn.Module] | None) -> Columns:
    if not isinstance(outputs, Tensor):
        raise ConfigError(f"classes need one tensor of [rows, classes], the model returned a {_form(outputs)}: {_RAW}")
    if outputs.ndim != 2 or len(outputs) != rows or not outputs.is_floating_point():
        raise ConfigError(
            f"classes need outputs of [{rows}, classes] in floating point for these {rows} samples, the model returned "
            f"{_form(outputs)}: {_RAW}"
        )
    classes = outputs.shape[1]
    if classes == 1:
        raise ConfigError(
            f"the model returned {_form(outputs)}, one column: with one class all probabilities would be 1: {_RAW}"
        )
    if not 1 <= wanted.top_k <= classes:
        raise ConfigError(f"top_k is {wanted.top_k} and the model has {classes} classes; give 1 to {classes}")
    scores = outputs if outputs.dtype == torch.float64 else outputs.float()
    if loss in EACH_CLASS:
        probabilities = EACH_CLASS[loss](scores)
    else:
        probabilities = scores if _sum_to_one(scores, outputs.dtype) else torch.softmax(scores, dim=1)
    # A maximum gives the first of equal scores; what topk gives of them depends on the device.
    best = scores.argmax(dim=1, keepdim=True) if wanted.top_k == 1 else scores.topk(wanted.top_k, dim=1).indices
    columns = {"predictions": best.to(_index_type(classes)), "confidences": probabilities.gather(1, best).float()}
    if wanted.threshold is not None:
        kept = columns["confidences"][:, 0] >= wanted.threshold
        columns = {"kept": kept, **{name: column[kept] for name, column in columns.items()}}
    if wanted.full:
        columns["probabilities"] = probabilities.float()
    return columns


def _sum_to_one(scores: Tensor, dtype: torch.dtype) -> bool:
    """Whether `scores`, `[N, C]`, are probabilities of classes, as far as `dtype` can hold them."""
    apart = (scores.sum(dim=1) - 1).abs() <= max(1e-4, torch.finfo(dtype).eps)
    return bool((scores >= 0).all() & apart.all())


def _index_type(classes: int) -> torch.dtype:
    return torch.uint8 if classes <= 1 << 8 else torch.int16 if classes <= 1 << 15 else torch.int32


def _raw(outputs: Any, rows: int) -> Columns:
    leaves = _leaves("outputs", outputs)
    columns = dict(leaves)
    if len(columns) < len(leaves):
        names = [name for name, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"{names.count(twice)} outputs of the model would both be named {twice!r}, and one would replace the other; let "
            "predict_step (--step) return them under names of their own"
        )
    if not columns:
        raise ConfigError(f"the model returned a {_form(outputs)}, in which there is no tensor")
    for name, column in columns.items():
        if column.ndim == 0 or len(column) != rows:
            raise ConfigError(
                f"{name} of the model has shape {tuple(column.shape)}, which is not a row for each of the {rows} samples; let "
                "predict_step (--step) return only what has one"
            )
    return columns


def _leaves(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a nested value, of any shapes, by their path; a bfloat16 becomes a float32."""
    if isinstance(value, Tensor):
        # numpy knows no bfloat16; every one of them is a float32.
        return [(name, value.float() if value.dtype == torch.bfloat16 else value)]
    if value is None:
        return []
    inside = children(value)
    if inside is None:
        raise ConfigError(
            f"{name} of the model is a {type(value).__name__}, and only tensors come back; let predict_step (--step) return "
            "tensors, alone or in a dict or tuple"
        )
    return [leaf for key, child in inside for leaf in _leaves(f"{name}.{key}", child)]


def _form(outputs: Any) -> str:
    if isinstance(outputs, Tensor):
        return f"{tuple(outputs.shape)} of {str(outputs.dtype).removeprefix('torch.')}"
    if isinstance(outputs, Mapping):
        return f"{type(outputs).__name__} with {', '.join(map(str, outputs))}"
    return type(outputs).__name__ + (f" of {len(outputs)}" if isinstance(outputs, list | tuple) else "")


def joined(parts: Sequence[Columns]) -> Columns:
    """Put the columns of parts of one batch (micro-batches) together, in their order."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


# --------------------------------------------------------------------------------------------------------- at the hub


def unpacked(columns: Mapping[str, Tensor], rows: int, wanted: Wanted) -> dict[str, np.ndarray]:
    """Return arrays with a row per sample: classes as int64, -1 and NaN where a row is below the threshold.

    Args:
        columns: as `columns_of` made them.
        rows: samples of that part.
        wanted: what was asked for.

    Returns:
        `predictions` and `confidences` of shape [rows], with top_k above 1 [rows, top_k]; the others as they came.

    Raises:
        TrainingError: a column has another number of rows.
    """
    arrays = {name: column.numpy() for name, column in columns.items()}
    kept = arrays.get("kept")
    filled = rows if kept is None else int(kept.sum())
    for name, array in arrays.items():
        expected = filled if name in ("predictions", "confidences") else rows
        if array.shape[:1] != (expected,):
            raise TrainingError(f"a worker sent {array.shape} as {name} of {expected} rows; use one version everywhere")
    if wanted.raw:
        return arrays
    for name, kind, nothing in (("predictions", np.int64, -1), ("confidences", np.float32, np.nan)):
        whole = arrays[name].astype(kind)
        if kept is not None:
            whole = np.full((rows, wanted.top_k), nothing, kind)
            whole[kept] = arrays[name]
        arrays[name] = whole[:, 0] if wanted.top_k == 1 else whole
    return arrays
