"""Whose machine this kernel runs on. Kaggle and Colab keep their secrets in different places."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

__all__ = ["Host", "current_host", "detect_host"]


#: Set in the containers of a BinderHub, by its launcher and by Kubernetes.
_BINDER = ("BINDER_LAUNCH_HOST", "BINDER_REPO_URL", "BINDER_SERVICE_HOST")


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

    Args:
        shell: of IPython; None: there is none.
        environ, exists: of this machine; for tests.
    """
    if any(name in environ for name in ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE")) or exists("/kaggle/working"):
        return Host.KAGGLE
    if _is_colab_shell(shell):
        return Host.COLAB
    return Host.BINDER if any(name in environ for name in _BINDER) else Host.LOCAL


def current_host() -> Host:
    """The host of this process; a plain script, which has no shell, is local or on Kaggle."""
    ipython = sys.modules.get("IPython")
    return detect_host(None if ipython is None else ipython.get_ipython())


def _is_colab_shell(shell: Any) -> bool:
    """The class of the shell is the only mark that other images built from Colab's do not carry."""
    return any(base.__module__.startswith("google.colab") for base in type(shell).__mro__)
