"""What a Python elsewhere must have so that `guava worker` runs there, and what is said where it lacks that. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from guava_nb.config.version import installed_version

__all__ = ["FACTS", "IMAGE", "PythonThere", "facts_in", "own_image"]

#: What an image must be.
IMAGE = "container image with Python, torch and this version of guava_nb (guava-worker:VERSION)"

_MARK = "guava-facts "
#: Run there by `python -c`: says which Python it is, and what it has. It loads torch, since a broken one would be found too late.
FACTS = f"""
import json, sys
version = torch = None
gpus, why = 0, ""
try:
    import guava_nb
    version = guava_nb.__version__
except Exception as problem:
    pass
try:
    import torch
    torch, gpus = torch.__version__, torch.cuda.device_count()
except Exception as problem:
    torch, why = None, type(problem).__name__ + ": " + " ".join(str(problem).split())[:200]
print("{_MARK}" + json.dumps([sys.executable, "%d.%d" % sys.version_info[:2], version, torch, gpus, why]))
"""


@dataclass(frozen=True, slots=True)
class PythonThere:
    """A Python elsewhere.

    Attributes:
        path: of its program.
        release: such as "3.11".
        guava: version of guava_nb, None where it is not installed.
        torch: version of torch, None where it cannot be loaded.
        gpus: how many torch sees.
        why: what loading torch raised.
    """

    path: str
    release: str
    guava: str | None
    torch: str | None
    gpus: int = 0
    why: str = ""

    def missing(self, where: str, pip: str, other: str) -> str:
        """A sentence on what it lacks, with the way to get it; "" where it lacks nothing.

        Args:
            where: the machine or image, as the user named it.
            pip: the line that installs there, up to the package.
            other: how another Python is named.
        """
        ours = installed_version()
        mine = f"{where}: {self.path} (Python {self.release})"
        if self.torch is None:
            broken = (
                ""
                if self.why.startswith(("ModuleNotFoundError", "ImportError: No module"))
                else f" that loads ({self.why})"
            )
            return f"{mine} has no torch{broken}: {pip} torch{other}"
        if self.guava is None:
            return (
                f"{mine} has no guava_nb: install this version, {ours}, there from where you have it here, as in  {pip} "
                f"guava-nb=={ours}{other}"
            )
        if self.guava != ours:
            same = f"{ours} is here; both sides need the same"
            return f"{mine} has guava_nb {self.guava}, and {same}: {pip} guava-nb=={ours}{other}"
        return ""


def facts_in(output: str) -> PythonThere | None:
    """What `FACTS` printed; None where it did not come to that."""
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    return PythonThere(*json.loads(lines[-1][len(_MARK) :])) if lines else None


def own_image() -> str:
    """The image that is taken where none is named."""
    return f"guava-worker:{installed_version()}"
