"""One collective, or one send or receive, from the call to its result.

Knows what it waits for and what it has; knows nothing of groups or connections. Finished by whichever thread brings the
last byte; waited for by any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from guava_nb.errors import CollectiveError, GuavaError
from guava_nb.protocol.messages import CallSpec, Parcel

__all__ = ["CHUNK_BYTES", "Bytes", "Inbound", "Operation", "Part", "Receive", "Run", "Slot"]

#: Payload of one message. Small enough that upload, sum and download overlap, one frame of the wire.
CHUNK_BYTES = 1 << 20

Bytes = npt.NDArray[np.uint8]

#: Calls its argument once the bytes that go out are there: with None, or with what went wrong.
Run = Callable[[Callable[[Exception | None], object]], None]


@dataclass
class Part:
    """What goes from here to one target (-1: everyone).

    Attributes:
        target: a rank, or -1.
        data: the bytes; left alone until the hub has them.
        item_bytes: bytes of one element.
    """

    target: int
    data: Bytes
    item_bytes: int

    @property
    def total(self) -> int:
        """Elements."""
        return self.data.nbytes // self.item_bytes

    def chunks(self) -> Iterator[tuple[int, Bytes]]:
        """Cut into offsets (in elements) and bytes; one empty chunk when there is nothing, so that it is heard of."""
        step = CHUNK_BYTES // self.item_bytes * self.item_bytes
        for start in range(0, max(1, self.data.nbytes), step):
            yield start // self.item_bytes, self.data[start : start + step]


class Slot:
    """Where what comes from one source goes."""

    __slots__ = ("data", "dtype", "item_bytes", "missing", "total")

    def __init__(self, data: Bytes, dtype: str, item_bytes: int) -> None:
        """Expect exactly the bytes of `data`, elements of `dtype`."""
        self.data, self.dtype, self.item_bytes = data, dtype, item_bytes
        self.total = data.nbytes // item_bytes
        self.missing = max(1, self.total)  # a tensor of no elements comes as one empty piece

    def fill(self, offset: int, total: int, dtype: str, payload: memoryview | bytes) -> str:
        """Take a piece.

        Returns:
            "" or what does not fit.
        """
        start, end = offset * self.item_bytes, offset * self.item_bytes + len(payload)
        if total != self.total or dtype != self.dtype or end > self.data.nbytes or offset < 0:
            return f"{total} elements of {dtype} came where {self.total} of {self.dtype} were expected"
        if end > start:
            self.data[start:end] = np.frombuffer(payload, np.uint8)
        self.missing -= max(1, (end - start) // self.item_bytes)
        return ""


@dataclass(eq=False)
class Operation:
    """What is under way.

    Attributes:
        what: name of the call, for sentences.
        spec: what the other ranks must have called, too; None for send and receive.
        timeout_s: how long to wait for the others.
        parts: what goes out.
        slots: what comes in, by source; -1 is a sum made by the hub.
        reduce: name of the reduction for what goes out; "" passes it on.
        confirm: the caller's own memory goes out, and nothing that comes back shows that the hub has it.
        finish: called once everything is here, before a waiting thread is woken.
        source: rank whose tensor a receive got; -1 before.
        sequence: given by the group.
    """

    what: str
    spec: CallSpec | None
    timeout_s: float
    parts: list[Part] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    reduce: str = ""
    confirm: bool = False
    finish: Callable[[], None] | None = None
    source: int = -1
    sequence: int = 0
    error: GuavaError | None = None
    done: bool = False
    expired: bool = False  # the hub was asked to end it
    deadline: float = 0.0
    _open_slots: int = 0
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _gate: threading.Lock = field(default_factory=threading.Lock)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Close the gate."""
        self._gate.acquire()
        self._open_slots = len(self.slots)
        self.deadline = time.monotonic() + self.timeout_s

    @property
    def call(self) -> str:
        """Name of torch's call."""
        return self.spec.kind if self.spec is not None else "send" if self.parts else "recv"

    # --------------------------------------------------------------------- called with the group's lock held

    def add_slot(self, source: int, slot: Slot) -> None:
        """Expect something more."""
        self.slots[source] = slot
        self._open_slots += 1

    def await_confirmation(self) -> None:
        """The caller's own memory goes out: it is not over before the hub has all of it."""
        self.confirm = True
        self._open_slots += 1

    def hold(self) -> None:
        """It is not over before `release`: its own bytes are still on their way from a device."""
        self._open_slots += 1

    def release(self) -> None:
        """Its own bytes are out."""
        self._open_slots -= 1

    def fill(self, source: int, offset: int, total: int, dtype: str, payload: memoryview | bytes) -> str:
        """Take a piece from a source; returns "" or what is wrong with it."""
        slot = self.slots.get(source)
        if slot is None or not slot.missing:
            return ""  # the ranks called different things, which the hub is about to say in better words
        problem = slot.fill(offset, total, dtype, payload)
        self._open_slots -= not problem and not slot.missing
        return problem

    def confirmed(self) -> None:
        """The hub has all that went out."""
        if self.confirm:
            self.confirm = False
            self._open_slots -= 1

    @property
    def complete(self) -> bool:
        """Whether nothing is awaited any more."""
        return self._open_slots == 0

    # ------------------------------------------------------------------------------------- called without a lock

    def end(self, error: GuavaError | None = None) -> None:
        """Wake all who wait, with the result or with the error; the first call counts."""
        with self._guard:
            if self.done:
                return
            if error is None and self.finish is not None:
                try:
                    self.finish()
                except Exception as problem:  # the caller must hear of it, whatever it is
                    error = CollectiveError(f"{self.what}: the result could not be put in place: {problem}")
                    error.__cause__ = problem
            self.error, self.done = error, True
            callbacks, self._callbacks = self._callbacks, []
            self.finish = None
            self.parts = []
        self._gate.release()
        for callback in callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back when it has ended, at once if it has."""
        with self._guard:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end; returns whether it came."""
        if self.done:
            return True
        if self._gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._gate.release()
        return self.done


@dataclass
class Inbound:
    """A tensor on its way from another rank."""

    source: int
    tag: int
    number: int
    total: int
    pieces: list[tuple[Parcel, memoryview | bytes]] = field(default_factory=list)
    receive: Operation | None = None
    received: int = 0


@dataclass(eq=False)
class Receive:
    """A receive that no tensor has come for."""

    operation: Operation
    source: int  # -1: any
    tag: int
    slot: Slot
