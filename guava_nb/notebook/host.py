"""Whose machine this notebook runs on, and what that host forbids."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

__all__ = ["Host", "colab_rule", "detect_host"]


class Host(Enum):
    """Where the kernel lives."""

    KAGGLE = "Kaggle"
    COLAB = "Colab"
    BINDER = "Binder"
    LOCAL = "this machine"


def detect_host(
    shell: object,
    environ: Mapping[str, str] = os.environ,
    exists: Callable[[str], bool] = os.path.exists,
) -> Host:
    """Tell the host from the environment and the shell's class; imports nothing of the host's own packages.

    Kaggle comes first: its image is built on Colab's and carries Colab's marks too.
    """
    if any(name in environ for name in ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE")) or exists("/kaggle/working"):
        return Host.KAGGLE
    if _is_colab_shell(shell):
        return Host.COLAB
    return Host.BINDER if "BINDER_SERVICE_HOST" in environ else Host.LOCAL


def colab_rule(host: Host) -> str:
    """What Colab's terms say on workers, where it matters; an empty string elsewhere."""
    if host is not Host.COLAB:
        return ""
    return (
        "Colab's rule: a free runtime (no positive balance of compute units) may not run workers of a distributed "
        "computation and can be ended without warning; with a positive balance it may. "
        "Read https://research.google.com/colaboratory/faq.html before you join."
    )


def _is_colab_shell(shell: Any) -> bool:
    """The class of the shell is the only mark that other images built from Colab's do not carry."""
    return any(base.__module__.startswith("google.colab") for base in type(shell).__mro__)
