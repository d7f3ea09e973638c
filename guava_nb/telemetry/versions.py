"""Versions of what runs here, for the hello and for the table at the join."""

from __future__ import annotations

import functools
import platform
import sys

from guava_nb.config.version import installed_version

__all__ = ["local_versions"]


@functools.lru_cache(maxsize=1)
def local_versions() -> dict[str, str]:
    """Return versions by name: guava_nb, protocol, python, torch, cuda, platform."""
    import torch

    from guava_nb.protocol.framing import WIRE_VERSION

    return {
        "guava_nb": installed_version(),
        "protocol": str(WIRE_VERSION),
        "python": "{}.{}".format(*sys.version_info[:2]),
        "torch": str(torch.__version__).split("+")[0],
        "cuda": str(torch.version.cuda or ""),
        "platform": f"{platform.system()} {platform.machine()}",
    }
