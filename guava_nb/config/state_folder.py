"""Where programs of this package keep state of their user, and how a name in a folder is made to last."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["state_folder", "sync_folder"]


def state_folder() -> Path:
    """Return where this user's programs keep state: XDG_STATE_HOME, else ~/.local/state (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "guava_nb"


def sync_folder(folder: Path) -> None:
    """Have the names in a folder outlast a loss of power, where the system can do that."""
    with contextlib.suppress(OSError):  # Windows cannot open a folder, and some network drives cannot sync one
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
