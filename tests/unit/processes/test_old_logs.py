from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb.processes import old_logs
from guava_nb.processes.old_logs import KEPT_S, LOOKS_AGAIN_S, forget_old


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
    (tmp_path / "other").touch()
    os.utime(tmp_path / "other", (now, now - 9 * KEPT_S))
    forget_old(tmp_path, "session-")
    assert {path.name for path in tmp_path.iterdir()} == {"session-quiet", "session-old", "session-link", "other"}


def test_a_folder_is_looked_through_once_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_logs, "KEPT", 0)
    now = time.time()
    monkeypatch.setattr(old_logs.time, "time", lambda: now)

    def stays() -> bool:
        (tmp_path / "session-old").touch()
        os.utime(tmp_path / "session-old", (now, now - 2 * KEPT_S))
        forget_old(tmp_path, "session-")
        return (tmp_path / "session-old").exists()

    seen = [stays(), stays()]
    now += LOOKS_AGAIN_S
    assert [*seen, stays()] == [False, True, False]


def test_what_is_gone_already_and_a_folder_that_never_was_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_logs, "KEPT", 0)
    for name in ("session-gone", "session-old"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    scan = os.scandir

    @contextlib.contextmanager
    def another_takes_one_away(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scan(folder) as entries:
            found = list(entries)
        (tmp_path / "session-gone").unlink()
        yield found

    monkeypatch.setattr(old_logs.os, "scandir", another_takes_one_away)
    forget_old(tmp_path, "session-")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    forget_old(tmp_path / "never was", "session-")
