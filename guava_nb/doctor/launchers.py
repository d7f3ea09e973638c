"""Checks of what starting workers elsewhere needs."""

from __future__ import annotations

import importlib.util
import shutil

from guava_nb.doctor.check import Check
from guava_nb.errors import ConfigError
from guava_nb.launchers import make_launcher

__all__ = ["check_launcher", "check_launchers"]

_PROGRAMS = {"ssh": "ssh", "slurm": "sbatch", "k8s": "kubectl", "docker": "docker"}


def check_launchers() -> Check:
    """Which of them have their programs here; none is needed for anything else."""
    here = [name for name, program in _PROGRAMS.items() if shutil.which(program)]
    here += ["ray"] if importlib.util.find_spec("ray") else []
    missing = [name for name in (*_PROGRAMS, "ray") if name not in here]
    if not here:
        return Check(
            "launchers", "-", "no ssh, sbatch, kubectl, docker or ray here: `%guava_up --on` has nothing to start with"
        )
    rest = f"; not here: {', '.join(missing)}" if missing else ""
    return Check("launchers", "ok", f"for `%guava_up --on`: {', '.join(here)}{rest}")


def check_launcher(text: str) -> Check:
    """What one start of workers needs, here and there; nothing is started."""
    name = f"--on {text.partition(':')[0]}"
    try:
        launcher = make_launcher(text)
        launcher.check()
    except ConfigError as problem:
        return Check(name, "fail", str(problem), "until that is mended, `%guava_up` with it starts nothing")
    count = (
        f"would start {launcher.count} worker{'' if launcher.count == 1 else 's'}"
        if launcher.count
        else "would start workers"
    )
    return Check(name, "ok", f"{count}: {text.partition(':')[2]}")
