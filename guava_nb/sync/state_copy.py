"""A state on its way to the orchestrator while jobs come and go: asked for once, taken whenever it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.codec import Resolve, unpack
from guava_nb.errors import RemoteProtocolError
from guava_nb.protocol.messages import Failure, FetchState, Message, SavedState, SaveState, State

__all__ = ["COMING_BYTES", "StateCopy", "received_bytes", "state_in"]

#: What must have come in the time that is waited, so that it is waited once more: heartbeats alone are less.
COMING_BYTES = 1 << 18


def received_bytes(cluster: Cluster, ranks: Iterable[int]) -> int:
    """Return the bytes that came from these members so far."""
    return sum(cluster.seats.total_bytes(rank)[1] for rank in ranks)


def state_in(message: State, payload: memoryview, resolve: Resolve | None) -> dict[str, Any]:
    """Return the state that a worker sent, as views of the bytes that came.

    Args:
        message: with the record of the state.
        payload: its bytes, which the tensors go on using.
        resolve: finds classes of the user's cells; None looks none up.

    Raises:
        RemoteProtocolError: it sent something else.
    """
    state = unpack(message.state, payload, resolve)
    if not isinstance(state, dict):
        raise RemoteProtocolError(f"it is a {type(state).__name__} and no state")
    return state


class StateCopy:
    """The state after one step, which workers were asked for outside of any job. Thread-safe.

    Args:
        run_id: of the run whose state it is.
        step: after which it is taken; a worker that has gone on has it no more.
        requests: numbers of the questions, and who is asked for which.
        resolve: finds the classes that may come in it.
        ticks: of its schedule; a worker whose schedule has had the next one has this state no more either.
        save: what the worker shall do with it; None: it only comes here.
        whole: it comes here; else only what `save` sends of it.

    Attributes:
        step: as above.
        ranks: workers that hold it, or the parts of it.
        requests, save, whole: as above.
    """

    def __init__(
        self, run_id: str, step: int, requests: Mapping[int, int], resolve: Resolve | None, ticks: int = 0,
        save: SaveState | None = None, whole: bool = True,
    ) -> None:  # fmt: skip
        """Ask for nothing yet."""
        self.step, self.save, self.whole = step, save and replace(save, step=step), whole
        self.ranks: Sequence[int] = list(requests.values())
        self._run_id, self.requests, self._resolve, self._ticks = run_id, dict(requests), resolve, ticks
        self._came: dict[int, tuple[State, memoryview]] = {}
        self._over, self._failed = threading.Event(), False

    def ask(self, cluster: Cluster) -> None:
        """Ask the workers; the answers are taken whatever job is at work then."""
        cluster.takes = self.take
        for question, rank in self.questions():
            cluster.send(rank, question)

    def questions(self) -> Iterator[tuple[FetchState, int]]:
        """Yield what is asked, and whom."""
        for request, rank in self.requests.items():
            yield FetchState(request, self._run_id, self.whole, self.whole, self._ticks, self.save), rank

    def take(self, rank: int, message: Message, payload: memoryview) -> bool:
        """Take an answer; returns whether it was one to this question. Called from reader threads.

        Args:
            rank: of the sender.
            message, payload: what it sent.
        """
        if not isinstance(message, State | Failure) or message.run_id != self._run_id:
            return False
        if self.requests.get(message.request_id) != rank or message.request_id in self._came:
            return False
        if isinstance(message, Failure) or (message.step, message.ticks) != (self.step, self._ticks):
            self._failed = True
        else:
            self._came[message.request_id] = message, payload
        if self._failed or len(self._came) == len(self.requests):
            self._over.set()
        return True

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here."""
        return self._over.is_set() and not self._failed

    @property
    def saved(self) -> SavedState | None:
        """What came of `save`, by the first answer."""
        return next((message.saved for message, _ in self._came.values()), None)

    @property
    def nbytes(self) -> int:
        """Bytes of what has come."""
        return sum(len(payload) for _, payload in self._came.values())

    @property
    def ticks(self) -> int:
        """Those of its schedule."""
        return self._ticks

    def is_over(self, lost: Callable[[int], bool]) -> bool:
        """Whether it is here, or cannot come any more: `lost` says of a worker that it is gone."""
        missing = [rank for request, rank in self.requests.items() if request not in self._came]
        return self._over.is_set() or any(map(lost, missing))

    def wait(self, cluster: Cluster, timeout_s: float) -> bool:
        """Wait until it is here; as long as it comes, the time begins anew.

        Returns:
            Whether it is here.
        """
        alive, seen, since = cluster.roster.alive, received_bytes(cluster, self.ranks), time.monotonic()
        while not self._over.wait(0.1):
            if self.is_over(lambda rank: rank not in alive()):
                break
            if received_bytes(cluster, self.ranks) > seen + COMING_BYTES:
                seen, since = received_bytes(cluster, self.ranks), time.monotonic()
            elif time.monotonic() > since + timeout_s:
                break
        return self.is_whole

    def parts(self) -> list[dict[str, Any]]:
        """Return what came, in the order of `ranks`: views of the bytes that came, not to be changed."""
        came = [self._came[request] for request in self.requests]
        return [state_in(message, payload, self._resolve) for message, payload in came]
