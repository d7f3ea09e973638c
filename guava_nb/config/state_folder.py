"""Where programs of this package keep files of their user, that these are the user's alone, and how a name in a folder lasts."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from guava_nb.errors import ConfigError
from guava_nb.systems import put_in_place

__all__ = [
    "OTHERS_DO",
    "OTHERS_WRITE",
    "make_private_folder",
    "not_private",
    "private_temporary_folder",
    "read_private",
    "state_folder",
    "sync_folder",
    "write_private",
]

#: What the mode of a file must not grant to others: to write it; to do anything with it.
OTHERS_WRITE, OTHERS_DO = stat.S_IWGRP | stat.S_IWOTH, stat.S_IRWXG | stat.S_IRWXO


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


def make_private_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder for files of this user alone, and those above it that are missing, each with mode 0700.

    A folder of ours that is there, from `root` down, is closed to others: an older version, or a umask, may have left it open.

    Args:
        folder: to make.
        root: the topmost folder of ours; None: the state folder, or one among the system's temporary files whose name
            begins with guava_nb. Folders that lie elsewhere stay as they are.

    Raises:
        OSError: one cannot be made, another user owns it, or it cannot be closed to others.
    """
    root = root or _temporary_root(folder) or state_folder()
    for one in reversed([folder, *folder.parents]):
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
        elif not one.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(one))
        if one == root or root in one.parents:
            _close_to_others(one)


def _temporary_root(folder: Path) -> Path | None:
    """The folder of ours among the system's temporary files that this one is or lies in: others may make folders there, too."""
    temporary = Path(tempfile.gettempdir())
    parts = folder.relative_to(temporary).parts if temporary in folder.parents else ()
    return temporary / parts[0] if parts and parts[0].startswith("guava_nb") else None


def _close_to_others(folder: Path) -> None:
    if why := _others(folder, 0):
        raise PermissionError(errno.EPERM, f"{folder}: {why}", str(folder))
    if os.name == "posix" and folder.stat().st_mode & OTHERS_DO:
        folder.chmod(0o700)
        if folder.stat().st_mode & OTHERS_DO:
            raise PermissionError(errno.EPERM, f"{folder}: other users may open it, whatever its mode", str(folder))


def not_private(path: Path, mask: int = OTHERS_DO) -> str:
    """Say why a file is another user's or open to others, as in "another user owns it"; "" where it is neither, or not there.

    Args:
        mask: bits of the mode that it must not have.
    """
    try:
        return _others(path, mask)
    except OSError:
        return ""


def _others(path: Path, mask: int) -> str:
    """As `not_private`; a link must be this user's, too."""
    return _rights(path.lstat(), mask) or _rights(path.stat(), mask)


def _rights(held: os.stat_result, mask: int) -> str:
    if not hasattr(os, "getuid"):
        return ""
    if held.st_uid != os.getuid():
        return "another user owns it"
    if stat.S_ISLNK(held.st_mode) or not held.st_mode & mask:
        return ""
    return "other users may write it" if held.st_mode & mask & OTHERS_WRITE else "other users may read it"


def read_private(path: Path) -> bytes:
    """Return what a file holds that only this user can have written.

    Raises:
        OSError: it cannot be read, is no plain file, another user owns it, or others may write it.
    """
    # Without waiting: a pipe in its place would keep the reader for ever.
    with os.fdopen(
        os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb"
    ) as file:
        held = os.fstat(file.fileno())
        why = _rights(held, OTHERS_WRITE) if stat.S_ISREG(held.st_mode) else "it is no plain file"
        if why:
            raise PermissionError(errno.EPERM, why, str(path))
        return file.read()


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
        put_in_place(Path(name), path)
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
