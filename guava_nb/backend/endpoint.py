"""This process's end of the relay: routes what comes to groups and to those who asked the store, watches deadlines.

One per session. Knows messages and threads; knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from guava_nb.backend.group_member import GroupMember
from guava_nb.errors import CollectiveError, CollectiveTimeout, GroupBroken, GuavaError
from guava_nb.protocol.messages import (
    GroupEnded,
    LeaveGroup,
    Message,
    OperationFailed,
    Parcel,
    Piece,
    StoreAsk,
    StoreReply,
    Taken,
)

__all__ = ["Endpoint"]

_IDLE_S = 3600.0


class _Question:
    """One ask of the store on its way."""

    def __init__(self) -> None:
        self.reply: StoreReply | None = None
        self.error: GuavaError | None = None
        self.answered = threading.Event()


class Endpoint:
    """The client of a hub's relay.

    Args:
        send: queues a message with its payload for the hub; must never block, may be called from any thread.
        member: name of this process, for sentences on the other ranks.
    """

    def __init__(self, send: Callable[[Message, Sequence[memoryview]], None], member: str) -> None:
        """Nothing is sent until a group is opened or the store is asked."""
        self.member = member
        self._send = send
        self._lock = threading.Lock()
        self._circles: dict[str, GroupMember] = {}
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._closed: GuavaError | None = None
        self._wake = threading.Condition()
        self._wake_at = 0.0
        self._watchdog: threading.Thread | None = None

    # -------------------------------------------------------------------------------------------- called by its owner

    def post(self, message: Message, payload: memoryview | bytes, done: Callable[[], None]) -> bool:
        """Take a message of the session, in the reader thread that brings it.

        Args:
            message, payload: as they came; the payload is valid until `done`.
            done: tells the session that the message is consumed.

        Returns:
            True when it was for the endpoint; `done` has been called then.
        """
        if isinstance(message, (Piece, Parcel, Taken, OperationFailed, GroupEnded, LeaveGroup)):
            done()  # first: once the last piece is in place, the thread that waits for it wants the processor
            circle = self._circles.get(message.group)
            if circle is not None:  # else of a group that was destroyed here
                circle.post(message, payload)
            return True
        if isinstance(message, StoreReply):
            question = self._questions.pop(message.request_id, None)
            if question is not None:
                question.reply = message
                question.answered.set()
            done()
            return True
        return False

    def closed(self, cause: GuavaError) -> None:
        """The session is over: everything pending and everything to come fails."""
        self._closed = self._closed or cause
        self.break_groups(f"the session with the hub is over: {cause}")
        with self._wake:
            self._wake.notify()

    def reopened(self) -> None:
        """Another session has followed: groups can be opened over it."""
        self._closed = None

    def break_groups(self, reason: str) -> None:
        """Fail all groups that are open here, and wake whatever is blocked in them or in their store; any thread."""
        with self._lock:
            circles = list(self._circles.values())
            questions, self._questions = self._questions, {}
        for circle in circles:
            circle.end(GroupBroken(f"group {circle.name!r} is broken: {reason}"))
        for question in questions.values():
            question.error = GroupBroken(reason)
            question.answered.set()

    # ------------------------------------------------------------------------------------------------------ for groups

    def open_group(self, name: str, rank: int, members: Sequence[str]) -> GroupMember:
        """Become a rank of a group.

        Args:
            name: of the group at the hub; a new one for every generation.
            rank: of this process, from 0.
            members: a name for each rank, for errors.

        Raises:
            GroupBroken: the session is over.
            CollectiveError: this process is a member of a group of that name already.
        """
        self._check_open()
        with self._lock:
            if name in self._circles:
                raise CollectiveError(f"group {name!r} is open in this process; destroy it before it is made again")
            circle = self._circles[name] = GroupMember(name, rank, members, self._send)
        circle.open()  # not before it is known here: the answer may come before this returns
        if self._closed is not None:  # it closed meanwhile, and may not have seen this one
            circle.end(GroupBroken(f"the session with the hub is over: {self._closed}"))
        return circle

    def close_group(self, circle: GroupMember) -> None:
        """Leave a group."""
        with contextlib.suppress(GuavaError):  # the session may be over
            circle.leave()
        with self._lock:
            if self._circles.get(circle.name) is circle:
                del self._circles[circle.name]

    def watch(self, deadline: float) -> None:
        """See to it that operations are looked at when this time (monotonic seconds) has come."""
        if deadline >= self._wake_at and self._watchdog is not None:
            return
        with self._wake:
            self._wake_at = min(self._wake_at, deadline) if self._watchdog is not None else deadline
            self._wake.notify()
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._watch, name="guava-deadlines", daemon=True)
                self._watchdog.start()

    def _watch(self) -> None:
        while self._closed is None:
            with self._wake:
                left_s = self._wake_at - time.monotonic()
                if left_s > 0:
                    self._wake.wait(left_s)
                    continue
                self._wake_at = time.monotonic() + _IDLE_S
            with self._lock:
                circles = list(self._circles.values())
            for circle in circles:
                circle.check_deadlines(time.monotonic())
            for circle in circles:
                deadline = circle.next_deadline()
                if deadline is not None:
                    self.watch(deadline)

    # --------------------------------------------------------------------------------------------------- for the store

    def ask(
        self,
        op: str,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        number: int = 0,
        timeout_s: float = 300.0,
    ) -> StoreReply:
        """Ask the store and wait for its answer.

        Args:
            op: what to do, as in `StoreAsk`.
            keys, values: what to do it with.
            number: as in `StoreAsk`.
            timeout_s: seconds to wait for the answer.

        Raises:
            CollectiveTimeout: the keys were not set in time, or the hub did not answer.
            GroupBroken: the groups were broken meanwhile, or the session is over.
            CollectiveError: the store cannot do it.
        """
        self._check_open()
        question, request_id = _Question(), next(self._numbers)
        with self._lock:
            self._questions[request_id] = question
        self._check_open()  # the thread that closes it sees either this question or none
        self._send(StoreAsk(request_id, op, tuple(keys), tuple(values), number), ())
        if not question.answered.wait(timeout_s):
            with self._lock:
                self._questions.pop(request_id, None)
            self._send(StoreAsk(next(self._numbers), "cancel", number=request_id), ())
            raise CollectiveTimeout(f"waited {timeout_s:g} s for the store to {op} {_names(keys)}: no rank has set it")
        if question.error is not None:
            raise question.error
        assert question.reply is not None
        if question.reply.problem:
            raise CollectiveError(question.reply.problem)
        return question.reply

    def _check_open(self) -> None:
        if self._closed is not None:
            raise GroupBroken(f"the session with the hub is over: {self._closed}")


def _names(keys: Sequence[Any]) -> str:
    shown = ", ".join(repr(key) for key in keys[:5])
    return shown + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
