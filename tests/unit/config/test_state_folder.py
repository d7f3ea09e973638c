"""State of the user lies where the system's rules want it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb.config.state_folder import (
    OTHERS_WRITE,
    make_private_folder,
    not_private,
    private_temporary_folder,
    read_private,
    state_folder,
    sync_folder,
)
from guava_nb.errors import ConfigError

POSIX = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner and no mode here")


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


@pytest.fixture
def _shared_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """State of a user whose umask lets a group write."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@POSIX
@pytest.mark.usefixtures("_shared_group")
def test_each_folder_that_is_made_is_of_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    make_private_folder(state_folder() / "ranks" / "job")
    make_private_folder(tmp_path / "elsewhere" / "deep")
    made = [tmp_path / "state", state_folder(), state_folder() / "ranks", state_folder() / "ranks" / "job"]
    assert {mode(path) for path in (*made, tmp_path / "elsewhere", tmp_path / "elsewhere" / "deep")} == {0o700}


@POSIX
@pytest.mark.usefixtures("_shared_group")
def test_a_folder_of_ours_that_is_open_is_closed_and_no_other_one(tmp_path: Path) -> None:
    (state_folder() / "states").mkdir(parents=True)
    make_private_folder(state_folder() / "states")
    assert (mode(state_folder()), mode(state_folder() / "states"), mode(tmp_path / "state")) == (0o700, 0o700, 0o775)
    (tmp_path / "project").mkdir()
    make_private_folder(tmp_path / "project")
    assert mode(tmp_path / "project") == 0o775


@POSIX
def test_a_folder_of_ours_among_temporary_files_is_ours_alone_or_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "guava_nb-session-x" / "deep"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    make_private_folder(folder)
    assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)
    (tmp_path / "project").mkdir(mode=0o755)
    make_private_folder(tmp_path / "project")
    assert mode(tmp_path / "project") == 0o755, "a folder with another name is not ours"
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user owns it"):
        make_private_folder(folder.parent)


@POSIX
@pytest.mark.usefixtures("_shared_group")
def test_a_folder_of_another_user_or_one_that_stays_open_or_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_private_folder(state_folder())
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: state_folder().stat().st_uid + 1)
        with pytest.raises(PermissionError, match="another user owns it"):
            make_private_folder(state_folder() / "states")
    state_folder().chmod(0o770)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", lambda self, mode: None)  # as on a drive without modes
        with pytest.raises(PermissionError, match="other users may open it, whatever its mode"):
            make_private_folder(state_folder())
    (state_folder() / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_private_folder(state_folder() / "file")


@POSIX
def test_a_file_that_another_user_may_have_written_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    assert not_private(path) == ""
    path.write_bytes(b"mine")
    link.symlink_to(path)
    for bits, all_of_it, writing in (
        (0o600, "", ""),
        (0o644, "may read it", ""),
        (0o662, "may write it", "may write it"),
    ):
        path.chmod(bits)
        for one in (path, link):
            assert not_private(one).endswith(all_of_it) and not_private(one, OTHERS_WRITE).endswith(writing)
            assert bool(not_private(one)) == bool(all_of_it) and bool(not_private(one, OTHERS_WRITE)) == bool(writing)
            if writing:
                with pytest.raises(PermissionError, match="other users may write it"):
                    read_private(one)
            else:
                assert read_private(one) == b"mine"
    path.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert not_private(path) == "another user owns it"
    with pytest.raises(PermissionError, match="another user owns it"):
        read_private(path)


@POSIX
def test_what_is_no_file_is_not_read_and_keeps_no_reader_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(PermissionError, match="no plain file"):
        read_private(tmp_path / "pipe")
