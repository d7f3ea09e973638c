"""Puts the user's own modules where code at this worker imports them, and loads those anew that have changed.

Knows paths, hashes and the import system.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import tempfile
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath

from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import UserFile

__all__ = ["FileFolder"]


class FileFolder:
    """A folder of this process at the front of sys.path; made when the first files come, and gone with the process."""

    def __init__(self) -> None:
        """No file has come."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._known: dict[str, str] = {}  # hash by path

    def place(self, files: Sequence[UserFile]) -> str:
        """Write files, all or none; returns a sentence on what is new, changed and loaded anew.

        Raises:
            ConfigError: a path leads out of the folder, a text is not what its hash says, or a file would hide a package.
        """
        installed = metadata.packages_distributions()  # reads every package here: once, not for each file
        for file in files:
            _check(file, installed)
        root = self._root()
        new = [file.path for file in files if file.path not in self._known]
        changed = [file.path for file in files if self._known.get(file.path, file.sha256) != file.sha256]
        for file in files:
            target = root / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(file.text, encoding="utf-8", newline="")
            self._known[file.path] = file.sha256
        importlib.invalidate_caches()
        said = [
            f"{len(new)} new file{'s' if len(new) > 1 else ''}" if new else "",
            f"changed: {', '.join(changed)}" if changed else "",
        ]
        return "; ".join(filter(None, (*said, _reload([*new, *changed])))) or "all files are here already"

    def close(self) -> None:
        """Take the folder away."""
        if self._folder is not None:
            sys.path[:] = [entry for entry in sys.path if entry != self._folder.name]
            self._folder.cleanup()
        self._folder, self._known = None, {}

    def _root(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="guava-files-", ignore_cleanup_errors=True)
            sys.path.insert(0, self._folder.name)
        return Path(self._folder.name)


def _check(file: UserFile, installed: Collection[str]) -> None:
    path = PurePosixPath(file.path)
    top = path.parts[0].removesuffix(".py") if path.parts else ""
    if (
        not top
        or path.is_absolute()
        or ".." in path.parts
        or "\\" in file.path
        or ":" in file.path
        or "\0" in file.path
    ):
        raise ConfigError(f"the file {file.path!r} does not lie below a folder, and is not written")
    if hashlib.sha256(file.text.encode("utf-8")).hexdigest() != file.sha256:
        raise ConfigError(f"the file {file.path} arrived with another hash than it was sent with; send it again")
    if top in sys.stdlib_module_names or top in installed:
        raise ConfigError(
            f"the file {file.path} would hide the package {top!r} that is installed here: give it another name"
        )


def _module_of(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _reload(paths: Sequence[str]) -> str:
    """Load the modules anew that are loaded and lie beside a file that is new here; returns a sentence, "" for none."""
    tops = {_module_of(path).partition(".")[0] for path in paths if path.endswith(".py")}
    # Python moves a module to the end of sys.modules when it is loaded: what a module imports stands before it.
    loaded = [name for name in list(sys.modules) if name.partition(".")[0] in tops]
    for name in loaded:
        importlib.reload(sys.modules[name])
    return f"loaded anew: {', '.join(loaded)}" if loaded else ""
