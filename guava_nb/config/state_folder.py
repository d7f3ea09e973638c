"""Where programs of this package keep files of their user, and how a name in a folder is made to last."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from guava_nb.errors import ConfigError

__all__ = ["private_temporary_folder", "state_folder", "sync_folder", "write_private"]


def state_folder() -> Path:
    """Return where this user's programs keep state: XDG_STATE_HOME, else ~/.local/state (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "guava_nb"


def private_temporary_folder(name: str) -> Path:
    """Return the folder `name`-USER among the system's temporary files, made where it is not there: of this user alone.

    Raises:
        ConfigError: it cannot be made; or another user could read it or put links into it, so that it cannot be trusted.
    """
    user = getattr(os, "getuid", lambda: "user")()
    folder = Path(tempfile.gettempdir()) / f"{name}-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as problem:
        raise ConfigError(
            f"{folder} cannot be made ({problem.strerror or problem}): mend that, or set TMPDIR to a folder of yours"
        ) from problem
    held = folder.lstat()
    if folder.is_symlink() or (hasattr(os, "getuid") and (held.st_uid != user or held.st_mode & 0o077)):
        raise ConfigError(
            f"{folder} is open to other users or not yours: remove it, or set TMPDIR to a folder of yours"
        )
    return folder


def write_private(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a file in place as a whole, for this user alone.

    Args:
        path: its folder is there.
        content: all of it.
        mode: what this user may do with it; a program needs 0o700.

    Raises:
        OSError: it cannot be written; the one that was there is as it was.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in a folder outlast a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):  # Windows cannot open a folder, and some network drives cannot sync one
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
