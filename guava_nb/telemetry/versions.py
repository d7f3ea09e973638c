"""Versions of what runs here, for the hello and for the table at the join."""

from __future__ import annotations

import functools
import platform
import sys
from importlib import metadata

__all__ = ["guava_version", "local_versions"]


def guava_version() -> str:
    """Return the installed version of guava_nb."""
    try:
        return metadata.version("guava-nb")
    except metadata.PackageNotFoundError:
        return "0+source"


@functools.lru_cache(maxsize=1)
def local_versions() -> dict[str, str]:
    """Return versions by name: guava_nb, protocol, python, torch, cuda, platform."""
    import torch

    from guava_nb.protocol.framing import WIRE_VERSION

    return {
        "guava_nb": guava_version(),
        "protocol": str(WIRE_VERSION),
        "python": "{}.{}".format(*sys.version_info[:2]),
        "torch": str(torch.__version__).split("+")[0],
        "cuda": str(torch.version.cuda or ""),
        "platform": f"{platform.system()} {platform.machine()}",
    }
