"""From what a user has (arrays, a file, a folder) to a data set with indices, for a DataLoader of one's own or of ours."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from guava_nb.datasets.arrays import ArrayDataset
from guava_nb.datasets.images import ImageFolder
from guava_nb.datasets.tables import CsvDataset
from guava_nb.errors import ConfigError

__all__ = ["ArrayDataset", "CsvDataset", "ImageFolder", "open_dataset"]

_ARRAYS = (".npy", ".npz")
_TABLES = (".csv", ".tsv", ".txt")


def open_dataset(source: Any, **options: Any) -> Any:
    """Return a data set for a source.

    Args:
        source: a torch Dataset, or anything with indices and a length, is taken as it is; an array or a tuple of arrays
            becomes an `ArrayDataset`; so does a path to .npy or .npz (`targets=` names a second file, `keys=` arrays of an
            archive); a path to .csv, .tsv or .txt a `CsvDataset`; a folder an `ImageFolder`.
        options: of that class; see there.

    Raises:
        ConfigError: there is no such file, no data set comes from this, or an option does not belong to it.
    """
    if isinstance(source, str | Path):
        return _from_path(Path(source).expanduser(), options)
    if isinstance(source, np.ndarray | torch.Tensor):
        return _made(ArrayDataset, (source,), options)
    if isinstance(source, tuple) and source and all(isinstance(part, np.ndarray | torch.Tensor) for part in source):
        return _made(ArrayDataset, source, options)
    if isinstance(source, tuple) and any(isinstance(part, list) or hasattr(part, "to_numpy") for part in source):
        told = ", ".join(f"{type(part).__name__} of {len(part)}" for part in source[:4] if hasattr(part, "__len__"))
        raise ConfigError(
            f"a tuple of {len(source)} parts ({told}) would be a data set of {len(source)} samples: for inputs and targets "
            "give arrays or tensors, (numpy.array(X), numpy.array(y)); for samples one by one give a list of them"
        )
    if isinstance(source, Dataset) or (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        if options:
            raise ConfigError(f"{next(iter(options))}= goes with files and arrays, not with a {type(source).__name__}")
        return source
    raise ConfigError(
        f"no data set comes from a {type(source).__name__}: give a torch data set, arrays (X, y), or the path of a .npy, .npz "
        "or .csv file or of a folder of images"
    )


def _from_path(path: Path, options: dict[str, Any]) -> Any:
    if path.is_dir():
        return _made(ImageFolder, (path,), options)
    if not path.is_file():
        raise ConfigError(f"there is no file or folder {path}{_nearby(path)}")
    if path.suffix.lower() in _ARRAYS:
        return _made(ArrayDataset.from_file, (path,), options)
    if path.suffix.lower() in _TABLES:
        return _made(CsvDataset, (path,), options)
    raise ConfigError(
        f"{path}: files of this kind are not read; {', '.join((*_ARRAYS, *_TABLES))} are, and folders of images"
    )


def _made(kind: Any, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    try:
        return kind(*arguments, **options)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        name = getattr(kind, "__qualname__", "").partition(".")[0]
        raise ConfigError(f"{name}: {str(error).partition(') ')[2] or error}; see help({name})") from error


def _nearby(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f": there is no folder {folder} either (looked from {Path.cwd()})"
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    close = difflib.get_close_matches(path.name, names, n=3)
    listed = close or names[:5]
    return f"; in {folder.resolve()} there are: {', '.join(listed)}" if listed else f": {folder.resolve()} is empty"
