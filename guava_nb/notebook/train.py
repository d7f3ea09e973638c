"""From the options of %guava_train to the arguments of `Orchestrator.start_training`."""

from __future__ import annotations

import argparse
import builtins
import inspect
import keyword
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from guava_nb.notebook.line_words import in_a_folder, is_background, no_variable, value_of
from guava_nb.spec.hub_name import is_on_hub
from guava_nb.spec.training_options import OptionInfo, option_infos

__all__ = ["check_variable", "loaded_text", "metrics_argument", "resolve", "training_arguments"]

_IMPORTABLE = re.compile(r"[^\W\d][\w.]*:[\w.]+")
#: Names with commas between them.
_NAMES = re.compile(r"[\w.:]+(\s*,\s*[\w.:]+)*")


def resolve(expression: str, namespace: Mapping[str, Any], option: str) -> Any:
    """The notebook's own value of an expression such as "loader" or "loaders['train']", or something importable.

    A function that is imported for --data or --val is called: it makes the loader.

    Raises:
        UsageError: the notebook has no such variable, or the expression fails.
    """
    if _IMPORTABLE.fullmatch(expression):
        return _imported(expression, option)
    root = re.match(r"[^\W\d]\w*", expression)
    if root and root[0] == expression and expression not in namespace:
        raise UsageError(f"{option} {expression}: {no_variable(expression, namespace)}")
    try:
        return value_of(expression, namespace, f"<{option}>")
    except Exception as error:
        if isinstance(error, NameError) and is_background() and str(error.name) in expression:
            raise UsageError(f"{option} {expression}: {no_variable(str(error.name), namespace)}") from None
        if isinstance(error, SyntaxError):
            raise UsageError(
                f"{option} {expression}: this is no expression of Python; put the value into a variable and name that: "
                f"value = ..., then {option} value"
            ) from None
        raise UsageError(f"{option} {expression}: {type(error).__name__}: {error}") from None


def _imported(name: str, option: str) -> Any:
    from guava_nb.spec.cells import resolve as importable  # loads torch

    found = importable(name, None)
    return found() if option in ("--data", "--val") and inspect.isroutine(found) else found


def check_variable(name: str | None, option: str) -> None:
    """Refuse what cannot be the name of a variable; None is no name at all.

    Raises:
        UsageError: it is no name, one of the language's own words, or a function or class that Python itself gives.
    """
    if name is not None and hasattr(builtins, name):
        raise UsageError(f"{option} {name}: this would hide Python's own {name} in this notebook; give another name")
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise UsageError(
            f"{option} {name}: a variable cannot be called so; give a name of letters, digits and _ that is no word of Python"
        )


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
    given: dict[str, Any] = {}
    for info in option_infos():
        value = getattr(args, info.flag.replace("-", "_")) if info.flag else None
        if value is None or value is False:
            continue
        if info.needs and getattr(args, info.needs) is None:  # silently ignoring it would look like obeying
            raise UsageError(f"%guava_train: --{info.flag} needs --{info.needs}")
        given[info.name] = _value(info, value, namespace)
    if optimizer_args := _optimizer_args(args):
        given["optimizer_args"] = optimizer_args
    if args.fresh and args.resume is not None:
        raise UsageError("%guava_train: --fresh and --resume contradict each other; keep one")
    given["train_loader"] = resolve(args.data, namespace, "--data")
    if args.val is not None:
        given["val_loader"] = resolve(args.val, namespace, "--val")
    return given


def loaded_text(source: Path, at: Mapping[str, Any]) -> str:
    """The sentence on a checkpoint that was loaded; `at` as `Orchestrator.load_checkpoint` gives it."""
    return (
        f"Loaded {source}: step {at['step']}, whole epochs done: {at['epoch']}. The next %guava_train goes on from there; its "
        f"--epochs counts from the very beginning, so give more than {at['epoch']}."
    )


def _folder_for_files(text: str, option: str) -> Path:
    """Return the folder that a word names; files that are due after an hour must not be the first to find it closed.

    Raises:
        UsageError: it takes no files, or the folder that it is to be made in is not there or takes none.
    """
    path = in_a_folder(text, option)
    folder = path if path.exists() else path.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return path
    except OSError as problem:
        raise UsageError(
            f"{option} {text}: {folder} takes no files ({problem.strerror or problem}); name another folder"
        ) from None


def _value(info: OptionInfo, value: Any, namespace: Mapping[str, Any]) -> Any:
    """What a word of the line stands for."""
    if info.name == "checkpoint_dir":
        return _folder_for_files(value, "--checkpoint-dir")
    if info.kind == "file":
        return value if is_on_hub(value) else Path(value).expanduser()
    if info.kind == "objects":
        return _objects(value, namespace, f"--{info.flag}")
    return metrics_argument(value, namespace) if info.kind == "metrics" else value


def _objects(text: str, namespace: Mapping[str, Any], option: str) -> list[Any]:
    """The notebook's own objects of an option: names with commas, each of an object or of a list of them; or an expression."""
    parts = [part.strip() for part in text.split(",")] if _NAMES.fullmatch(text.strip()) else [text]
    found = [resolve(part, namespace, option) for part in parts]
    return [one for part in found for one in (part if isinstance(part, list | tuple) else [part])]


def _optimizer_args(args: argparse.Namespace) -> dict[str, Any]:
    """--optimizer-args with the short forms put in; the same setting twice is refused."""
    merged = dict(args.optimizer_args or {})
    for option, name, value in (("--lr", "lr", args.lr), ("--weight-decay", "weight_decay", args.weight_decay)):
        if value is not None and name in merged:
            raise UsageError(f"%guava_train: {option} and --optimizer-args both set {name}; keep one")
        if value is not None:
            merged[name] = value
    return merged
