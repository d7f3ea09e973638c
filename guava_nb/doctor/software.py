"""Checks of Python and of the packages that guava_nb stands on. Versions come from package metadata."""

from __future__ import annotations

import importlib
import platform
import sys

from guava_nb.doctor.check import Check, installed, release

__all__ = ["check_ipykernel", "check_ipywidgets", "check_packages", "check_python", "check_torch"]

OLDEST_PYTHON = (3, 10)
TESTED_PYTHON = ("3.11",)
#: The oldest that was run.
OLDEST_TORCH = (2, 11)
#: All that were run: 2.11 on GPUs, 2.13 by all tests.
TESTED_TORCH = ("2.11", "2.13")
OLDEST_IPYKERNEL = (6, 17)
#: A widget that is updated from a thread raises LookupError in these.
BROKEN_IPYKERNEL = ("7.0.0", "7.0.1")
OLDEST_IPYWIDGETS = (7, 7)
#: Import name to distribution, where every run needs it.
PACKAGES = {
    "msgspec": "msgspec",
    "cryptography": "cryptography",
    "websockets": "websockets",
    "numpy": "numpy",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "dotenv": "python-dotenv",
    "pyflakes": "pyflakes",
    "tqdm": "tqdm",
}


def check_python() -> Check:
    """Old enough to be supported, and which were tested."""
    detail = (
        f"{platform.python_version()} on {platform.system()} {platform.machine()} (tested: {', '.join(TESTED_PYTHON)})"
    )
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", "fail", detail, f"use Python {_dotted(OLDEST_PYTHON)} or newer")
    return Check("python", "ok", detail)


def check_torch() -> Check:
    """Present, and whether this version was tested."""
    found = installed("torch")
    if found is None:
        return Check("torch", "fail", "not installed", "python -m pip install torch")
    tested = any(release(found)[: len(release(known))] == release(known) for known in TESTED_TORCH)
    if tested:
        return Check("torch", "ok", f"{found} (tested: {', '.join(TESTED_TORCH)})")
    older = release(found) < OLDEST_TORCH
    detail = f"{found} is untested (tested: {', '.join(TESTED_TORCH)}{'; it is older than those' if older else ''})"
    # Who was given this torch by Colab or Kaggle keeps it: their other packages were built for it.
    wanted = f'where it is your own: python -m pip install "torch>={_dotted(OLDEST_TORCH)}"'
    return Check("torch", "warning", detail, wanted if older else "")


def check_ipykernel() -> Check:
    """Not one of the versions whose widgets cannot be updated from a thread."""
    found = installed("ipykernel")
    if found is None:
        return Check("ipykernel", "warning", "not installed: no magics", "python -m pip install ipykernel")
    if found in BROKEN_IPYKERNEL or release(found) < OLDEST_IPYKERNEL:
        excluded = "".join(f",!={broken}" for broken in BROKEN_IPYKERNEL)
        wanted = f'python -m pip install "ipykernel>={_dotted(OLDEST_IPYKERNEL)}{excluded}", then restart the kernel'
        return Check("ipykernel", "warning", f"{found}: the live panel breaks in this version", wanted)
    return Check("ipykernel", "ok", found)


def check_ipywidgets() -> Check:
    """Present and new enough for the live panel; without it the panel is text."""
    found = installed("ipywidgets")
    wanted = f'python -m pip install "ipywidgets>={_dotted(OLDEST_IPYWIDGETS)}"'
    if found is None:
        return Check("ipywidgets", "warning", "not installed: the panel is plain text", wanted)
    if release(found) < OLDEST_IPYWIDGETS:
        return Check("ipywidgets", "warning", f"{found} is too old: the panel is plain text", wanted)
    return Check("ipywidgets", "ok", found)


def check_packages() -> Check:
    """Everything else that a run imports."""
    broken = {distribution: problem for name, distribution in PACKAGES.items() if (problem := _import_problem(name))}
    if broken:
        detail = "; ".join(f"{distribution}: {problem}" for distribution, problem in broken.items())
        return Check("packages", "fail", detail, f"python -m pip install {' '.join(broken)}")
    return Check("packages", "ok", ", ".join(f"{name} {installed(name)}" for name in PACKAGES.values()))


def _import_problem(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # an import runs foreign code; a broken binary raises more than ImportError
        return f"{type(error).__name__}: {error}"
    return ""


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
