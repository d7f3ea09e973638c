"""The other ranks of a `guava run --orchestrate`: they wait for a code as long as rank 0 shows that it lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.launchers.board import FolderBoard
from guava_nb.launchers.launcher import Order
from guava_nb.launchers.ranks import BEAT, CODE, RanksLauncher, beating, code_for_rank
from guava_nb.protocol.joincode import JoinCode


@pytest.fixture
def board(tmp_path: Path) -> FolderBoard:
    made = FolderBoard(tmp_path / "job")
    made.begin()
    return made


class Clock:
    """Time that passes while somebody waits; `then` happens at a time."""

    def __init__(self) -> None:
        self.now, self.then = 0.0, dict[float, object]()

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.then if at <= self.now]:
            self.then.pop(at)()  # type: ignore[operator]


def waited(board: FolderBoard, before: str = "", **then: object) -> tuple[str | None, float]:
    clock = Clock()
    clock.then = {float(at[1:]): call for at, call in then.items()}
    return code_for_rank(board, before, 10.0, clock=clock, pause=clock.pause), clock.now


def test_each_session_of_the_script_is_joined_and_none_twice(board: FolderBoard, order: Order) -> None:
    launcher = RanksLauncher(board, 3)
    launcher.check()
    launcher.start(order)
    first = order.code.encode()
    assert waited(board) == (first, 0.0) and launcher.count == 3
    launcher.end()
    second = JoinCode.new("192.0.2.7", 4712)
    assert waited(board, first, t4=lambda: launcher.follow(second)) == (second.encode(), 4.0)


def test_a_sign_of_life_prolongs_the_wait_and_its_lack_ends_it(board: FolderBoard) -> None:
    assert waited(board) == (None, 10.5)
    beats = {f"t{at}": (lambda at=at: board.put(BEAT, str(at))) for at in (4, 8, 12)}
    found, at = waited(board, **beats)
    assert found is None and at == pytest.approx(22.5)


def test_rank_0s_end_ends_the_wait_at_once(board: FolderBoard) -> None:
    board.put(BEAT, "1")
    assert waited(board, t3=board.close) == (None, 3.0)
    assert code_for_rank(board, "", 10.0, is_ending=lambda: True) is None


def test_a_rank_0_that_ended_between_two_waits_is_not_waited_for(board: FolderBoard) -> None:
    clock = Clock()
    board.close()
    assert code_for_rank(board, "a code", 10.0, has_met=True, clock=clock, pause=clock.pause) is None
    assert clock.now == 0.0


def test_what_beats_leaves_nothing(board: FolderBoard) -> None:
    with beating(board):
        assert board.get(BEAT) is not None, "before anything that the block leaves"
        board.put(CODE, "x")
    assert not board.folder.exists()
