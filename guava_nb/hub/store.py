"""The shared keys of process groups: a table, and those who wait for a key.

Pure: asks in, answers out; no clock, no lock, no session. Who waits decides how long: it sends "cancel" when it has
waited enough. Values are bytes and are never looked into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from guava_nb.protocol.messages import StoreAsk, StoreReply

__all__ = ["StoreTable"]

Answers = list[tuple[bytes, StoreReply]]


@dataclass(frozen=True)
class _Waiter:
    client: bytes
    ask: StoreAsk


class StoreTable:
    """Keys and values of one hub.

    A client is the id of a session; answers name it.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: list[_Waiter] = []
        self._lent: dict[str, bytes] = {}  # key to the client whose end takes it away
        self._handlers: dict[str, Callable[[StoreAsk], StoreReply | None]] = {
            "set": self._set,
            "multi_set": self._set,
            "lend": self._set,
            "claim": self._claim,
            "get": self._get,
            "multi_get": self._get,
            "wait": self._wait,
            "add": self._add,
            "compare_set": self._compare_set,
            "check": self._check,
            "delete": self._delete,
            "num_keys": self._num_keys,
            "list_keys": self._list_keys,
            "append": self._append,
            "queue_push": self._queue_push,
            "queue_pop": self._queue_pop,
            "queue_len": self._queue_len,
            "forget": self._forget,
        }

    def ask(self, client: bytes, ask: StoreAsk) -> Answers:
        """Do what is asked.

        Returns:
            Whom to answer what: nobody yet if the client has to wait, and those whose wait this has ended.
        """
        if ask.op == "cancel":
            self._drop(lambda waiter: waiter.client == client and waiter.ask.request_id == ask.number)
            return []
        if ask.op == "lend" or (ask.op == "claim" and ask.keys[0] not in self._values):
            self._lent.update(dict.fromkeys(ask.keys, client))
        elif ask.op == "set":  # and is lent no more
            for key in ask.keys:
                self._lent.pop(key, None)
        handler = self._handlers.get(ask.op)
        if handler is None:
            return [(client, StoreReply(ask.request_id, problem=f"the store has no operation {ask.op[:40]!r}"))]
        try:
            reply = handler(ask)
        except (IndexError, ValueError) as problem:
            reply = StoreReply(ask.request_id, problem=f"the store cannot {ask.op} {list(ask.keys)[:3]}: {problem}")
        if reply is None:
            self._waiting.append(_Waiter(client, ask))
            return []
        return [(client, reply), *self._wake()]

    def lost(self, client: bytes) -> None:
        """The client is gone and waits for nothing any more; what it has set stays, what it has lent goes with it."""
        self._drop(lambda waiter: waiter.client == client)
        for key in [key for key, owner in self._lent.items() if owner == client]:
            del self._lent[key]
            self._values.pop(key, None)

    def forget(self, prefix: str) -> None:
        """Drop every key and queue that begins so."""
        for table in (self._values, self._queues):
            for key in [key for key in table if key.startswith(prefix)]:
                del table[key]

    def __len__(self) -> int:
        return len(self._values) + len(self._queues)

    # ------------------------------------------------------------------------------------------------------- operations

    def _set(self, ask: StoreAsk) -> StoreReply:
        self._values.update(zip(ask.keys, ask.values, strict=True))
        return StoreReply(ask.request_id)

    def _claim(self, ask: StoreAsk) -> StoreReply:
        """Lend the key if it is free; gives the value that holds then."""
        return StoreReply(ask.request_id, (self._values.setdefault(ask.keys[0], ask.values[0]),))

    def _get(self, ask: StoreAsk) -> StoreReply | None:
        if any(key not in self._values for key in ask.keys):
            return None
        return StoreReply(ask.request_id, tuple(self._values[key] for key in ask.keys))

    def _wait(self, ask: StoreAsk) -> StoreReply | None:
        return None if any(key not in self._values for key in ask.keys) else StoreReply(ask.request_id)

    def _add(self, ask: StoreAsk) -> StoreReply:
        total = int(self._values.get(ask.keys[0], b"0")) + ask.number
        self._values[ask.keys[0]] = str(total).encode()
        return StoreReply(ask.request_id, number=total)

    def _compare_set(self, ask: StoreAsk) -> StoreReply:
        key, (expected, wanted) = ask.keys[0], ask.values
        current = self._values.get(key)
        # As torch's own stores: an absent key is set only when nothing was expected, else the expectation comes back.
        if current == expected or (current is None and not expected):
            current = self._values[key] = wanted
        return StoreReply(ask.request_id, (expected if current is None else current,))

    def _check(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=int(all(key in self._values for key in ask.keys)))

    def _delete(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=int(self._values.pop(ask.keys[0], None) is not None))

    def _num_keys(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=sum(key.startswith(ask.keys[0]) for key in self._values))

    def _list_keys(self, ask: StoreAsk) -> StoreReply:
        found = sorted(key for key in self._values if key.startswith(ask.keys[0]))
        return StoreReply(ask.request_id, tuple(key.encode() for key in found))

    def _append(self, ask: StoreAsk) -> StoreReply:
        key = ask.keys[0]
        self._values[key] = self._values.get(key, b"") + ask.values[0]
        return StoreReply(ask.request_id)

    def _queue_push(self, ask: StoreAsk) -> StoreReply:
        self._queues.setdefault(ask.keys[0], deque()).append(ask.values[0])
        return StoreReply(ask.request_id)

    def _queue_pop(self, ask: StoreAsk) -> StoreReply | None:
        key = ask.keys[0]
        queue = self._queues.get(key)
        if queue is None:
            return None if ask.number else StoreReply(ask.request_id, problem=f"the queue {key!r} is empty")
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return StoreReply(ask.request_id, (value,))

    def _queue_len(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=len(self._queues.get(ask.keys[0], ())))

    def _forget(self, ask: StoreAsk) -> StoreReply:
        self.forget(ask.keys[0])
        return StoreReply(ask.request_id)

    # ---------------------------------------------------------------------------------------------------------- waiting

    def _wake(self) -> Answers:
        """Answer, in the order in which they came, those whose wait is over."""
        answers: Answers = []
        still: list[_Waiter] = []
        for waiter in self._waiting:
            reply = self._handlers[waiter.ask.op](waiter.ask)
            if reply is None:
                still.append(waiter)
            else:
                answers.append((waiter.client, reply))
        self._waiting = still
        return answers

    def _drop(self, unwanted: Callable[[_Waiter], bool]) -> None:
        self._waiting = [waiter for waiter in self._waiting if not unwanted(waiter)]
