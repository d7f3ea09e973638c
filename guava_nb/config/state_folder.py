"""Where programs of this package keep state of their user."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["state_folder"]


def state_folder() -> Path:
    """Return where this user's programs keep state: XDG_STATE_HOME, else ~/.local/state (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "guava_nb"
