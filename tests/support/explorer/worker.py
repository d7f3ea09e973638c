"""One worker: the real loop and step runner, fed one message at a time; and the line between it and the orchestrator.

A line keeps order within a channel and none between channels. What was sent while the line was cut comes after its return,
as a session promises (`tests/unit/protocol/test_resume.py` proves that of `guava_nb.protocol.resume`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from guava_nb.errors import GroupBroken, LinkClosed
from guava_nb.link.hearing import Silences
from guava_nb.link.lane import Wire
from guava_nb.protocol.messages import (
    Abort,
    BatchShard,
    Channel,
    FormGroup,
    GroupFormed,
    Hello,
    Message,
    Prepare,
    Prepared,
    channel_of,
)
from guava_nb.worker.loop import WorkerLoop
from guava_nb.worker.preparation import PreparedRun
from tests.support.explorer.replica import CountingReplica, ids_of

__all__ = ["Groups", "Line", "Parcel", "Worker"]


@dataclass(frozen=True)
class Parcel:
    """A message under way, with bytes of its own."""

    message: Message
    payload: bytes
    digest: int

    @classmethod
    def of(cls, message: Message, buffers: Sequence[memoryview]) -> Parcel:
        payload = b"".join(bytes(buffer) for buffer in buffers)
        digest = hash((type(message).__name__, msgspec.msgpack.encode(message), payload))
        return cls(message, payload, digest)

    @property
    def kind(self) -> str:
        return type(self.message).__name__

    def opened(self) -> tuple[Message, memoryview]:
        return self.message, memoryview(bytearray(self.payload))


@dataclass
class Line:
    """The orchestrator's session with one worker, and what is under way on it in both directions."""

    session_id: bytes
    out: dict[Channel, deque[Parcel]] = field(default_factory=dict)
    back: dict[Channel, deque[Parcel]] = field(default_factory=dict)
    away: bool = False
    closed: bool = False
    in_outage = False
    peer_address = "here"
    state = "open"
    round_trip_s = None
    silent_s, silences = 0.0, Silences()
    rate_bytes_s = (None, None)
    wire = saved = Wire(dict.fromkeys(Channel, 0), dict.fromkeys(Channel, 0))

    @property
    def identity(self) -> bytes:
        """Of the worker's process: each has one session."""
        return self.session_id

    def send(self, message: Message, channel: Channel, buffers: Sequence[memoryview] = ()) -> None:
        """Queue a message for the worker."""
        if self.closed:
            raise LinkClosed("closed")
        if channel is not Channel.METRICS:  # questions about energy and lines change nothing here
            self.out.setdefault(channel, deque()).append(Parcel.of(message, buffers))

    def reply(self, message: Message, buffers: Sequence[memoryview]) -> None:
        """Queue a message for the orchestrator."""
        self.back.setdefault(channel_of(message), deque()).append(Parcel.of(message, buffers))

    def close(self, reason: str = "") -> None:
        """End it."""
        self.closed = True

    def key(self) -> tuple[Any, ...]:
        """What is under way."""
        ways = [
            tuple((c, tuple(p.digest for p in q)) for c, q in sorted(w.items()) if q) for w in (self.out, self.back)
        ]
        return (self.away, self.closed, *ways)


class Groups:
    """What the ranks of all groups have brought to their sums. A sum is there when all of a group have brought theirs."""

    def __init__(self) -> None:
        self.brought: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
        self.met: dict[int, set[str]] = {}
        self.refused: set[tuple[int, int]] = set()  # a rank has what its vote is against

    def key(self) -> tuple[Any, ...]:
        """Who brought what."""
        met = tuple((g, tuple(sorted(names))) for g, names in sorted(self.met.items()))
        return (
            met,
            tuple((k, tuple(sorted(v.items()))) for k, v in sorted(self.brought.items())),
            tuple(sorted(self.refused)),
        )


class _Seat:
    """A worker's place in a group, as `guava_nb.worker.process_group.GroupSeat` has it."""

    def __init__(self, name: str, groups: Groups) -> None:
        self.name, self.groups = name, groups
        self.order: FormGroup | None = None
        self.broken = False
        self.generation = -1

    @property
    def formed_in(self) -> int:
        """As `GroupSeat` has it."""
        return -1 if self.order is None else self.order.generation

    def abort(self, generation: int) -> None:
        """An abort came: whoever is blocked in an older group wakes."""
        self.generation = max(self.generation, generation)
        self.broken |= self.order is not None and generation >= self.order.generation

    def leave(self) -> None:
        self.order, self.broken = None, False

    @contextmanager
    def applying(self) -> Iterator[None]:
        yield

    def broken_by(self, error: BaseException) -> bool:
        return self.order is not None and (self.broken or isinstance(error, GroupBroken))

    def is_refused(self, step: int) -> bool:
        """Whether a rank votes against a step."""
        assert self.order is not None
        return (self.order.generation, step) in self.groups.refused

    def total(self, step: int) -> list[int]:
        """The samples of all ranks, as their sum has them."""
        assert self.order is not None
        if self.broken:
            raise GroupBroken("the group was given up")
        brought = self.groups.brought.get((self.order.generation, step), {})
        if set(brought) != set(self.order.members):
            raise GroupBroken("a member is gone")
        return [i for name in self.order.members for i in brought[name]]


class _Preparation:
    """Builds counting replicas where the real one builds the user's model."""

    lost_device = ""

    def __init__(self, samples: int, buckets: int, seat: _Seat, undoes: bool, kind: type[CountingReplica]) -> None:
        self._samples, self._buckets, self._seat, self._undoes, self._kind = samples, buckets, seat, undoes, kind

    def build(self, message: Prepare) -> PreparedRun:
        seat = None if message.spec.parallel is None else self._seat
        replica = self._kind(self._samples, self._buckets, seat, self._undoes)
        return PreparedRun(message.run_id, message.spec, None, str, replica, SimpleNamespace())  # type: ignore[arg-type]

    def built(self, message: Prepare, run: PreparedRun, holds_step: int | None = None, ticks: int = 0) -> Prepared:
        holds = {} if holds_step is None else {"holds": True, "step": holds_step, "ticks": ticks}
        return Prepared(run_id=run.run_id, ok=True, generation=message.generation, **holds)  # type: ignore[arg-type]

    def failed(self, message: Prepare, error: BaseException) -> Prepared:
        raise AssertionError(f"the worker cannot build: {error!r}") from error

    def form_group(self, run: PreparedRun, message: FormGroup, payload: memoryview) -> GroupFormed:
        ok = self._seat.order is message and not self._seat.broken
        problem = "" if ok else "the group was given up"
        return GroupFormed(
            run_id=message.run_id, generation=message.generation, ok=ok, problem=problem, broken=not ok
        )  # fmt: skip


class Worker:
    """One worker process.

    Attributes:
        alive: the process runs.
        rank: its seat at the orchestrator, None before it has one.
        blocked: what it waits for inside a group: "" nothing, "form" or "sum".
    """

    def __init__(
        self,
        name: str,
        samples: int,
        buckets: int,
        groups: Groups,
        undoes: bool = True,
        kind: type[CountingReplica] = CountingReplica,
    ) -> None:
        self.name, self.groups = name, groups
        self.line = Line(name.encode())
        self.alive = True
        self.rank: int | None = None
        self.blocked = ""
        self.left = False
        self.seat = _Seat(name, groups)
        self.loop = WorkerLoop(self._send, torch.device("cpu"), seat=self.seat)  # type: ignore[arg-type]
        self.loop._preparation = _Preparation(samples, buckets, self.seat, undoes, kind)  # type: ignore[assignment]

    def hello(self) -> None:
        """Say who it is."""
        self._send(
            Hello(
                name=self.name, program="spawned", versions={}, hostname="here", device="cpu", device_name="CPU",
                device_uuid="",
            ),
            (),
        )  # fmt: skip

    def _send(self, message: Message, buffers: Sequence[memoryview]) -> None:
        self.line.reply(message, buffers)

    # ----------------------------------------------------------------------------------------------- what it may do next

    @property
    def steps(self) -> Any:
        """The step runner."""
        return self.loop._steps

    @property
    def replica(self) -> CountingReplica | None:
        """The replica of the run it has."""
        run: Any = self.loop._run
        return None if run is None else run.replica

    def heads(self) -> list[Channel]:
        """Channels on which something can be heard now."""
        if not self.alive or self.line.away or self.blocked:
            return []
        return [channel for channel, queue in sorted(self.line.out.items()) if queue]

    def can_work(self) -> bool:
        """Whether its loop has something to do."""
        return self.alive and not self.blocked and self.loop._has_work()

    def can_go_on(self) -> bool:
        """Whether the group that it waits for is complete."""
        order = self.seat.order
        if not self.alive or not self.blocked or order is None or self.seat.broken:
            return False
        if self.blocked == "form":
            return self.groups.met.get(order.generation, set()) >= set(order.members)
        return set(self.groups.brought.get((order.generation, self._shard().step), {})) == set(order.members)

    def can_wake(self, gone: set[str]) -> bool:
        """Whether what it waits for inside a group cannot come: an abort is here, or a member is gone."""
        order = self.seat.order
        if not self.alive or not self.blocked or order is None:
            return False
        aborts = [p.message for p in self.line.out.get(Channel.CONTROL, ()) if isinstance(p.message, Abort)]
        heard = not self.line.away and any(abort.generation >= order.generation for abort in aborts)
        return heard or bool(gone & set(order.members))

    def _shard(self) -> BatchShard:
        shard: BatchShard = self.steps._pending.current().todo[0][0]
        return shard

    # ------------------------------------------------------------------------------------------------------ what it does

    def hear(self, channel: Channel) -> None:
        """Take the next message of a channel."""
        parcel = self.line.out[channel].popleft()
        if isinstance(parcel.message, Abort):
            self.seat.abort(parcel.message.generation)
        if isinstance(parcel.message, FormGroup):
            self._meet(parcel.message)
            return
        self.loop._handle(*parcel.opened())

    def _meet(self, order: FormGroup) -> None:
        self.seat.order, self.seat.broken = order, order.generation <= self.seat.generation
        if self.seat.broken:
            self.loop._handle(order, memoryview(b""))
            return
        self.blocked = "form"
        self.groups.met.setdefault(order.generation, set()).add(self.name)

    def work(self) -> None:
        """Do one piece of work; in a group, bring its part and wait for the others."""
        step = self.steps._pending.current()
        order = self.seat.order
        in_group = order is not None and step is not None and step.todo and not self.steps._can_apply(step)
        if in_group and not self.loop._leaving and not self.seat.broken:
            message, load = step.todo[0]
            ids = tuple(ids_of(load())[: message.rows])
            self.groups.brought.setdefault((order.generation, message.step), {})[self.name] = ids
            if self.replica is not None and self.replica.fails == "nan":
                self.groups.refused.add((order.generation, message.step))
            self.blocked = "sum"
            return
        self.turn()

    def may_fail(self, failure: str) -> bool:
        """Whether the user's code can do this in the next piece of work."""
        step = self.steps._pending.current()
        if not self.can_work() or step is None or self.loop._leave_deadline is not None or step.has_parameters:
            return False
        in_shard = failure in ("forward", "nan")
        if (
            step.todo and step.todo[0][0].solo and self.seat.order is not None
        ):  # it votes, and applies in the same piece of work
            return True
        return in_shard is bool(step.todo) and in_shard is not self.steps._can_apply(step)

    def fail(self, failure: str) -> None:
        """Do the next piece of work, in which the user's code does this."""
        assert self.replica is not None
        self.replica.fails = failure
        if failure == "forward":
            self.turn()
        else:
            self.work()

    def go_on(self, broken: bool) -> None:
        """The group has what this worker waits for, or never will."""
        if broken:
            self.seat.broken = True
        was, self.blocked = self.blocked, ""
        if was == "form":
            self.loop._handle(self.seat.order, memoryview(b""))  # type: ignore[arg-type]
        else:
            self.turn()

    def turn(self) -> None:
        """One turn of the loop, after it has taken what came."""
        self.loop._turn()

    def end(self) -> None:
        """The process ends."""
        self.alive = False
        self.line.out.clear()
