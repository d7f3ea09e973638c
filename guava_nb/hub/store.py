"""The shared keys of process groups: a table, and those who wait for a key.

Pure: asks in, answers out; no clock, no lock, no session. Who waits decides how long: it sends "cancel" when it has
waited enough. Values are bytes and are never looked into.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from guava_nb.protocol.messages import StoreAsk, StoreReply

__all__ = ["MOST_BYTES", "MOST_WAITS", "StoreTable"]

#: Bytes that one client's keys may take, and those of all clients that are gone; waits of one client.
MOST_BYTES, MOST_WAITS = 64 << 20, 4096
#: What a key takes beside its text and its value.
_KEY_BYTES = 100
#: Stands before the name of a queue where sizes are counted: a key and a queue may have the same name.
_QUEUE = "\0queue\0"

Answers = list[tuple[bytes, StoreReply]]


@dataclass(frozen=True)
class _Waiter:
    client: bytes
    ask: StoreAsk


class StoreTable:
    """Keys and values of one hub.

    A client is the id of a session; answers name it. What it sets counts as its own, up to `MOST_BYTES`. What clients set that
    are gone stays up to as much in all; the oldest goes first.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: list[_Waiter] = []
        self._lent: dict[str, bytes] = {}  # key to the client whose end takes it away
        self._sizes: dict[
            str, tuple[bytes, int]
        ] = {}  # key or queue to the client as whose it counts, and bytes; oldest first
        self._held: Counter[bytes] = Counter()  # bytes by client; b"" for all that are gone
        self._client = b""  # whose ask is done
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
        if problem := self._excess(client, ask):
            return [(client, StoreReply(ask.request_id, problem=problem))]
        self._client = client
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
            self._drop_value(key)
        for name in [name for name, (owner, _) in self._sizes.items() if owner == client]:
            self._count(name, self._sizes[name][1], b"")
        self._held.pop(client, None)
        while self._held[b""] > MOST_BYTES:
            name = next(name for name, (owner, _) in self._sizes.items() if owner == b"")
            if name.startswith(_QUEUE):
                self._drop_queue(name.removeprefix(_QUEUE))
            else:
                self._drop_value(name)

    def forget(self, prefix: str) -> None:
        """Drop every key and queue that begins so."""
        for key in [key for key in self._values if key.startswith(prefix)]:
            self._drop_value(key)
        for key in [key for key in self._queues if key.startswith(prefix)]:
            self._drop_queue(key)

    def __len__(self) -> int:
        return len(self._values) + len(self._queues)

    # ------------------------------------------------------------------------------------------------------------ sizes

    def _excess(self, client: bytes, ask: StoreAsk) -> str:
        """Say why an ask would make the hub keep too much for a client; "" where it does not."""
        if ask.op in ("get", "multi_get", "wait", "queue_pop"):
            waits = sum(waiter.client == client for waiter in self._waiting)
            return f"this member waits {waits} times already" if waits >= MOST_WAITS else ""
        fresh = sum(map(len, ask.values)) + sum(len(key) + _KEY_BYTES for key in ask.keys)
        mine = [self._sizes.get(key, (b"", 0)) for key in ask.keys] if ask.op in ("set", "multi_set", "lend") else []
        instead = sum(size for owner, size in mine if owner == client)
        if ask.values and self._held[client] + fresh - instead > MOST_BYTES:
            most = f"{MOST_BYTES >> 20} MiB"
            return (
                f"this member's keys take {self._held[client] >> 20} MiB at the hub, and may take {most}: delete some"
            )
        return ""

    def _put(self, key: str, value: bytes) -> bytes:
        self._values[key] = value
        self._count(key, len(key) + len(value) + _KEY_BYTES, self._client)
        return value

    def _drop_value(self, key: str) -> bool:
        self._count(key, 0, b"")
        return self._values.pop(key, None) is not None

    def _drop_queue(self, key: str) -> None:
        self._count(_QUEUE + key, 0, b"")
        self._queues.pop(key, None)

    def _count(self, name: str, size: int, client: bytes) -> None:
        owner, before = self._sizes.pop(name, (b"", 0))
        self._held[owner] -= before
        if size:
            self._sizes[name] = (client, size)
            self._held[client] += size

    # ------------------------------------------------------------------------------------------------------- operations

    def _set(self, ask: StoreAsk) -> StoreReply:
        for key, value in tuple(zip(ask.keys, ask.values, strict=True)):
            self._put(key, value)
        return StoreReply(ask.request_id)

    def _claim(self, ask: StoreAsk) -> StoreReply:
        """Lend the key if it is free; gives the value that holds then."""
        key, value = ask.keys[0], ask.values[0]
        return StoreReply(ask.request_id, (self._values[key] if key in self._values else self._put(key, value),))

    def _get(self, ask: StoreAsk) -> StoreReply | None:
        if any(key not in self._values for key in ask.keys):
            return None
        return StoreReply(ask.request_id, tuple(self._values[key] for key in ask.keys))

    def _wait(self, ask: StoreAsk) -> StoreReply | None:
        return None if any(key not in self._values for key in ask.keys) else StoreReply(ask.request_id)

    def _add(self, ask: StoreAsk) -> StoreReply:
        total = int(self._values.get(ask.keys[0], b"0")) + ask.number
        self._put(ask.keys[0], str(total).encode())
        return StoreReply(ask.request_id, number=total)

    def _compare_set(self, ask: StoreAsk) -> StoreReply:
        key, (expected, wanted) = ask.keys[0], ask.values
        current = self._values.get(key)
        # As torch's own stores: an absent key is set only when nothing was expected, else the expectation comes back.
        if current == expected or (current is None and not expected):
            current = self._put(key, wanted)
        return StoreReply(ask.request_id, (expected if current is None else current,))

    def _check(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=int(all(key in self._values for key in ask.keys)))

    def _delete(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=int(self._drop_value(ask.keys[0])))

    def _num_keys(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=sum(key.startswith(ask.keys[0]) for key in self._values))

    def _list_keys(self, ask: StoreAsk) -> StoreReply:
        found = sorted(key for key in self._values if key.startswith(ask.keys[0]))
        return StoreReply(ask.request_id, tuple(key.encode() for key in found))

    def _append(self, ask: StoreAsk) -> StoreReply:
        key = ask.keys[0]
        self._put(key, self._values.get(key, b"") + ask.values[0])
        return StoreReply(ask.request_id)

    def _queue_push(self, ask: StoreAsk) -> StoreReply:
        name, value = _QUEUE + ask.keys[0], ask.values[0]
        self._queues.setdefault(ask.keys[0], deque()).append(value)
        self._count(name, self._sizes.get(name, (b"", 0))[1] + len(value) + _KEY_BYTES, self._client)
        return StoreReply(ask.request_id)

    def _queue_pop(self, ask: StoreAsk) -> StoreReply | None:
        key = ask.keys[0]
        queue = self._queues.get(key)
        if queue is None:
            return None if ask.number else StoreReply(ask.request_id, problem=f"the queue {key!r} is empty")
        value = queue.popleft()
        owner, size = self._sizes[_QUEUE + key]
        self._count(_QUEUE + key, size - len(value) - _KEY_BYTES, owner)
        if not queue:
            self._drop_queue(key)
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
