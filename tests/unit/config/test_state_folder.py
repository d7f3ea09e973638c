"""State of the user lies where the system's rules want it."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.config.state_folder import state_folder, sync_folder


def test_state_lies_where_the_user_keeps_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "guava_nb"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local" / "state" / "guava_nb"


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    sync_folder(tmp_path / "not-there")
