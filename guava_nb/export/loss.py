"""How the loss of a run adds up over parts of a batch, as a program says it.

A mean over rows is weighted by rows; a loss with a denominator of its own gives sum and count; a plain sum needs neither.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.nn import functional

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import Cell, Factory, RunSpec

__all__ = ["LossText", "loss_text"]

#: "mean": a mean over rows; "count": a sum and its denominator; "sum": a sum that is minimised as it is.
LossKind = Literal["mean", "count", "sum"]

_CLASSES = ("CrossEntropyLoss", "NLLLoss")
_ELEMENTS = (
    "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "SoftMarginLoss", "PoissonNLLLoss",
    "KLDivLoss", "HingeEmbeddingLoss",
)  # fmt: skip
_FUNCTIONS = {
    name: cls.__name__
    for name, cls in (
        ("cross_entropy", nn.CrossEntropyLoss), ("nll_loss", nn.NLLLoss), ("mse_loss", nn.MSELoss), ("l1_loss", nn.L1Loss),
        ("smooth_l1_loss", nn.SmoothL1Loss), ("huber_loss", nn.HuberLoss), ("binary_cross_entropy", nn.BCELoss),
        ("binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss), ("soft_margin_loss", nn.SoftMarginLoss),
        ("poisson_nll_loss", nn.PoissonNLLLoss), ("kl_div", nn.KLDivLoss), ("hinge_embedding_loss", nn.HingeEmbeddingLoss),
    )
    if hasattr(functional, name)
}  # fmt: skip


@dataclass(frozen=True)
class LossText:
    """What a program says of its loss.

    Attributes:
        kind: how it adds up.
        name: class of torch.nn, or the user's function.
        args: of the class, or of the function.
        is_class: it is a class of torch.nn, or one of the user's that makes a module.
        count: for a class of torch: its denominator, an expression of `outputs`, `targets` and `criterion`.
        is_step: it is a step of model and batch.
        classes_last: outputs have their classes on the last of several axes.
    """

    kind: LossKind
    name: str
    args: Mapping[str, Any]
    is_class: bool
    count: str = ""
    is_step: bool = False
    classes_last: bool = False


def loss_text(spec: RunSpec, cells: Sequence[Cell], history: Sequence[Mapping[str, Any]], look: Any) -> LossText:
    """Return what to say of a run's loss.

    Args:
        spec: of the run.
        cells: its shared cells.
        history: its steps so far: they tell whether denominators followed the number of rows.
        look: of its first batch, see `guava_nb.epoch_record.look_of`.

    Raises:
        ConfigError: it cannot be said.
    """
    factory = spec.criterion or spec.step
    assert factory is not None
    name = _FUNCTIONS.get(factory.name, factory.name)
    if spec.step is None and name.endswith("Loss") and hasattr(nn, name):
        return _torchs(name, factory.args, history, look)
    kind = _kind_of_function(factory.name, cells, history)
    return LossText(kind, factory.name, factory.args, _is_class(factory, cells), is_step=spec.step is not None)


def _torchs(name: str, args: Mapping[str, Any], history: Sequence[Mapping[str, Any]], look: Any) -> LossText:
    reduction = args.get("reduction", "mean")
    last = name in _CLASSES and _targets_have_axes(look)
    if reduction == "sum":
        return LossText("sum", name, args, True, classes_last=last)
    if _follows_rows(history) and "weight" not in args:
        return LossText("mean", name, args, True, classes_last=last)
    if reduction != "mean" or name not in (*_CLASSES, *_ELEMENTS):
        return LossText("mean", name, args, True)  # "batchmean", and those that count rows
    sums = {**args, "reduction": "sum"}
    if name in _ELEMENTS:
        return LossText("count", name, sums, True, "torch.tensor(float(outputs.numel()), device=outputs.device)")
    if isinstance(look, list) and len(look) == 2 and isinstance(look[1], tuple) and "float" in look[1][0]:
        return LossText("mean", name, args, True)  # probabilities of classes: one per row
    valid = f"targets != {args['ignore_index']}" if "ignore_index" in args else "targets != criterion.ignore_index"
    count = f"criterion.weight[targets[{valid}]].sum()" if "weight" in args else f"({valid}).sum()"
    return LossText("count", name, sums, True, count, classes_last=last)


def _targets_have_axes(look: Any) -> bool:
    return isinstance(look, list) and len(look) == 2 and isinstance(look[1], tuple) and len(look[1][1]) > 1 and (
        "int" in look[1][0]
    )  # fmt: skip


def _follows_rows(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each step's denominator was the same multiple of its samples."""
    ratios = {record["count"] / record["samples"] for record in history if record["samples"]}
    return len(ratios) == 1


# ------------------------------------------------------------------------------------------------- the user's functions


def _definition(name: str, cells: Sequence[Cell]) -> ast.stmt | None:
    found: ast.stmt | None = None
    for cell in cells:
        for statement in ast.parse(cell.text).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
                found = statement
    return found


def _is_class(factory: Factory, cells: Sequence[Cell]) -> bool:
    return isinstance(_definition(factory.name, cells), ast.ClassDef)


def _kind_of_function(name: str, cells: Sequence[Cell], history: Sequence[Mapping[str, Any]]) -> LossKind:
    """What a function returns, by its text.

    Raises:
        ConfigError: now one thing and now another, or its text is not here.
    """
    definition = _definition(name, cells)
    if isinstance(definition, ast.ClassDef):
        members = [m for m in definition.body if isinstance(m, ast.FunctionDef) and m.name in ("forward", "__call__")]
        definition = members[0] if members else None
    if definition is None:
        if _follows_rows(history):
            return "mean"
        raise ConfigError(
            f"whether {name!r} returns a mean or a sum with its count cannot be seen, and a program adds these up in different "
            "ways: share the function in a %%guava_share cell"
        )
    kinds = {_kind_of_value(node.value, definition) for node in ast.walk(definition) if isinstance(node, ast.Return)}
    if len(kinds) != 1:
        raise ConfigError(
            f"{name!r} returns sometimes a mean and sometimes a sum with its count, and a program adds these up in different "
            "ways: let it always return the same one"
        )
    (kind,) = kinds
    if kind == "mean" and history and not _follows_rows(history):
        raise ConfigError(
            f"{name!r} gave other counts than its samples, though its text returns no pair: write `return loss_sum, count`"
        )
    return kind


def _kind_of_value(value: ast.expr | None, function: ast.stmt) -> LossKind:
    if isinstance(value, ast.Name):
        assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and value.id in map(_name, n.targets)]
        value = assigned[-1].value if assigned else value
    if not isinstance(value, ast.Tuple) or len(value.elts) != 2:
        return "mean"
    return "sum" if isinstance(value.elts[1], ast.Constant) and value.elts[1].value is None else "count"


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""
