"""Both kinds of board: what rank 0 leaves is what the others find, and nothing is left."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from torch.distributed import HashStore

from guava_nb.errors import ConfigError
from guava_nb.launchers.board import Board, FolderBoard, StoreBoard


@pytest.fixture(params=["folder", "store"])
def boards(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Board, Board]:
    """Rank 0's and another one's."""
    if request.param == "store":
        store = HashStore()
        return StoreBoard(store), StoreBoard(store)
    first = FolderBoard(tmp_path / "job")
    first.begin()
    return first, FolderBoard(tmp_path / "job")


def test_the_last_text_counts_and_none_is_left(boards: tuple[Board, Board]) -> None:
    first, other = boards
    assert other.get("code") is None
    first.put("code", "one")
    first.put("code", "two")
    first.put("beat", "1")
    assert (other.get("code"), other.get("beat")) == ("two", "1")
    first.close()
    first.close()
    assert (other.get("code"), other.get("beat")) == (None, None)


def test_a_folder_is_of_its_user_alone_and_begins_empty(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir(mode=0o755)
    (tmp_path / "job" / "code").write_text("of a job of this number that was killed")
    board = FolderBoard(tmp_path / "job")
    board.begin()
    assert board.get("code") is None
    board.put("code", "secret")
    assert stat.S_IMODE((tmp_path / "job").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "job" / "code").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_STATE_HOME"):
        FolderBoard(tmp_path / "file" / "job").begin()
