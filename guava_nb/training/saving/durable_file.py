"""Writes a file that is whole or not there, also after a crash or a loss of power, and leaves nothing on a full disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil

from guava_nb.config.state_folder import sync_folder
from guava_nb.config.units import show_bytes
from guava_nb.systems import put_in_place

__all__ = ["NotWritten", "Sink", "write_durably"]

#: Of what is being written: name of the file, machine, process, save.
_PARTIAL = re.compile(r"\.([0-9a-f]{8})-(\d+)-[0-9a-f]{8}\.partial$")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotWritten(Exception):
    """A file could not be written; its text says why, and how much room there is."""


class Sink:
    """What a writer writes to. After an error it takes all else without a word, since torch's writer cannot be stopped.

    Attributes:
        num_bytes: that were written.
        error: the first one.
    """

    def __init__(self, handle: int) -> None:
        """Write to an open file."""
        self._handle, self.num_bytes, self.error = handle, 0, None if handle >= 0 else OSError(errno.EBADF, "closed")

    def write(self, data: bytes | memoryview) -> int:
        """Write all of it, or note why that fails."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while len(left) and self.error is None:
                written = os.write(self._handle, left)
                self.num_bytes += written
                left = left[written:]
        except OSError as error:
            self.error = error
        return size

    def flush(self) -> None:
        """Nothing is held back."""


def write_durably(path: Path, write: Callable[[Sink], None], needed_bytes: int, mode: int = 0o666) -> None:
    """Write a file beside its place, bring it to the disk, and put it there in one step.

    Args:
        path: its folder is made.
        write: writes the content.
        needed_bytes: about its size, for the error.
        mode: that it gets, less what the umask takes.

    Raises:
        NotWritten: it is not there; an older file of this name is as it was.
    """
    partial = path.with_name(f"{path.name[:50]}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}.partial")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise NotWritten("a device has this name; name a file")  # which an administrator would replace
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        _write_through(partial, write, mode)
        put_in_place(partial, path)
        sync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError | RuntimeError):
            raise NotWritten(_why(path, error, needed_bytes)) from error
        raise


def _write_through(partial: Path, write: Callable[[Sink], None], mode: int) -> None:
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        sink = Sink(handle)
        write(sink)
        if sink.error is not None:
            raise sink.error
        os.fsync(handle)  # else a loss of power may leave the name without the content
    finally:
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes of this machine were writing when they were killed."""
    for file in folder.glob("*.partial"):
        found = _PARTIAL.search(file.name)
        if found and found[1] == _machine() and not psutil.pid_exists(int(found[2])):
            with contextlib.suppress(OSError):
                file.unlink()


def _machine() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _why(path: Path, error: OSError | RuntimeError, needed_bytes: int) -> str:
    said = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0][:200]
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return said
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(path.parent).free
        # The values were counted, without what is around them in the file.
        more = "more than " if needed_bytes <= free else ""
        return f"{said}: it needs {more}{show_bytes(needed_bytes)}, and {show_bytes(free)} are free in {path.parent}"
    return f"{said}: it needs {show_bytes(needed_bytes)}"
