"""Starting the process of a background session, as far as that goes without one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from guava_nb.errors import ClusterError, ConfigError
from guava_nb.notebook.background import background
from guava_nb.notebook.background.record import Record
from guava_nb.tunnels.records import began_at

LIVES = Record(os.getpid(), began_at(psutil.Process()), 0.0, "connection.json")


def test_one_that_another_notebook_has_just_started_is_taken(tmp_path: Path) -> None:
    LIVES.write(path := tmp_path / "lesson.background")
    assert background._started(path, 1.0) == (LIVES, False)


def test_a_disk_without_room_is_told_before_it_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(background, "write_private", full)
    with pytest.raises(ConfigError, match="No space left on device.*make room there, or set XDG_STATE_HOME"):
        background._started(tmp_path / "lesson.background", 1.0)


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize(("name", "is_over"), [("guava_up", True), ("guava_status", False)])
def test_up_lets_go_of_a_process_that_was_killed(
    name: str, is_over: bool, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = background.Background(None, lambda: SimpleNamespace(is_open=False))  # type: ignore[arg-type, return-value]
    gone, found = SimpleNamespace(record=SimpleNamespace(lives=is_listed), close=lambda: None), []

    def ask(question: str, shown: bool) -> None:
        gone.record.lives = False  # it was killed a moment ago
        raise ClusterError("the process has ended")

    gone.ask = ask
    made._connection = gone  # type: ignore[assignment]
    monkeypatch.setattr(made, "_find", lambda *words: found.append(words))
    args: Any = SimpleNamespace(background=True, idle_limit=None)
    assert made.takes(name, args) != is_over and bool(found) == is_over
