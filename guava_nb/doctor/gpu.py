"""Checks of CUDA and of the library that reads energy counters. A machine without a GPU is in order."""

from __future__ import annotations

import contextlib
import importlib.util
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from guava_nb.doctor.check import Check, installed

__all__ = ["check_energy", "check_gpu", "check_nvml"]

#: What can be read of a GPU, and the call that reads it; each is missing on some cards, drivers and virtual machines.
READINGS = {
    "total energy": "nvmlDeviceGetTotalEnergyConsumption",
    "power": "nvmlDeviceGetPowerUsage",
    "utilisation": "nvmlDeviceGetUtilizationRates",
}
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
        return Check("gpu", "-", "none; workers compute on the CPU")
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
    if installed("pynvml"):
        return Check("nvml", "warning", "the deprecated package pynvml is installed as well", MEND)
    driver = _driver()
    return Check("nvml", "ok", driver if driver is not None else "library here, no NVIDIA driver")


def check_energy() -> Check:
    """What each GPU tells of its energy, tried call by call."""
    if _driver() is None:
        return Check("energy", "-", "no NVIDIA GPU to read")
    import pynvml

    pynvml.nvmlInit()
    try:
        told = [_readable(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    detail = "; ".join(
        f"GPU {index}: " + ", ".join(f"{name} {'yes' if name in readable else 'no'}" for name in READINGS)
        for index, readable in enumerate(told)
    )
    if all({"total energy", "power"} & readable for readable in told):
        return Check("energy", "ok", detail)
    fix = "energy of such a GPU is shown as not measured; a newer driver, or a machine that is not shared, may tell it"
    return Check("energy", "warning", detail, fix)


def _readable(pynvml: Any, index: int) -> set[str]:
    """Which of `READINGS` a GPU gives."""
    readable = set()
    for name, call in READINGS.items():
        with contextlib.suppress(Exception):  # not supported, no permission, an old library: each its own class
            getattr(pynvml, call)(pynvml.nvmlDeviceGetHandleByIndex(index))
            readable.add(name)
    return readable


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
    if not installed(OWNER):
        return None
    files = distribution(OWNER).files or []
    return next((Path(str(file.locate())) for file in files if file.name == "pynvml.py"), None)
