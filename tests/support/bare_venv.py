"""A Python environment with a few packages of this one and nothing else, and wheels of others, so that pip needs no index."""

from __future__ import annotations

import os
import sys
import venv
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from guava_nb.install.wheel import pack


def closure(*names: str) -> set[str]:
    """Names of these distributions and of all that they need here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().replace("_", "-").lower()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return found


def site_packages(folder: Path) -> Path:
    """Where an environment has its packages."""
    if os.name == "nt":
        return folder / "Lib" / "site-packages"
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def bare_venv(folder: Path, names: set[str]) -> Path:
    """Make an environment that has these distributions, as links; returns its Python."""
    venv.EnvBuilder(with_pip=False).create(folder)
    for name in names:
        found = metadata.distribution(name)
        tops = {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = site_packages(folder) / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"


def repack(name: str, folder: Path) -> None:
    """Put a wheel of an installed distribution into a folder; good for this Python on this machine."""
    found = metadata.distribution(name)
    files = {}
    for file in found.files or ():
        path = Path(str(found.locate_file(file)))
        if file.parts[0] != ".." and file.suffix != ".pyc" and path.is_file():
            files[file.as_posix()] = path.read_bytes()
    (info,) = {Path(path).parts[0] for path in files if Path(path).parts[0].endswith(".dist-info")}
    stem, _, version = info.removesuffix(".dist-info").rpartition("-")
    for left_by_pip in ("INSTALLER", "REQUESTED", "direct_url.json"):
        files.pop(f"{info}/{left_by_pip}", None)
    wheel = pack(stem, version, files)
    (folder / wheel.name).write_bytes(wheel.content)
