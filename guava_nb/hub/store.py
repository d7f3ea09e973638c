"""The shared keys of process groups: a table, and those who wait for a key.

Pure: asks in, answers out; no clock, no lock, no session. Who waits decides how long: it sends "cancel" when it has
waited enough. Values are bytes and are never looked into.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from guava_nb.protocol.messages import StoreAsk, StoreReply

__all__ = ["MOST_BYTES", "MOST_WAITS", "StoreTable"]

#: Bytes that one client's keys and waits may take, those of all clients that are gone, and the values of one answer; waits of
#: one client.
MOST_BYTES, MOST_WAITS = 64 << 20, 4096
#: What a key or a wait takes beside its texts.
_KEY_BYTES = 100
#: What sizes are counted of: a key, or a queue, which may have the same name. True is a queue.
_Thing = tuple[bool, str]

Answers = list[tuple[bytes, StoreReply]]


@dataclass(frozen=True)
class _Waiter:
    client: bytes
    ask: StoreAsk

    @property
    def size(self) -> int:
        return _KEY_BYTES + sum(len(key) + _KEY_BYTES for key in self.ask.keys) + sum(map(len, self.ask.values))


class _TooMuchError(Exception):
    """The hub would keep more for a client than it may."""


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
        self._sizes: dict[_Thing, tuple[bytes, int]] = {}  # to the client as whose it counts, and bytes; oldest first
        self._held: Counter[bytes] = Counter()  # bytes by client, with its waits; b"" for all that are gone
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
            The answers to send, by client: none yet for one that has to wait, and those whose wait this has ended.
        """
        if ask.op == "cancel":
            self._drop(lambda waiter: waiter.client == client and waiter.ask.request_id == ask.number)
            return []
        self._client = client
        handler = self._handlers.get(ask.op)
        if handler is None:
            return [(client, StoreReply(ask.request_id, problem=f"the store has no operation {ask.op[:40]!r}"))]
        try:
            reply = handler(ask)
            if reply is None:
                self._wait_for(_Waiter(client, ask))
                return []
        except _TooMuchError as problem:
            return [(client, StoreReply(ask.request_id, problem=str(problem)))]
        except (IndexError, ValueError) as problem:
            reply = StoreReply(ask.request_id, problem=f"the store cannot {ask.op} {list(ask.keys)[:3]}: {problem}")
        return [(client, reply), *self._wake()]

    def lost(self, client: bytes) -> None:
        """The client is gone and waits for nothing any more; what it has set stays, what it has lent goes with it."""
        self._drop(lambda waiter: waiter.client == client)
        for key in [key for key, owner in self._lent.items() if owner == client]:
            self._drop_value(key)
        for thing in [thing for thing, (owner, _) in self._sizes.items() if owner == client]:
            self._count(thing, self._sizes[thing][1], b"")
        self._held.pop(client, None)
        while self._held[b""] > MOST_BYTES:
            is_queue, name = next(thing for thing, (owner, _) in self._sizes.items() if owner == b"")
            if is_queue:
                self._drop_queue(name)
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

    def _check_room(self, sizes: Mapping[_Thing, int]) -> None:
        """Refuse that keys or queues become so large and the asking client's own, before anything is kept."""
        mine = sum(
            size for owner, size in (self._sizes.get(thing, (b"", 0)) for thing in sizes) if owner == self._client
        )
        self._check_bytes(sum(sizes.values()) - mine)

    def _check_bytes(self, more: int) -> None:
        held = self._held[self._client]
        if more > 0 and held + more > MOST_BYTES:
            raise _TooMuchError(
                f"this member's keys take {held >> 20} MiB at the hub, and may take {MOST_BYTES >> 20} MiB: delete some"
            )

    def _wait_for(self, waiter: _Waiter) -> None:
        waits = sum(other.client == waiter.client for other in self._waiting)
        if waits >= MOST_WAITS:
            raise _TooMuchError(f"this member waits {waits} times already")
        self._check_bytes(waiter.size)
        self._held[waiter.client] += waiter.size
        self._waiting.append(waiter)

    def _put_all(self, values: Mapping[str, bytes]) -> None:
        sizes = {(False, key): len(key) + len(value) + _KEY_BYTES for key, value in values.items()}
        self._check_room(sizes)
        self._values.update(values)
        for thing, size in sizes.items():
            self._count(thing, size, self._client)

    def _put(self, key: str, value: bytes) -> bytes:
        self._put_all({key: value})
        return value

    def _drop_value(self, key: str) -> bool:
        self._count((False, key), 0, b"")
        self._lent.pop(key, None)
        return self._values.pop(key, None) is not None

    def _drop_queue(self, key: str) -> None:
        self._count((True, key), 0, b"")
        self._queues.pop(key, None)

    def _count(self, thing: _Thing, size: int, client: bytes) -> None:
        owner, before = self._sizes.pop(thing, (b"", 0))
        self._held[owner] -= before
        if size:
            self._sizes[thing] = (client, size)
            self._held[client] += size

    # ------------------------------------------------------------------------------------------------------- operations

    def _set(self, ask: StoreAsk) -> StoreReply:
        values = dict(zip(ask.keys, ask.values, strict=True))
        self._put_all(values)
        if ask.op == "lend":
            self._lent.update(dict.fromkeys(values, self._client))
        elif ask.op == "set":  # and is lent no more
            for key in values:
                self._lent.pop(key, None)
        return StoreReply(ask.request_id)

    def _claim(self, ask: StoreAsk) -> StoreReply:
        """Lend the key if it is free; gives the value that holds then."""
        key, value = ask.keys[0], ask.values[0]
        if key not in self._values:
            self._put(key, value)
            self._lent[key] = self._client
        return StoreReply(ask.request_id, (self._values[key],))

    def _get(self, ask: StoreAsk) -> StoreReply | None:
        if any(key not in self._values for key in ask.keys):
            return None
        if sum(len(self._values[key]) for key in ask.keys) > MOST_BYTES:  # one key may be asked for a million times
            return StoreReply(ask.request_id, problem=f"an answer may have {MOST_BYTES >> 20} MiB: ask for fewer keys")
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
        queue, value = (True, ask.keys[0]), ask.values[0]
        # The first value pays for the queue's name.
        size = self._sizes.get(queue, (b"", len(ask.keys[0]) + _KEY_BYTES))[1] + len(value) + _KEY_BYTES
        self._check_room({queue: size})
        self._queues.setdefault(ask.keys[0], deque()).append(value)
        self._count(queue, size, self._client)
        return StoreReply(ask.request_id)

    def _queue_pop(self, ask: StoreAsk) -> StoreReply | None:
        key = ask.keys[0]
        queue = self._queues.get(key)
        if queue is None:
            return None if ask.number else StoreReply(ask.request_id, problem=f"the queue {key!r} is empty")
        value = queue.popleft()
        owner, size = self._sizes[True, key]
        self._count((True, key), size - len(value) - _KEY_BYTES, owner)
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
                self._held[waiter.client] -= waiter.size
                answers.append((waiter.client, reply))
        self._waiting = still
        return answers

    def _drop(self, unwanted: Callable[[_Waiter], bool]) -> None:
        for waiter in filter(unwanted, self._waiting):
            self._held[waiter.client] -= waiter.size
        self._waiting = [waiter for waiter in self._waiting if not unwanted(waiter)]
