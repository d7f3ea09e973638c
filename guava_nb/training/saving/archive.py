"""Looks at a file of `torch.save` before and after torch reads it: torch looks at no checksum, and unpacks what is compressed."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

__all__ = ["ArchiveError", "load"]

#: A larger description of the content is none of ours; it takes about a microsecond a byte.
_MOST_PICKLE_BYTES = 64 << 20
#: Tensors that share memory may be this much larger together than the file.
_MOST_SHARED = 4
_MOST_DEPTH = 100
#: Size of the record that ends an archive without a comment.
_END_BYTES = 22


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
            described_bytes = _check_records(file)
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
        except ArchiveError:
            raise
        except Exception as error:  # a damaged file may raise any error
            if type(error).__name__ == "UnpicklingError":  # torch's text for it advises to switch the protection off
                raise ArchiveError(
                    "only tensors and plain data are read, and it holds more. Of a whole model save the weights, "
                    "torch.save(model.state_dict(), path), and start from them: weights=PATH (--weights PATH)",
                    is_foreign=True,
                ) from error
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            tensor = "a tensor does not fit what is stored of it: " if isinstance(error, RuntimeError) else ""
            raise ArchiveError(f"{tensor}{text}") from error
        _check_content(content, 4 * described_bytes, _MOST_SHARED * file.seek(0, 2))
    return content


def _check_records(file: IO[bytes]) -> int:
    """Check the records of an archive, none of them larger than the file; returns the bytes of its description.

    Raises:
        ArchiveError: one is cut, compressed, there twice, or has another checksum.
    """
    if file.read(4) != b"PK\x03\x04":
        raise ArchiveError("it does not begin as a file of torch.save does", is_foreign=True)
    file_bytes = file.seek(0, 2)
    file.seek(max(0, file_bytes - _END_BYTES))
    if file.read(4) != b"PK\x05\x06":
        raise ArchiveError("it is cut off, or further bytes follow its end")
    with zipfile.ZipFile(file) as archive:
        records: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ArchiveError("its records are compressed, and torch.save compresses none")
            folder, _, name = info.filename.partition("/")
            if not folder or name in records:
                raise ArchiveError(f"record {info.filename!r} is there twice or has no name")
            records[name] = info
        if sum(info.file_size for info in records.values()) > file_bytes:
            raise ArchiveError("its records overlap")
        if "data.pkl" not in records:
            raise ArchiveError("record 'data.pkl' is missing", is_foreign=True)
        if (size := records["data.pkl"].file_size) > _MOST_PICKLE_BYTES:
            raise ArchiveError(f"its description has {size} bytes, and at most {_MOST_PICKLE_BYTES} are read")
        if (damaged := archive.testzip()) is not None:
            raise ArchiveError(f"record {damaged!r} is not what was written")
        if "byteorder" in records and archive.read(records["byteorder"]) != sys.byteorder.encode():
            raise ArchiveError("it was written on a machine of another byte order")
    return size


def _check_content(content: Any, most: int, most_bytes: int) -> None:
    """Refuse what is many times in itself, and tensors that repeat their memory: who goes over them would not come to an end."""
    left, seen = [(content, 0)], set[int]()
    while left:
        value, depth = left.pop()
        most -= 1
        if most < 0 or depth > _MOST_DEPTH:
            raise ArchiveError("its content contains itself, or has more parts than its bytes can describe")
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            most_bytes -= value.numel() * value.element_size()
            if most_bytes < 0:
                raise ArchiveError("its tensors are larger than what is stored of them")
        elif isinstance(value, Mapping):
            left += [(one, depth + 1) for pair in value.items() for one in pair]
        elif isinstance(value, list | tuple):
            left += [(one, depth + 1) for one in value]
