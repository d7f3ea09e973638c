from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from guava_nb.processes import old_logs
from guava_nb.processes.old_logs import KEPT_S, forget_old


def test_the_newest_and_what_changed_lately_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_logs, "KEPT", 2)
    now = time.time()
    for name, age_s in {"old": 2, "older": 3, "oldest": 4, "quiet": 0.5}.items():
        folder = tmp_path / f"session-{name}"
        folder.mkdir()
        (folder / "diary.txt").write_text("what happened")
        os.utime(folder, (now, now - age_s * KEPT_S))
    (tmp_path / "session-log").write_text("lines")
    os.utime(tmp_path / "session-log", (now, now - 5 * KEPT_S))
    (tmp_path / "session-link").symlink_to(tmp_path / "session-oldest")
    forget_old(tmp_path.glob("session-*"))
    assert {path.name for path in tmp_path.iterdir()} == {"session-quiet", "session-old", "session-link"}


def test_what_is_gone_already_and_what_cannot_be_removed_is_no_error(tmp_path: Path) -> None:
    forget_old([tmp_path / "never was"])
