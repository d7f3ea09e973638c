"""What systems do differently, and files and processes need everywhere; the list of all of it is in `systems.md`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ask_to_end", "own_group", "put_in_place", "remove"]

#: On Windows a file that any program has open can neither be replaced nor removed: a reader, or a scan for viruses, ends soon.
PATIENCE_S = 2.0
_LOOK_S = 0.02


def own_group(**creationflags: bool) -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` that keep an interrupt of this process's group from a process.

    An interrupted cell sends one to the kernel's whole group, and Ctrl+C to all that share a console.

    Args:
        creationflags: further flags of Windows by name, such as CREATE_NO_WINDOW=True.
    """
    if os.name != "nt":
        return {"start_new_session": True}
    names = ("CREATE_NEW_PROCESS_GROUP", *(name for name, is_wanted in creationflags.items() if is_wanted))
    flags = 0
    for name in names:
        flags |= getattr(subprocess, name, 0)
    return {"creationflags": flags}


def ask_to_end() -> None:
    """Send this process SIGTERM, which its handler takes as a leave. On Windows `os.kill` would end it without a word."""
    if os.name == "nt":
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a file that was written beside its place its name, in one step; waits a moment for who has the old one open.

    Raises:
        OSError: it cannot be; the one that was there is as it was.
    """
    _in_spite_of_readers(lambda: os.replace(partial, path))


def remove(path: Path) -> bool:
    """Remove a file, if it is there; returns whether it is gone. Waits a moment for who has it open."""
    with contextlib.suppress(OSError):
        _in_spite_of_readers(lambda: path.unlink(missing_ok=True))
        return True
    return False


def _in_spite_of_readers(change: Callable[[], None]) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return change()
        except PermissionError:
            if os.name != "nt" or time.monotonic() >= until:
                raise
        time.sleep(_LOOK_S)
