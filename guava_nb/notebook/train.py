"""From the options of %guava_train to the arguments of `Orchestrator.start_training`."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from guava_nb.notebook.line_words import near

__all__ = ["check_variable", "metrics_argument", "resolve", "training_arguments"]

#: Names with commas between them.
_NAMES = re.compile(r"[\w.:]+(\s*,\s*[\w.:]+)*")

#: Options that go on under the name on the right, if they were given: defaults have one home, and it is not here.
_PASSED_ON = {
    "epochs": "num_epochs",
    "val_interval": "val_interval",
    "loss": "criterion",
    "loss_args": "criterion_args",
    "step": "step",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "scheduler_args": "scheduler_args",
    "scheduler_interval": "scheduler_interval",
    "clip": "max_grad_norm",
    "accumulate": "accumulation_steps",
    "precision": "precision",
    "seed": "seed",
    "shares": "shares",
    "optimizer_site": "optimizer_site",
    "preprocess": "preprocess",
    "augment": "augment",
    "tokens": "tokens",
    "cache": "cache",
    "budget": "budget_bytes",
}


def resolve(expression: str, namespace: Mapping[str, Any], option: str) -> Any:
    """The notebook's own value of an expression such as "loader" or "loaders['train']".

    Raises:
        UsageError: the notebook has no such variable, or the expression fails.
    """
    root = re.match(r"[^\W\d]\w*", expression)
    if root and root[0] == expression and expression not in namespace:
        raise UsageError(
            f"{option} {expression}: this notebook has no variable {expression}{near(expression, namespace)}"
        )
    try:
        return eval(compile(expression, f"<{option}>", "eval"), dict(namespace))
    except Exception as error:
        raise UsageError(f"{option} {expression}: {type(error).__name__}: {error}") from None


def check_variable(name: str | None, option: str) -> None:
    """Refuse what cannot be the name of a variable; None is no name at all.

    Raises:
        UsageError: it is no name, or one of the language's own words.
    """
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(f"{option} {name}: not a name for a variable")


def metrics_argument(text: str, namespace: Mapping[str, Any]) -> Any:
    """The metrics of an option: names with commas, of variables here or of shared functions; or an expression.

    Raises:
        UsageError: the expression fails.
    """
    if not _NAMES.fullmatch(text.strip()):
        return resolve(text, namespace, "--metrics")
    names = [name.strip() for name in text.split(",")]
    return {name.rpartition(":")[2]: namespace.get(name, name) for name in names}


def training_arguments(args: argparse.Namespace, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `start_training`; what was not given is left out.

    Raises:
        UsageError: an option contradicts another one.
    """
    given = {new: getattr(args, old) for old, new in _PASSED_ON.items() if getattr(args, old) is not None}
    optimizer_args = _optimizer_args(args)
    if optimizer_args:
        given["optimizer_args"] = optimizer_args
    if args.fresh:
        given["fresh"] = True
    if args.flops:
        given["count_flops"] = True
    if args.cache_static:
        given["cache_static"] = True
    if args.resume is not None:
        given["resume"] = Path(args.resume).expanduser()
    if args.save is not None:
        given["save_path"] = Path(args.save).expanduser()
    if args.fresh and args.resume is not None:
        raise UsageError("%guava_train: --fresh and --resume contradict each other; keep one")
    _check_companions(args)
    given["train_loader"] = resolve(args.data, namespace, "--data")
    if args.val is not None:
        given["val_loader"] = resolve(args.val, namespace, "--val")
    if args.metrics is not None:
        given["metrics"] = metrics_argument(args.metrics, namespace)
    return given


def _optimizer_args(args: argparse.Namespace) -> dict[str, Any]:
    """--optimizer-args with the short forms put in; the same setting twice is refused."""
    merged = dict(args.optimizer_args or {})
    for option, name, value in (("--lr", "lr", args.lr), ("--weight-decay", "weight_decay", args.weight_decay)):
        if value is not None and name in merged:
            raise UsageError(f"%guava_train: {option} and --optimizer-args both set {name}; keep one")
        if value is not None:
            merged[name] = value
    return merged


def _check_companions(args: argparse.Namespace) -> None:
    """Options that mean something only beside another one: silently ignoring them would look like obeying."""
    for option, needed in (
        ("loss_args", "loss"),
        ("scheduler_args", "scheduler"),
        ("scheduler_interval", "scheduler"),
        ("val_interval", "val"),
        ("metrics", "val"),
        ("save", "budget"),
    ):
        if getattr(args, option) is not None and getattr(args, needed) is None:
            raise UsageError(f"%guava_train: --{option.replace('_', '-')} needs --{needed}")
