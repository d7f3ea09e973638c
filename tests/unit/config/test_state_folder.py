"""State of the user lies where the system's rules want it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from guava_nb.config.state_folder import private_temporary_folder, state_folder, sync_folder
from guava_nb.errors import ConfigError


def test_state_lies_where_the_user_keeps_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "guava_nb"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local" / "state" / "guava_nb"


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    sync_folder(tmp_path / "not-there")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no owner here")
def test_a_folder_that_another_user_could_write_to_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_temporary_folder("kept")
    assert folder == private_temporary_folder("kept") == tmp_path / f"kept-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="open to other users or not yours: remove it"):
        private_temporary_folder("kept")
    (tmp_path / f"linked-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not yours"):
        private_temporary_folder("linked")
    (tmp_path / f"file-{os.getuid()}").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        private_temporary_folder("file")
