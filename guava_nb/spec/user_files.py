"""The user's own modules, read from this machine as records that a worker can place.

Knows paths and text; knows no worker. A folder stands for a package of its name; a file for a module of its name.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from guava_nb.config.units import show_bytes
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import UserFile

__all__ = ["read_files"]

#: All of them travel in one record, and records end at 8 MiB.
_MOST_BYTES, _MOST_FILES = 4 << 20, 1000
#: What lies beside code and is no code.
_LEFT_OUT = ("__pycache__", "node_modules")


def read_files(paths: Iterable[str | Path]) -> tuple[tuple[UserFile, ...], list[str]]:
    """Read files, and all text files in folders; hidden ones and caches are left out.

    Returns:
        The records, by path, and sentences on what was left out.

    Raises:
        ConfigError: a path does not exist, is the home folder or holds the folder of the notebook, a named file is no text, two
            have one name, or they are too many or too large.
    """
    found: dict[str, UserFile] = {}
    notes: list[str] = []
    total = 0
    for given in paths:
        top = Path(given).expanduser().resolve()
        if not top.exists():
            raise ConfigError(
                f"there is no file or folder {str(given)!r} here ({Path.cwd()} is the folder of this notebook)"
            )
        if top == Path.home() or top in Path.cwd().resolve().parents:
            raise ConfigError(
                f"{given} is {top}, which holds more than your code, and every worker would get it: name the modules and the "
                "folder that the workers need"
            )
        if top.stem in sys.stdlib_module_names:
            raise ConfigError(
                f"{given} would hide Python's own module {top.stem!r} at the workers: give it another name"
            )
        for path in _files_of(top):
            file = _read(path, path.relative_to(top.parent).as_posix())
            if file is None:
                if path == top:
                    raise ConfigError(
                        f"{given} is no text: %guava_files takes code and other text; %guava_push takes data"
                    )
                notes.append(f"{path} is no text and is left out")
                continue
            if found.setdefault(file.path, file) != file:
                raise ConfigError(f"two files are called {file.path}: the workers have room for one of them")
            total += len(file.text.encode("utf-8"))
            _check_bounds(total, len(found))
    return tuple(found.values()), notes


def _check_bounds(total: int, count: int) -> None:
    if total > _MOST_BYTES or count > _MOST_FILES:
        raise ConfigError(
            f"these are more than {show_bytes(_MOST_BYTES)} or {_MOST_FILES} files: name the modules that the workers need; "
            "%guava_push takes data"
        )


def _files_of(top: Path) -> Iterator[Path]:
    if top.is_file():
        yield top
        return
    for path in sorted(top.iterdir()):
        if path.name.startswith(".") or path.name in _LEFT_OUT or path.is_symlink():
            continue
        if path.is_dir() or path.is_file():
            yield from _files_of(path)


def _read(path: Path, name: str) -> UserFile | None:
    """The record of a file; None where it is no text."""
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError(f"{path} has {show_bytes(path.stat().st_size)}, of at most {show_bytes(_MOST_BYTES)}")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else UserFile(name, hashlib.sha256(raw).hexdigest(), text)
