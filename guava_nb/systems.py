"""What systems do differently, and files and processes need everywhere; the list of all of it is in `systems.md`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guava_nb.errors import ConfigError

__all__ = ["ask_to_end", "check_device", "has_gpu_driver", "own_group", "put_in_place", "remove"]

#: What CUDA's driver is called where it is installed; ROCm, which torch calls cuda too, has a device file instead.
_DRIVERS, _ROCM = ("libcuda.so.1", "nvcuda.dll"), Path("/dev/kfd")

#: On Windows a file that any program has open can neither be replaced nor removed: a reader, or a scan for viruses, ends soon.
PATIENCE_S = 2.0
_LOOK_S = 0.02


def has_gpu_driver() -> bool:
    """Whether a driver is installed through which torch could find a GPU of CUDA or ROCm; loads no torch."""
    for name in _DRIVERS:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return _ROCM.exists()


def check_device(wanted: str) -> None:
    """Refuse at once what torch, which takes seconds to load, would refuse too; what is left is torch's to judge.

    Args:
        wanted: "auto", "cpu", "cuda", "cuda:1", "mps", or a GPU's number.

    Raises:
        ConfigError: it is a GPU, and no driver of one is here, or it is no name of a device.
    """
    kind = "cuda" if wanted.isdigit() else wanted.partition(":")[0]
    if kind.lower() in ("gpu", "nvidia", "cuda") and kind != "cuda":
        raise ConfigError(f"device {wanted!r} is not a torch device; a GPU is called cuda, or cuda:1 by its number")
    if kind == "cuda" and not has_gpu_driver():
        raise ConfigError(
            f"device {wanted!r} is not here: this machine has no driver of a GPU (in Colab: Runtime > Change runtime type); "
            "cpu works everywhere, auto takes what is here"
        )


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
