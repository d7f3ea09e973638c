"""All that keeps state makes its folders with mode 0700, closes those that were left open, and believes no other user."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from guava_nb.cluster.diary import Diary
from guava_nb.cluster.session_file import SessionFile
from guava_nb.config.state_folder import state_folder
from guava_nb.errors import ConfigError
from guava_nb.launchers.board import FolderBoard
from guava_nb.launchers.docker import DockerLauncher
from guava_nb.launchers.launcher import Order
from guava_nb.notebook.background.record import Record
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Tree
from guava_nb.worker.saving.state_files import SavedRecord, StateFiles

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner and no mode here")


def session() -> None:
    SessionFile.take(state_folder() / "session-1.json").release(forget=True)


def ranks() -> None:
    FolderBoard(state_folder() / "ranks" / "job").begin()


def states() -> None:
    StateFiles(state_folder() / "states", "s").write(SavedRecord("run", 1, "", 1, 1, Tree(b"", ())), [memoryview(b"x")])


def launched() -> None:
    order = Order(JoinCode("127.0.0.1", 1, bytes(16), bytes(16)), True, 1, state_folder() / "launched")
    DockerLauncher("1").leave_code(order)


def diary() -> None:
    Diary(lambda: state_folder() / "session-1.diary.txt", "s").add("a sentence")


def background() -> None:
    Record(1, 1.0, 1.0, "").write(state_folder() / "session-1.background")


KEEPERS = (session, ranks, states, launched, diary, background)


@pytest.fixture(autouse=True)
def _shared_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize("before", ["nothing", "an open folder"])
def test_no_folder_of_ours_is_open(keep: Callable[[], None], before: str, tmp_path: Path) -> None:
    if before != "nothing":
        state_folder().mkdir(parents=True)
    keep()
    folders = [state_folder(), *(path for path in state_folder().rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    open_ = [path for path in state_folder().rglob("*") if path.suffix != ".lock" and path.stat().st_mode & 0o077]
    assert not open_


@pytest.mark.parametrize("keep", KEEPERS)
def test_nothing_is_kept_in_a_folder_of_another_user(keep: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    state_folder().mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: state_folder().stat().st_uid + 1)
    if keep is diary:
        keep()  # it is not worth an error
    else:
        with pytest.raises((ConfigError, PermissionError), match="another user owns it"):
            keep()
    assert not list(state_folder().iterdir())
