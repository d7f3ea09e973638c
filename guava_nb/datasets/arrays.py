"""Rows of arrays as samples: in memory, or on disk and read as they are needed. The dtype is never changed."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from guava_nb.errors import ConfigError

__all__ = ["ArrayDataset"]


class ArrayDataset(Dataset[Any]):
    """Row i of every array is sample i: a tensor, or a tuple of tensors when there are several arrays.

    An array that may be written to is not copied: its tensors are views of it. Rows of read-only ones are copied one by
    one, because torch has no read-only tensors. Numbers keep their dtype; only the byte order becomes this machine's.

    Args:
        arrays: NumPy arrays (memory maps too) or tensors of equal length.

    Raises:
        ConfigError: lengths differ, there are no rows, or torch has no such dtype.
    """

    def __init__(self, *arrays: Any, names: Sequence[str] = ()) -> None:
        self._names = tuple(names) or tuple(f"array {k}" for k in range(len(arrays)))
        self._paths: tuple[Path | None, ...] = (None,) * len(arrays)
        self._arrays = arrays
        self._check()

    @classmethod
    def from_file(
        cls, path: str | Path, targets: str | Path | None = None, keys: Sequence[str] | None = None
    ) -> ArrayDataset:
        """Read files that `numpy.save` or `numpy.savez` wrote; pickled objects are refused.

        Args:
            path: a .npy file is mapped into memory and read as rows are needed; of a .npz archive the named arrays are read
                as a whole, because an archive cannot be mapped.
            targets: a further .npy file, whose rows become the second part of the samples.
            keys: names of the arrays of an archive, inputs first; None takes all when there are one or two.

        Raises:
            ConfigError: it cannot be read; the message names the file and what is in it.
        """
        paths = [Path(path).expanduser()] + ([] if targets is None else [Path(targets).expanduser()])
        if paths[0].suffix.lower() == ".npz":
            if targets is not None:
                raise ConfigError(
                    f"{path} is an archive: name its arrays with keys=(inputs, targets), without targets="
                )
            named = _from_archive(paths[0], keys)
            return cls(*named.values(), names=tuple(named))
        if keys is not None:
            raise ConfigError(f"{path} holds one array, which has no name: leave keys= out")
        made = cls(*[_mapped(p) for p in paths], names=tuple(p.name for p in paths))
        made._paths = tuple(paths)
        return made

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`; negative ones count from the end.

        Raises:
            IndexError: there is no such row.
        """
        rows = tuple(_tensor(array, index) for array in self._arrays)
        return rows[0] if len(rows) == 1 else rows

    def __repr__(self) -> str:
        parts = [
            f"{name} {tuple(array.shape[1:])} {str(array.dtype).removeprefix('torch.')}"
            for name, array in zip(self._names, self._arrays, strict=True)
        ]
        return f"ArrayDataset({len(self)} rows: {', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        """A loader process maps the files again: pickling a memory map would read all of it."""
        kept = tuple(a if p is None else None for a, p in zip(self._arrays, self._paths, strict=True))
        return {**self.__dict__, "_arrays": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arrays = tuple(
            a if p is None else _mapped(p) for a, p in zip(state["_arrays"], state["_paths"], strict=True)
        )

    def _check(self) -> None:
        if not self._arrays:
            raise ConfigError("no array was given; give inputs, or inputs and targets")
        for name, array in zip(self._names, self._arrays, strict=True):
            if not isinstance(array, np.ndarray | torch.Tensor):
                raise ConfigError(f"{name} is a {type(array).__name__}: give a numpy.ndarray or a torch.Tensor")
            if isinstance(array, np.ma.MaskedArray):
                hidden = int(np.ma.getmaskarray(array).sum())
                raise ConfigError(
                    f"{name} is a masked array ({hidden} of {array.size} values masked), and tensors have no mask: fill the "
                    "gaps with a number, array.filled(0), and give the mask as an array of its own"
                )
            if array.ndim == 0:
                raise ConfigError(f"{name} is a single number of shape (): rows are needed")
            if isinstance(array, np.ndarray):
                _check_dtype(name, array.dtype)
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) > 1:
            told = ", ".join(f"{name} has {count}" for name, count in zip(self._names, lengths, strict=True))
            raise ConfigError(f"the arrays differ in length: {told} rows")
        if not lengths[0]:
            raise ConfigError(f"{self._names[0]} has no rows (shape {tuple(self._arrays[0].shape)})")


def _tensor(array: Any, index: int) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array[index]
    row = array[index, ...]
    if not row.dtype.isnative:
        row = row.astype(row.dtype.newbyteorder("="))
    elif not row.flags.writeable or any(stride < 0 for stride in row.strides):
        row = np.array(row)
    return torch.from_numpy(row)


def _check_dtype(name: str, dtype: np.dtype[Any]) -> None:
    try:
        torch.from_numpy(np.zeros(0, dtype.newbyteorder("=")))
    except TypeError as error:
        hint = "class ids (numpy.unique(y, return_inverse=True))" if dtype.kind in "USO" else "numbers"
        raise ConfigError(
            f"{name} has dtype {dtype}, which is no dtype of a tensor: turn it into {hint} first"
        ) from error


def _mapped(path: Path) -> np.ndarray[Any, Any]:
    """Map a file; a change to a row stays in this process and never reaches the file."""
    try:
        found = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read as a NumPy array: {_first_line(error)}") from error
    if not isinstance(found, np.ndarray):
        raise ConfigError(f"{path} is an archive of arrays: its name must end with .npz")
    return found


def _from_archive(path: Path, keys: Sequence[str] | None) -> dict[str, np.ndarray[Any, Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = list(archive.files)
            chosen = _chosen(path, names, keys)
            return {name: archive[name] for name in chosen}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as an archive of arrays: {_first_line(error)}") from error


def _chosen(path: Path, names: Sequence[str], keys: Sequence[str] | None) -> Sequence[str]:
    listed = ", ".join(names) or "nothing"
    if keys is None:
        if len(names) not in (1, 2):
            raise ConfigError(f"{path} holds {listed}: say which are inputs and targets, keys=({names[:1]}, ...)")
        return names
    missing = [key for key in keys if key not in names]
    if missing:
        raise ConfigError(f"{path} holds no array {missing[0]!r}; there are: {listed}")
    return keys


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
