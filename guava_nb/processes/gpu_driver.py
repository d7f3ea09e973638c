"""Whether a GPU can be here at all, found out without torch, which takes seconds to load."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from guava_nb.errors import ConfigError

__all__ = ["check_device", "has_gpu_driver"]

#: What CUDA's driver is called where it is installed; ROCm, which torch calls cuda too, has a device file instead.
_DRIVERS, _ROCM = ("libcuda.so.1", "nvcuda.dll"), Path("/dev/kfd")


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
            "here are: cpu, and auto takes the best there is"
        )
