"""Tells the tokens of prompts in work as they come, and ends what is not waited for any more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from guava_nb.protocol.messages import Generated, GivenUp, Message, Predict
from guava_nb.replica.model.generate import each_token_to

__all__ = ["NobodyWaits", "TokenTeller"]

#: Seconds between two messages about one prompt: each has the tokens that came meanwhile.
TELL_S = 0.05
_MOST_GIVEN_UP = 256


class NobodyWaits(Exception):
    """The answer to the batch in work was given up by the orchestrator, or by this worker, which leaves."""


class TokenTeller:
    """For one worker's loop.

    Args:
        send: queues a message for the orchestrator; never blocks.
        is_leaving: whether this worker was asked to leave: another one continues the prompt, with the same tokens.
        clock: seconds.
    """

    def __init__(
        self,
        send: Callable[[Message, Sequence[memoryview]], None],
        is_leaving: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Tell nothing yet."""
        self._send, self._is_leaving, self._clock = send, is_leaving, clock
        self._given_up: deque[tuple[str, int]] = deque(maxlen=_MOST_GIVEN_UP)

    def post(self, message: Message) -> bool:
        """Take a message, in the thread that reads; returns True when it is for this alone."""
        if not isinstance(message, GivenUp):
            return False
        self._given_up.append((message.run_id, message.request_id))
        return True

    @contextmanager
    def during(self, message: Predict) -> Iterator[None]:
        """Tell the tokens that are made inside.

        Raises:
            NobodyWaits: the answer was given up; also in the middle of a prompt.
        """
        at, begin, made, told_s = -1, 0, list[int](), float("-inf")

        def tell() -> None:
            nonlocal begin, told_s
            if made and message.rows:  # a stand-in for another rank's batch has no rows of its own
                self._send(Generated(message.run_id, message.request_id, at, begin, tuple(made)), ())
            begin, told_s = begin + len(made), self._clock()
            made.clear()

        def take(number: int, token: int) -> None:
            nonlocal at, begin
            self._check(message)
            if number != at:
                made.clear()  # the answer has the rest of the prompt before
                at, begin = number, 0
            made.append(token)
            if self._clock() >= told_s + TELL_S:
                tell()

        self._check(message)
        with each_token_to(take):
            yield

    def _check(self, message: Predict) -> None:
        if self._is_leaving() or (message.run_id, message.request_id) in self._given_up:
            raise NobodyWaits
