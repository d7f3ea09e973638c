"""Where the rows of a prediction go: arrays in memory, or .npy files that grow in a folder and can be gone on with.

Knows numpy and files; knows no model and no worker. Rows come in order, so a file only ever grows at its end: a header of
a fixed length, then the rows. The header and a small record are written anew every few seconds, after the rows are on the
disk. So a process that dies leaves files that `np.load` reads, and the record tells how much of them counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from guava_nb.errors import ConfigError
from guava_nb.systems import put_in_place

__all__ = ["RECORD", "DiskResults", "MemoryResults", "npy_header"]

#: The record beside the files.
RECORD = "progress.json"
_VERSION = 1
#: Seconds of results that a killed orchestrator may lose.
FLUSH_S = 2.0
#: Bytes before the first row: room for any shape, and a multiple of 64 as numpy wants it.
HEADER_BYTES = 256

Arrays = Mapping[str, np.ndarray]


class MemoryResults:
    """Arrays that grow; where the number of rows is known, they are made once.

    Args:
        expected_rows: None where it is not known.

    Attributes:
        rows, batches, last_id, complete, folder: those of `DiskResults`; nothing is there before, and there is no folder.
    """

    folder = last_id = None
    batches, complete = 0, False

    def __init__(self, expected_rows: int | None = None) -> None:
        self.rows = 0
        self._room = expected_rows or 0
        self._arrays: dict[str, np.ndarray] = {}

    def append(self, arrays: Arrays, batches: int, last_id: int | None) -> None:
        """Add rows.

        Raises:
            ConfigError: a row has another shape or type than those before.
        """
        rows = _check_rows(arrays, {n: (a.dtype, a.shape[1:]) for n, a in self._arrays.items()}, batches)
        if not self._arrays:
            self._room = max(self._room, rows)
            self._arrays = {n: np.empty((self._room, *a.shape[1:]), a.dtype) for n, a in arrays.items()}
        if self.rows + rows > self._room:
            self._resize(max(self.rows + rows, 2 * self._room))
        for name, array in arrays.items():
            self._arrays[name][self.rows : self.rows + rows] = array
        self.rows += rows

    def _resize(self, rows: int) -> None:
        for array in self._arrays.values():
            array.resize((rows, *array.shape[1:]), refcheck=False)  # in place: no second copy at its largest
        self._room = rows

    def close(self, complete: bool) -> None:
        """Do nothing: memory needs no closing."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all rows."""
        self._resize(self.rows)
        return dict(self._arrays)


class DiskResults:
    """Files in a folder.

    Args:
        folder: made if it is missing.
        asked: what is predicted, as plain data: only the same can be gone on with.
        resume: go on with what is there; False refuses a folder that has results.

    Attributes:
        rows, batches: that are there already, then with what was added.
        last_id: of the last sample that is there, None where ids are not known.
        complete: nothing is missing.

    Raises:
        ConfigError: the folder has results and `resume` is not given, or they are of something else.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any], resume: bool) -> None:
        self.folder = folder
        self._asked = dict(asked)
        self.rows = self.batches = 0
        self.last_id: int | None = None
        self.complete = False
        self._columns: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._written_at = 0.0
        self._recorded = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / RECORD).exists():
                (folder / f"{RECORD}.partial").touch()
                (folder / f"{RECORD}.partial").unlink()
        except OSError as error:
            raise ConfigError(
                f"path= needs a folder that can be written to, and {folder} cannot be one ({error.strerror or error}): give "
                "another folder, or leave path= out to keep the results in memory"
            ) from error
        if (folder / RECORD).exists():
            self._go_on(resume)

    def _go_on(self, resume: bool) -> None:
        path = self.folder / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            theirs, version = record["asked"], record["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): give another folder, or remove this one") from error
        if not resume:
            raise ConfigError(
                f"{self.folder} holds {record['rows']} rows of an earlier prediction: resume=True (--resume) goes on with them; "
                "else give another folder, or remove this one"
            )
        differ = [key for key in self._asked if theirs.get(key) != self._asked[key]]
        if version != _VERSION or differ:
            told = "; ".join(f"{key} was {theirs.get(key)!r} and is {self._asked[key]!r} now" for key in differ)
            raise ConfigError(
                f"{self.folder} holds a prediction of something else ({told or 'made by another version'}): "
                "resume=True goes on with the same only. Give another folder"
            )
        self.rows, self.batches, self.last_id = record["rows"], record["batches"], record["last_id"]
        self.complete, self._recorded = record["complete"], self.rows
        self._columns = {n: (np.dtype(kind), tuple(shape)) for n, (kind, shape) in record["columns"].items()}
        self._check_sizes()

    def _check_sizes(self) -> None:
        for name, (dtype, shape) in self._columns.items():
            path, needed = self._path(name), HEADER_BYTES + self.rows * _row_bytes(dtype, shape)
            if not path.exists() or path.stat().st_size < needed:
                raise ConfigError(f"{path} is shorter than {RECORD} says: give another folder, or remove this one")

    def append(self, arrays: Arrays, batches: int, last_id: int | None) -> None:
        """Add rows; on the disk within a few seconds.

        Args:
            arrays: a row per sample.
            batches: of the loader that are done with these.
            last_id: of these samples; None where ids are not known.

        Raises:
            ConfigError: a row has another shape or type than those before.
            ConfigError: the disk is full.
        """
        with self._told():
            self._append(arrays, batches, last_id)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot take more results ({error.strerror or error}); {self._recorded} rows in it are kept: "
                "make room and predict again with resume=True (--resume), or give a path on a larger disk"
            ) from error

    def _append(self, arrays: Arrays, batches: int, last_id: int | None) -> None:
        rows = _check_rows(arrays, self._columns, batches)
        if not self._columns:
            self._check_names(arrays)
            self._columns = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        if not self._files:
            self._files = {name: self._open(name) for name in self._columns}
        for name, array in arrays.items():
            self._files[name].write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        self.rows, self.batches, self.last_id = self.rows + rows, batches, last_id
        if time.monotonic() >= self._written_at + FLUSH_S:
            self._flush()

    def _open(self, name: str) -> BinaryIO:
        path, (dtype, shape) = self._path(name), self._columns[name]
        file = path.open("r+b" if self.rows else "w+b")
        if not self.rows:
            file.write(npy_header(0, dtype, shape))
        file.truncate(HEADER_BYTES + self.rows * _row_bytes(dtype, shape))  # rows that the record does not count
        file.seek(0, os.SEEK_END)
        return file

    def _flush(self) -> None:
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            file.write(npy_header(self.rows, *self._columns[name]))
            file.flush()
            file.seek(0, os.SEEK_END)
        columns = {name: [dtype.str, list(shape)] for name, (dtype, shape) in self._columns.items()}
        record = {
            "version": _VERSION, "asked": self._asked, "rows": self.rows, "batches": self.batches,
            "last_id": self.last_id, "columns": columns, "complete": self.complete,
        }  # fmt: skip
        partial = self.folder / f"{RECORD}.partial"
        partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
        put_in_place(partial, self.folder / RECORD)
        self._written_at, self._recorded = time.monotonic(), self.rows

    def close(self, complete: bool) -> None:
        """Write what is not on the disk yet and let go of the files; after an error too."""
        self.complete = self.complete or complete
        with self._told():
            if self._files:
                self._flush()
        for file in self._files.values():
            file.close()
        self._files = {}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all rows as memory maps that can be read."""
        mode: Literal["r"] | None = "r" if self.rows else None  # nothing cannot be mapped
        return {name: np.load(self._path(name), mmap_mode=mode) for name in self._columns}

    def _check_names(self, arrays: Arrays) -> None:
        """Refuse two columns in one file, also where a disk takes large and small letters for the same."""
        names: dict[str, str] = {}
        for name in arrays:
            other = names.setdefault(self._path(name).name.casefold(), name)
            if other != name:
                raise ConfigError(
                    f"{other!r} and {name!r} would both be written to {self._path(name)}, and one would replace the other: let "
                    "predict_step (--step) return them under other names, or leave path= out"
                )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '_')}.npy"


def npy_header(rows: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the first bytes of a .npy file of so many rows, always equally many bytes.

    Args:
        rows: of the file.
        dtype: of an element.
        shape: of a row.
    """
    text = repr({"descr": dtype.str, "fortran_order": False, "shape": (rows, *shape)}).encode("latin1")
    length = HEADER_BYTES - 10  # magic, version and this length come before it
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"


def _row_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def _check_rows(arrays: Arrays, columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], batches: int) -> int:
    for name, array in arrays.items() if columns else ():
        known = columns.get(name)
        if known != (array.dtype, array.shape[1:]):
            before = f"{known[1]} of {known[0]}" if known else "absent"
            raise ConfigError(
                f"{name}: a row of batch {batches - 1} of the loader has shape {array.shape[1:]} of {array.dtype}, those before "
                f"were {before}; rows of one shape can be put together, so pad or crop them (in predict_step, for instance)"
            )
    return len(next(iter(arrays.values())))
