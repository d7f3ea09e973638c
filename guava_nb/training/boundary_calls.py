"""Calls that other threads want done between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from guava_nb.errors import GuavaError

__all__ = ["BoundaryCalls"]

Asked = tuple[Callable[[], None], "Future[None]"]


class BoundaryCalls:
    """A queue of calls, each with a future that its asker may wait for. Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._asked: deque[Asked] = deque()

    def __bool__(self) -> bool:
        """Whether somebody asked."""
        return bool(self._asked)

    def ask(self, call: Callable[[], None]) -> Future[None]:
        """Queue a call."""
        future: Future[None] = Future()
        self._asked.append((call, future))
        return future

    def answer(self) -> None:
        """Do everything that was asked; an error belongs to whoever asked."""
        while (asked := self._next()) is not None:
            call, future = asked
            try:
                call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def refuse(self, error: GuavaError) -> None:
        """Fail everything that was asked."""
        while (asked := self._next()) is not None:
            asked[1].set_exception(error)

    def _next(self) -> Asked | None:
        try:
            return self._asked.popleft()
        except IndexError:  # none is left; another thread may have taken the last one just now
            return None
