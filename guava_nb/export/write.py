"""From what is known of a run to a program that a person reads: what its template needs, and the file.

Everything that cannot be exported is refused here, before any file is written.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from guava_nb.errors import ConfigError
from guava_nb.export.facts import ExportFacts
from guava_nb.systems import put_in_place

__all__ = ["FORMS", "export"]

#: What a program is started by: torchrun, Ray Train's TorchTrainer, Lightning Fabric.
FORMS = ("torch", "ray", "fabric")


def export(
    path: str | Path,
    facts: ExportFacts,
    history: Sequence[Mapping[str, Any]],
    form: str = "torch",
    overwrite: bool = False,
    save_data: bool = False,
) -> Path:
    """Write the program of a run.

    Args:
        path: file to write.
        facts: of the run.
        history: its steps so far.
        form: one of `FORMS`.
        overwrite: an existing file may be replaced.
        save_data: write tensors that lie in memory beside it, as a .pt file, so that nothing has to be filled in.

    Returns:
        Where it was written.

    Raises:
        ConfigError: it cannot be exported, or there is such a file; nothing was written.
    """
    target = Path(path).expanduser()
    data = target.with_suffix(".pt") if save_data else None
    _check_call(target, data, form, overwrite)
    from guava_nb.export.program import program_text  # builds models: only when a program is asked for

    text, tensors = program_text(facts, history, form, target, data)
    ast.parse(text)  # a fault of ours, not of the user's: no file that cannot run
    if data is not None:
        _put(data, lambda file: torch.save(tensors, file))
    _put(target, lambda file: file.write_text(text, encoding="utf-8"))
    return target


def _check_call(target: Path, data: Path | None, form: str, overwrite: bool) -> None:
    if form not in FORMS:
        raise ConfigError(f"form is {form!r}; it is one of: {', '.join(FORMS)}")
    if target.suffix != ".py":
        raise ConfigError(f"{target} is to be a program: give it a name that ends in .py, such as train.py")
    for file in (target, data):
        if file is not None and file.exists() and not overwrite:
            raise ConfigError(f"{file} exists: give another name, or overwrite it with --overwrite (overwrite=True)")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}")


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        put_in_place(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}; make room, or give another path"
        ) from error
