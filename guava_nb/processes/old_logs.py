"""Takes away what sessions and workers of long ago left in the folder for temporary files, which not every system empties."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

__all__ = ["KEPT", "KEPT_S", "LOOKS_AGAIN_S", "forget_old"]

#: So many of the newest stay however old they are, and all that changed in so many seconds: a session may be quiet for days.
KEPT, KEPT_S = 50, 7 * 86400.0
#: Seconds until a process looks through a folder again: a folder of thousands takes longer to read than a session to begin.
LOOKS_AGAIN_S = 3600.0
_looked: dict[tuple[Path, str], float] = {}


def forget_old(folder: Path, beginning: str) -> None:
    """Remove old files and folders of this user, at most once an hour; what cannot be removed stays.

    Args:
        folder: where they lie; it need not be there.
        beginning: of their names.
    """
    now = time.time()
    if now - _looked.get((folder, beginning), 0.0) < LOOKS_AGAIN_S:
        return
    _looked[folder, beginning] = now
    ages, user = [], getattr(os, "getuid", lambda: None)()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(beginning) and not entry.is_symlink():
                with contextlib.suppress(OSError):  # another process may take it away meanwhile
                    facts = entry.stat(follow_symlinks=False)
                    if user in (None, facts.st_uid):
                        ages.append((facts.st_mtime, entry.path))
    for changed, path in sorted(ages, reverse=True)[KEPT:]:
        if changed > now - KEPT_S:
            continue
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)
