"""Checks of CUDA and of the library that reads energy counters. A machine without a GPU is in order."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from guava_nb.doctor.check import Check

__all__ = ["check_gpu", "check_nvml"]

OWNER = "nvidia-ml-py"  # the distribution that the module pynvml belongs to
MEND = f"python -m pip uninstall -y pynvml && python -m pip install --force-reinstall {OWNER}"


def check_gpu() -> Check:
    """What torch can compute on, and why not where the driver sees a GPU that torch does not."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Check("gpu", "ok", f"{', '.join(names)} (CUDA {torch.version.cuda}, {_driver() or 'driver not read'})")
    if torch.backends.mps.is_available():
        return Check("gpu", "ok", "Apple GPU (mps)")
    driver = _driver()
    if driver is None:
        return Check("gpu", "ok", "none; workers compute on the CPU")
    built = "torch is a CPU build" if torch.version.cuda is None else f"torch wants CUDA {torch.version.cuda}"
    fix = "install the torch build for this driver: https://pytorch.org/get-started/locally/"
    return Check("gpu", "warning", f"{driver} is here, but torch cannot use it: {built}", fix)


def check_nvml() -> Check:
    """Whether the module `pynvml` is the maintained one: an old package of that name shadows it."""
    found = importlib.util.find_spec("pynvml")
    if found is None or found.origin is None:
        return Check(
            "nvml", "warning", f"{OWNER} is not installed: no energy of GPUs", f"python -m pip install {OWNER}"
        )
    expected = _module_of_owner()
    if expected is None or Path(found.origin).resolve() != expected.resolve():
        return Check("nvml", "warning", f"another package shadows {OWNER}: {found.origin}", MEND)
    if _installed("pynvml"):
        return Check("nvml", "warning", "the deprecated package pynvml is installed as well", MEND)
    driver = _driver()
    return Check("nvml", "ok", driver if driver is not None else "library here, no NVIDIA driver")


def _driver() -> str | None:
    """Version of the NVIDIA driver and number of GPUs; None where there is no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, a driver of another version: each raises its own class
        return None
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        text = version.decode() if isinstance(version, bytes) else str(version)
        return f"driver {text}, {pynvml.nvmlDeviceGetCount()} GPU(s)"
    finally:
        pynvml.nvmlShutdown()


def _module_of_owner() -> Path | None:
    """Where the maintained distribution put its module."""
    if not _installed(OWNER):
        return None
    files = distribution(OWNER).files or []
    return next((Path(str(file.locate())) for file in files if file.name == "pynvml.py"), None)


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
