"""State of the user lies where the system's rules want it."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.config.state_folder import state_folder


def test_state_lies_where_the_user_keeps_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "guava_nb"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local" / "state" / "guava_nb"
