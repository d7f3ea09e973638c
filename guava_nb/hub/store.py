"""The shared keys of process groups: a table, and those who wait for a key.

Pure: asks in, answers out; no clock, no lock, no session. Who waits decides how long: it sends "cancel" when it has
waited enough. Values are bytes and are never looked into.

An ask costs as much time as it names keys and as members wait for these, not as all that wait: one member must not hold up
the others, who share one lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import TypeVar

from guava_nb.protocol.messages import StoreAsk, StoreReply

__all__ = ["MOST_BYTES", "MOST_KEYS", "MOST_WAITS", "Answers", "StoreTable"]

#: Bytes that one client's keys and waits may take, those of all clients that are gone, and the values of one answer; waits of
#: one client.
MOST_BYTES, MOST_WAITS = 64 << 20, 4096
#: Keys that one ask names, that all waits of one client name, and that one client (or all that are gone) has here. 4096 ranks
#: that meet in a full mesh leave as many for each.
MOST_KEYS = 1 << 16
#: What a key or a wait takes beside its texts.
_KEY_BYTES = 100
_TOO_MUCH = f"the answer would be longer than {MOST_BYTES >> 20} MiB: ask for fewer keys at a time"
#: What sizes are counted of: a key, or a queue, which may have the same name. True is a queue.
_Thing = tuple[bool, str]

Answers = list[tuple[bytes, StoreReply]]
_Key = TypeVar("_Key")


@dataclass(eq=False)
class _Waiter:
    client: bytes
    ask: StoreAsk
    number: int  # in the order in which they came
    missing: int = 0  # of the keys that it waits for

    @property
    def size(self) -> int:
        return _KEY_BYTES + sum(len(key) + _KEY_BYTES for key in self.ask.keys) + sum(map(len, self.ask.values))

    @property
    def things(self) -> set[_Thing]:
        return {(self.ask.op == "queue_pop", key) for key in self.ask.keys}


class _TooMuchError(Exception):
    """The hub would keep more for a client than it may."""


class StoreTable:
    """Keys and values of one hub.

    A client is the id of a session; answers name it. What it sets counts as its own, up to `MOST_BYTES` and `MOST_KEYS`. What
    clients set that are gone stays up to as much in all; the oldest goes first.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes | bytearray] = {}  # a bytearray where it was appended to
        self._queues: dict[str, deque[bytes]] = {}
        self._waiting: dict[_Waiter, None] = {}
        self._waiting_for: dict[_Thing, dict[_Waiter, None]] = {}
        self._waits: dict[bytes, dict[_Waiter, None]] = {}  # by client
        self._awaited: Counter[bytes] = Counter()  # keys that the waits of a client name
        self._over: list[_Waiter] = []  # whose wait the ask in work has ended
        self._numbers = count()
        self._lent: dict[str, bytes] = {}  # key to the client whose end takes it away
        self._sizes: dict[_Thing, tuple[bytes, int]] = {}  # to the client as whose it counts, and bytes; oldest first
        self._held: Counter[bytes] = Counter()  # bytes by client, with its waits; b"" for all that are gone
        self._things: Counter[bytes] = Counter()  # keys and queues by client, in the same way
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
            for waiter in [one for one in self._waits.get(client, ()) if one.ask.request_id == ask.number]:
                self._drop(waiter)
            return []
        if len(ask.keys) > MOST_KEYS:
            problem = f"one ask may name {MOST_KEYS} keys, and this one names {len(ask.keys)}: ask for them in parts"
            return [(client, StoreReply(ask.request_id, problem=problem))]
        self._client = client
        handler = self._handlers.get(ask.op)
        if handler is None:
            return [(client, StoreReply(ask.request_id, problem=f"the store has no operation {ask.op[:40]!r}"))]
        try:
            reply = handler(ask)
            if reply is None:
                self._wait_for(_Waiter(client, ask, next(self._numbers)))
                return []
        except _TooMuchError as problem:
            return [(client, StoreReply(ask.request_id, problem=str(problem)))]
        except (IndexError, ValueError) as problem:
            reply = StoreReply(ask.request_id, problem=f"the store cannot {ask.op} {list(ask.keys)[:3]}: {problem}")
        return [(client, reply), *self._wake()]

    def lost(self, client: bytes) -> None:
        """The client is gone and waits for nothing any more; what it has set stays, what it has lent goes with it."""
        for waiter in list(self._waits.get(client, ())):
            self._drop(waiter)
        for key in [key for key, owner in self._lent.items() if owner == client]:
            self._drop_value(key)
        for thing in [thing for thing, (owner, _) in self._sizes.items() if owner == client]:
            self._count(thing, self._sizes[thing][1], b"")
        self._held.pop(client, None)
        self._things.pop(client, None)
        self._awaited.pop(client, None)
        for is_queue, name in [thing for thing, (owner, _) in self._sizes.items() if owner == b""]:
            if self._held[b""] <= MOST_BYTES and self._things[b""] <= MOST_KEYS:
                break
            if is_queue:
                self._drop_queue(name)
            else:
                self._drop_value(name)

    def refuse(self, prefix: str, allowed: Container[bytes], problem: str) -> Answers:
        """End the waits of all but some clients for keys that begin so; returns the answers, which say `problem`."""
        foreign = [
            waiter
            for waiter in self._waiting
            if waiter.client not in allowed and any(key.startswith(prefix) for key in waiter.ask.keys)
        ]
        for waiter in foreign:
            self._drop(waiter)
        return [(waiter.client, StoreReply(waiter.ask.request_id, problem=problem)) for waiter in foreign]

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
        mine = [size for owner, size in (self._sizes.get(thing, (b"", 0)) for thing in sizes) if owner == self._client]
        if len(sizes) > len(mine) and self._things[self._client] + len(sizes) - len(mine) > MOST_KEYS:
            raise _TooMuchError(f"this member may have {MOST_KEYS} keys at the hub: delete some")
        self._check_bytes(sum(sizes.values()) - sum(mine))

    def _check_bytes(self, more: int) -> None:
        held = self._held[self._client]
        if more > 0 and held + more > MOST_BYTES:
            raise _TooMuchError(
                f"this member's keys take {held >> 20} MiB at the hub, and may take {MOST_BYTES >> 20} MiB: delete some"
            )

    def _wait_for(self, waiter: _Waiter) -> None:
        mine = self._waits.get(waiter.client, {})
        if len(mine) >= MOST_WAITS:
            raise _TooMuchError(f"this member waits {len(mine)} times already")
        if self._awaited[waiter.client] + len(waiter.ask.keys) > MOST_KEYS:
            raise _TooMuchError(f"the waits of this member may name {MOST_KEYS} keys in all")
        self._check_bytes(waiter.size)
        self._held[waiter.client] += waiter.size
        self._awaited[waiter.client] += len(waiter.ask.keys)
        self._waiting[waiter] = None
        self._waits.setdefault(waiter.client, {})[waiter] = None
        for is_queue, key in waiter.things:
            self._waiting_for.setdefault((is_queue, key), {})[waiter] = None
            waiter.missing += not is_queue and key not in self._values

    def _put_all(self, values: Mapping[str, bytes | bytearray]) -> None:
        sizes = {(False, key): len(key) + len(value) + _KEY_BYTES for key, value in values.items()}
        self._check_room(sizes)
        for key in [key for key in values if key not in self._values]:
            self._has_come(key)
        self._values.update(values)
        for thing, size in sizes.items():
            self._count(thing, size, self._client)

    def _put(self, key: str, value: bytes) -> bytes:
        self._put_all({key: value})
        return value

    def _has_come(self, key: str) -> None:
        for waiter in self._waiting_for.get((False, key), ()):
            waiter.missing -= 1
            if not waiter.missing:
                self._over.append(waiter)

    def _drop_value(self, key: str) -> bool:
        self._count((False, key), 0, b"")
        self._lent.pop(key, None)
        if self._values.pop(key, None) is None:
            return False
        for waiter in self._waiting_for.get((False, key), ()):
            waiter.missing += 1
        return True

    def _drop_queue(self, key: str) -> None:
        self._count((True, key), 0, b"")
        self._queues.pop(key, None)

    def _count(self, thing: _Thing, size: int, client: bytes) -> None:
        owner, before = self._sizes.pop(thing, (b"", 0))
        self._held[owner] -= before
        self._things[owner] -= bool(before)
        if size:
            self._sizes[thing] = (client, size)
            self._held[client] += size
            self._things[client] += 1

    # ------------------------------------------------------------------------------------------------------- operations

    def _set(self, ask: StoreAsk) -> StoreReply:
        values = dict(zip(ask.keys, ask.values, strict=True))
        self._put_all(values)
        if ask.op == "lend":
            self._lent.update(dict.fromkeys(values, self._client))
        else:  # what was lent is lent no more
            for key in values:
                self._lent.pop(key, None)
        return StoreReply(ask.request_id)

    def _claim(self, ask: StoreAsk) -> StoreReply:
        """Lend the key if it is free; gives the value that holds then."""
        key, value = ask.keys[0], ask.values[0]
        if key not in self._values:
            self._put(key, value)
            self._lent[key] = self._client
        return StoreReply(ask.request_id, (bytes(self._values[key]),))

    def _get(self, ask: StoreAsk) -> StoreReply | None:
        if any(key not in self._values for key in ask.keys):
            return None
        if sum(len(self._values[key]) for key in ask.keys) > MOST_BYTES:  # one key may be asked for many times
            return StoreReply(ask.request_id, problem=_TOO_MUCH)
        return StoreReply(ask.request_id, tuple(bytes(self._values[key]) for key in ask.keys))

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
        return StoreReply(ask.request_id, (expected if current is None else bytes(current),))

    def _check(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=int(all(key in self._values for key in ask.keys)))

    def _delete(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=int(self._drop_value(ask.keys[0])))

    def _num_keys(self, ask: StoreAsk) -> StoreReply:
        return StoreReply(ask.request_id, number=sum(key.startswith(ask.keys[0]) for key in self._values))

    def _list_keys(self, ask: StoreAsk) -> StoreReply:
        found = sorted(key for key in self._values if key.startswith(ask.keys[0]))
        if sum(map(len, found)) > MOST_BYTES:
            return StoreReply(ask.request_id, problem=_TOO_MUCH)
        return StoreReply(ask.request_id, tuple(key.encode() for key in found))

    def _append(self, ask: StoreAsk) -> StoreReply:
        key, value = ask.keys[0], ask.values[0]
        whole = self._values.get(key, b"")
        self._check_room({(False, key): len(key) + len(whole) + len(value) + _KEY_BYTES})
        if not isinstance(whole, bytearray):  # once: a byte that is appended must not cost a copy of all before it
            whole = bytearray(whole)
        whole += value
        self._put_all({key: whole})
        return StoreReply(ask.request_id)

    def _queue_push(self, ask: StoreAsk) -> StoreReply:
        queue, value = (True, ask.keys[0]), ask.values[0]
        # The first value pays for the queue's name.
        size = self._sizes.get(queue, (b"", len(ask.keys[0]) + _KEY_BYTES))[1] + len(value) + _KEY_BYTES
        self._check_room({queue: size})
        self._queues.setdefault(ask.keys[0], deque()).append(value)
        self._count(queue, size, self._client)
        self._over += islice(self._waiting_for.get(queue, ()), 1)  # it was empty if one waits, so there is one value
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
        over, self._over = sorted(self._over, key=lambda waiter: waiter.number), []
        answers: Answers = []
        for waiter in over:
            self._drop(waiter)
            reply = self._handlers[waiter.ask.op](waiter.ask)
            assert reply is not None
            answers.append((waiter.client, reply))
        return answers

    def _drop(self, waiter: _Waiter) -> None:
        """It waits no more."""
        self._held[waiter.client] -= waiter.size
        self._awaited[waiter.client] -= len(waiter.ask.keys)
        del self._waiting[waiter]
        _take_out(self._waits, waiter.client, waiter)
        for thing in waiter.things:
            _take_out(self._waiting_for, thing, waiter)


def _take_out(waiters: dict[_Key, dict[_Waiter, None]], key: _Key, waiter: _Waiter) -> None:
    del waiters[key][waiter]
    if not waiters[key]:
        del waiters[key]
