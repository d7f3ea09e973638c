"""Reads what `torch.save` wrote of plain data, with every checksum looked at, in memory and time that the file's size bounds.

torch.load looks at no checksum, unpacks what is compressed, and lets a tensor ask for any amount of memory. Here records are
stored as they are and checked by CRC-32, the pickle may use the few instructions and names that plain data needs, and each
tensor must lie inside its record.
"""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from guava_nb.training.saving.plain_pickle import NotPlain, built

__all__ = ["ArchiveError", "load"]

#: A larger description of the content is none of ours; it takes about a microsecond a byte.
_MOST_PICKLE_BYTES = 64 << 20
#: Tensors that share memory may be this much larger together than the file.
_MOST_SHARED = 4
_MOST_DEPTH = 100
#: Size of the record that ends an archive without a comment.
_END_BYTES = 22
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


class ArchiveError(Exception):
    """A file cannot be read; its text says what is wrong, and `is_foreign` that it is no damage: another program's file."""

    def __init__(self, text: str, is_foreign: bool = False) -> None:
        """Say what is wrong."""
        super().__init__(text)
        self.is_foreign = is_foreign


def load(path: Path) -> Any:
    """Return the content of a file: numbers, texts, lists, tuples, dicts, and tensors on the CPU.

    Raises:
        ArchiveError: it is damaged, or holds something else.
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        try:
            if file.read(4) != b"PK\x03\x04":
                raise ArchiveError("it does not begin as a file of torch.save does", is_foreign=True)
            with zipfile.ZipFile(file) as archive:
                return _Reader(_Records(archive, file)).content()
        except ArchiveError:
            raise
        except zipfile.BadZipFile as error:
            raise ArchiveError(str(error)) from error
        except Exception as error:  # a damaged file may raise any error
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise ArchiveError(text) from error


class _Records:
    """The records of an archive, none larger than the file, each checked as it is read."""

    def __init__(self, archive: zipfile.ZipFile, file: IO[bytes]) -> None:
        self.file_bytes = file.seek(0, 2)
        file.seek(max(0, self.file_bytes - _END_BYTES))
        if not file.read(4) == b"PK\x05\x06":
            raise ArchiveError("something follows its end")
        self._archive = archive
        self._records: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ArchiveError("its records are compressed, and torch.save compresses none")
            folder, _, name = info.filename.partition("/")
            if not folder or name in self._records:
                raise ArchiveError(f"record {info.filename!r} is there twice or has no name")
            self._records[name] = info
        if sum(info.file_size for info in self._records.values()) > self.file_bytes:
            raise ArchiveError("its records overlap")
        if "byteorder" in self._records and self.read("byteorder") != sys.byteorder.encode():
            raise ArchiveError("it was written on a machine of another byte order")

    def size(self, name: str) -> int:
        """Return the bytes of a record; -1: there is none."""
        return self._records[name].file_size if name in self._records else -1

    def read(self, name: str) -> bytearray:
        """Return a record.

        Raises:
            ArchiveError: it is missing, or its checksum is another.
        """
        if name not in self._records:
            raise ArchiveError(f"record {name!r} is missing", is_foreign=name == "data.pkl")
        content = bytearray(self._records[name].file_size)
        view, at = memoryview(content), 0
        with cast(io.BufferedIOBase, self._archive.open(self._records[name])) as record:
            while got := record.readinto(view[at : at + (1 << 20)]):  # at its end the checksum is looked at
                at += got
        if at != len(content):
            raise ArchiveError(f"record {name!r} is cut")
        return content


class _Reader:
    """Builds the content of an archive."""

    def __init__(self, records: _Records) -> None:
        self._records = records
        self._storages: dict[str, Tensor] = {}
        self._tensors: dict[tuple[Any, ...], Tensor] = {}
        self._tensor_bytes = 0

    def content(self) -> Any:
        """Return what the file holds.

        Raises:
            ArchiveError: there is something else.
        """
        size = self._records.size("data.pkl")
        if size > _MOST_PICKLE_BYTES:
            raise ArchiveError(f"its description has {size} bytes, and at most {_MOST_PICKLE_BYTES} are read")
        try:
            found = built(bytes(self._records.read("data.pkl")), self._find, self._storage)
        except NotPlain as error:
            raise ArchiveError(str(error), is_foreign=True) from error
        _check_size(found, 4 * size)
        return found

    def _find(self, text: str) -> Any:
        """Return what stands for a name: nothing of it can do more than make plain data."""
        module, _, name = text.partition(" ")
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        found = self._names().get(f"{module}.{name}")
        if found is None:
            raise NotPlain(f"it holds {module}.{name}, and only tensors and plain data are read")
        return found

    def _names(self) -> Mapping[str, Callable[..., Any]]:
        return {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch.Size": tuple,
            "collections.OrderedDict": OrderedDict,
            "__builtin__.complex": complex,
            "builtins.complex": complex,
            "_codecs.encode": lambda text, _: text.encode("latin1"),
        }

    def _storage(self, said: Any) -> tuple[str, torch.dtype]:
        """Read a tensor's memory; returns its key, and of which type its elements are."""
        kind, dtype, key, _, count = said
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise ArchiveError("a tensor has no memory")
        if self._records.size(f"data/{key}") != count * dtype.itemsize:
            raise ArchiveError(f"record data/{key} is missing, or not as long as its tensor")
        if key not in self._storages:
            content = self._records.read(f"data/{key}")
            self._storages[key] = (
                torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            )
        return key, dtype

    def _tensor(
        self, storage: tuple[str, torch.dtype], offset: int, size: tuple[int, ...], stride: tuple[int, ...],
        _grad: Any = False, _hooks: Any = None, dtype: torch.dtype | None = None, _more: Any = None,
    ) -> Tensor:  # fmt: skip
        (key, kept), numbers = storage, (offset, *size, *stride)
        dtype = dtype or kept
        if len(size) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
            raise ArchiveError("a tensor has an impossible shape")
        count, held = math.prod(size), self._storages[key].numel() // dtype.itemsize
        reach = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
        if count and (reach > held or count > held):
            raise ArchiveError(f"a tensor of shape {tuple(size)} is larger than what is stored of it")
        place = (key, dtype, *numbers)
        if place not in self._tensors:
            self._tensor_bytes += count * dtype.itemsize
            if self._tensor_bytes > _MOST_SHARED * self._records.file_bytes:
                raise ArchiveError("its tensors are larger than what is stored of them")
            whole = self._storages[key][: held * dtype.itemsize].view(dtype)
            self._tensors[place] = (
                whole.as_strided(tuple(size), tuple(stride), offset) if count else torch.empty(tuple(size), dtype=dtype)
            )
        return self._tensors[place]


def _check_size(content: Any, most: int) -> None:
    """Refuse what is many times in itself: who walks over it would not come to an end."""
    left = [(content, 0)]
    while left:
        value, depth = left.pop()
        most -= 1
        if most < 0 or depth > _MOST_DEPTH:
            raise ArchiveError("its content is many times in itself")
        if isinstance(value, Mapping):
            left += [(one, depth + 1) for pair in value.items() for one in pair]
        elif isinstance(value, list | tuple):
            left += [(one, depth + 1) for one in value]
