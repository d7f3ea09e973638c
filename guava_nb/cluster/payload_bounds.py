"""The most payload bytes that a message of a worker may bring: those of what it was asked for. Pure, thread-safe.

A payload is received into memory that is taken as soon as its length is announced, and compressed it may cost its sender
nothing. So the length is held against the question, before memory is taken.
"""

from __future__ import annotations

import threading
from collections import Counter

from guava_nb.protocol.messages import (
    BatchShard,
    CodeRan,
    CodeValues,
    Evaluate,
    Evaluated,
    FetchState,
    GradientBucket,
    Message,
    Parcel,
    Piece,
    Predict,
    Predicted,
    RowList,
    RunCode,
    State,
)

__all__ = ["PayloadBounds"]

#: What answers what. A gradient has many messages, all others one.
_ANSWERS: dict[type[Message], type[Message]] = {
    FetchState: State,
    Evaluate: Evaluated,
    Predict: Predicted,
    BatchShard: GradientBucket,
}
#: A state may be so many times the model (Adam's is 3, L-BFGS keeps tens of gradients), a gradient bucket too (in float64).
_STATES, _GRADIENTS = 64, 8
#: Whatever the model, this much is allowed: of a state, a bucket, one batch's predictions; of a part of a collective, of a list.
_LEAST_BYTES, _ANSWER_BYTES, _PART_BYTES = 1 << 30, 4 << 30, 64 << 20


class PayloadBounds:
    """What each worker was asked, and how large the answer may be."""

    def __init__(self) -> None:
        """Nothing was asked."""
        self._owed: Counter[tuple[int, type[Message]]] = Counter()
        self._model_bytes = 0
        self._code: dict[
            tuple[int, int], int
        ] = {}  # rank and request of code that runs, and the most bytes it may bring
        self._access = threading.Lock()

    def expect_model(self, model_bytes: int) -> None:
        """Take note of the parameters and buffers of a run's model, in bytes."""
        self._model_bytes = max(self._model_bytes, model_bytes)

    def sent(self, rank: int, message: Message) -> None:
        """A worker was sent this."""
        if isinstance(message, RunCode):
            self._code[rank, message.request_id] = message.most_bytes
        if (answer := _ANSWERS.get(type(message))) is not None:
            with self._access:
                self._owed[rank, answer] += 1

    def came(self, rank: int, message: Message) -> None:
        """A worker answered with this."""
        if isinstance(message, CodeValues) or (isinstance(message, CodeRan) and message.nbytes < 0):
            self._code.pop((rank, message.request_id), None)
        if isinstance(message, State | Evaluated | Predicted):
            with self._access:
                self._owed[rank, type(message)] -= 1

    def forget(self, rank: int) -> None:
        """A worker is long gone."""
        with self._access:
            self._owed = Counter({key: count for key, count in self._owed.items() if key[0] != rank})
            self._code = {key: most_bytes for key, most_bytes in self._code.items() if key[0] != rank}

    def most_bytes(self, rank: int | None, message: Message) -> int:
        """Return the most payload bytes that may come with this record; `rank` is None for a session that is no worker's."""
        kind = type(message)
        if kind in (Piece, Parcel):
            return _PART_BYTES
        if isinstance(message, CodeValues):
            return 0 if rank is None else self._code.get((rank, message.request_id), 0)
        if rank is None or (kind in _ANSWERS.values() and self._owed[rank, kind] <= 0):
            return 0
        if kind is State:
            return max(_LEAST_BYTES, _STATES * self._model_bytes)
        if kind is GradientBucket:
            return max(_LEAST_BYTES, _GRADIENTS * self._model_bytes)
        return _ANSWER_BYTES if kind in (Evaluated, Predicted, RowList) else _PART_BYTES
