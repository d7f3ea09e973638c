"""Has pip install packages into this worker's environment, and lets it change nothing that is loaded there.

Knows pip's command line and the metadata of what is installed. The process that works goes on with the modules that it has
loaded; were one of them replaced on disk, half of it would be old and half new.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from guava_nb.errors import ConfigError

__all__ = ["constraints", "install"]

#: Frozen also where they are not loaded: all else here is built on them.
_ALWAYS = ("torch", "torchvision", "torchaudio", "numpy", "guava-nb")
#: Lines of pip's own that tell why it refused.
_TOLD_LINES = 12


def constraints(
    loaded: Collection[str],
    owners: Mapping[str, Sequence[str]],
    versions: Mapping[str, str],
    needed: Collection[str] = (),
) -> list[str]:
    """Return the lines of a constraints file that keep what is loaded as it is. Pure.

    Args:
        loaded: names of modules.
        owners: of each top-level module, the distributions that have it.
        versions: of each distribution that is installed.
        needed: distributions that are kept, too: pip does not ask what an installed torch needs when it changes another package.
    """
    tops = {name.partition(".")[0] for name in loaded}
    frozen = {name for top in tops for name in owners.get(top, ())}
    known = {_same(name): version for name, version in versions.items()}
    wanted = sorted({_same(name) for name in (*frozen, *needed, *_ALWAYS)} & known.keys())
    return [f"{name}=={known[name]}" for name in wanted]


def install(packages: Sequence[str]) -> str:
    """Install packages; pip's lines are printed as they come.

    Returns:
        A sentence on what is installed now.

    Raises:
        ConfigError: pip is not there, or refused; its last lines say why.
    """
    before = _installed()
    lines = constraints(tuple(sys.modules), metadata.packages_distributions(), before, _needs_of_torch())
    with tempfile.TemporaryDirectory(prefix="guava-pip-") as folder:
        frozen = Path(folder) / "constraints.txt"
        frozen.write_text("\n".join(lines) + "\n", encoding="utf-8")
        told = _pip("install", "--constraint", str(frozen), *packages)
    importlib.invalidate_caches()
    after = _installed()
    new = sorted(f"{name} {version}" for name, version in after.items() if before.get(name) != version)
    if new:
        return f"installed {', '.join(new)}"
    return f"nothing to install: {told}" if told else "nothing to install"


def _needs_of_torch() -> list[str]:
    """CUDA's libraries, Triton and what else torch names: they are loaded by no import of their own."""
    try:
        lines = metadata.requires("torch") or ()
    except metadata.PackageNotFoundError:
        return []
    return [found[0] for line in lines if (found := re.match(r"[A-Za-z0-9._-]+", line))]


def _pip(*words: str) -> str:
    """Run pip, print its lines; returns the last one."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    process = subprocess.Popen(
        [*command, "--progress-bar", "off"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    told: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            told = [*told, line.rstrip()][-_TOLD_LINES:]
        status = process.wait()
    finally:  # an interrupt comes here too
        process.kill()
        process.communicate()
    if status:
        missing = "No module named pip" in "\n".join(told)
        why = _reason(told)
        if missing:
            why = "this Python has no pip; install there with the tool that made its environment"
        raise ConfigError(f"pip refused, and torch and all that is loaded here stay as they are: {why}")
    return told[-1] if told else ""


def _reason(told: Sequence[str]) -> str:
    """Why pip refused, out of its last lines, which were all printed already; and what to do."""
    errors = [line.removeprefix("ERROR: ") for line in told if line.startswith("ERROR: ")]
    text = next(
        (line for line in errors if "No matching distribution" in line), errors[0] if errors else "\n".join(told)
    )
    if any("The user requested (constraint)" in line for line in told):
        return f"{text.rstrip('.')}. What is loaded there keeps its version: ask for a version that goes with it, or for none"
    if "No matching distribution" in text:
        return f"{text.rstrip('.')}. No package of this name and version is to be had there: look at its spelling"
    return text


def _installed() -> dict[str, str]:
    found = ((one.metadata["Name"], one.version) for one in metadata.distributions())
    return {str(name): version for name, version in found if name and version}


def _same(name: str) -> str:
    """How PEP 503 writes a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()
