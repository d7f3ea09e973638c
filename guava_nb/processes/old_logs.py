"""Takes away what sessions and workers of long ago left in the folder for temporary files, which not every system empties."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["KEPT", "KEPT_S", "forget_old"]

#: So many of the newest stay however old they are, and all that changed in so many seconds: a session may be quiet for days.
KEPT, KEPT_S = 50, 7 * 86400.0


def forget_old(paths: Iterable[Path]) -> None:
    """Remove old files and folders of this user among these; what cannot be removed stays."""
    ages, user = [], getattr(os, "getuid", lambda: None)()
    for path in paths:
        with contextlib.suppress(OSError):  # another process may take it away meanwhile
            facts = path.lstat()
            if not path.is_symlink() and user in (None, facts.st_uid):
                ages.append((facts.st_mtime, path))
    for changed, path in sorted(ages, reverse=True)[KEPT:]:
        if changed > time.time() - KEPT_S:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
