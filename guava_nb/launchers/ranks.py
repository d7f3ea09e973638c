"""The other ranks of a `guava run --orchestrate` as the workers of its session: they are here already, and are told the code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

from guava_nb.launchers.board import Board
from guava_nb.launchers.launcher import Launcher, Order
from guava_nb.protocol.joincode import JoinCode

__all__ = ["RanksLauncher", "beating", "code_for_rank"]

#: What rank 0 leaves on the board: where its session is, and that it lives.
CODE, BEAT = "code", "beat"
BEAT_S, LOOK_S = 5.0, 0.5


class RanksLauncher(Launcher):
    """Leaves the code of rank 0's session where the other ranks look.

    Args:
        board: of all ranks.
        count: of the other ranks.
    """

    name = "ranks"
    needs_address: ClassVar = False  # `guava run` has the session listen where they reach it

    def __init__(self, board: Board, count: int) -> None:
        super().__init__("")
        self._board, self.count = board, count

    def check(self) -> None:
        """They run already."""

    def start(self, order: Order) -> str:
        """Leave the code."""
        self.follow(order.code)
        return f"the other {self.count} ranks join"

    def follow(self, code: JoinCode) -> None:
        """Leave another code."""
        self._board.put(CODE, code.encode())

    def end(self) -> str:
        """This session is over; the ranks wait for the next one, or for rank 0's end."""
        self._board.put(CODE, "-")
        return ""


class beating:  # noqa: N801 - it is read as a word: with beating(board)
    """Rank 0 shows in the block that it lives; after it nothing is left on the board."""

    def __init__(self, board: Board) -> None:
        self._board, self._ended = board, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="guava-beat", daemon=True)

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            self._board.put(BEAT, str(count))
            if self._ended.wait(BEAT_S):
                return

    def __enter__(self) -> None:
        """Begin; a rank that finds a code finds the first beat, too."""
        self._board.put(BEAT, "0")
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        """End; the other ranks see it."""
        self._ended.set()
        self._thread.join()
        self._board.close()


def code_for_rank(
    board: Board,
    before: str,
    limit_s: float,
    is_ending: Callable[[], bool] = lambda: False,
    has_met: bool = False,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait until rank 0 leaves the code of another session than `before`; None: it has ended.

    Args:
        clock, pause: monotonic seconds, and a sleep; for tests.
        board: where rank 0 leaves it.
        before: code of the session before; "": none.
        limit_s: without a sign of life from rank 0, it counts as ended.
        is_ending: asked again and again; True ends the wait.
        has_met: this rank was in a session of rank 0, so a board without a beat means that rank 0 has ended, not that it is
            still to come: it can end between two waits.
    """
    last, at, seen = "", clock(), has_met
    while not is_ending():
        code, beat = board.get(CODE), board.get(BEAT)
        if code not in (None, "-", before):
            return code
        if beat is None and seen:
            return None
        if beat is not None and beat != last:
            last, at, seen = beat, clock(), True
        if clock() - at > limit_s:
            return None
        pause(LOOK_S)
    return None
