"""A cluster without a network: worker loops on threads, joined to the cluster by encoded messages in memory.

Everything above the link is real. Faults are exact: "after the n-th message of this type, this worker is gone".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.worker_output import OutputLog
from guava_nb.errors import LinkBroken, LinkClosed
from guava_nb.link.hearing import Silences
from guava_nb.link.lane import Wire
from guava_nb.link.session_events import MessageArrived, SessionClosed, SessionResumed, SessionSuspect
from guava_nb.protocol.framing import message_bytes
from guava_nb.protocol.messages import (
    AskEnergy,
    Channel,
    Energy,
    Hello,
    InterruptCode,
    LineMeasured,
    MeasureLine,
    Message,
    channel_of,
    counted_as,
)
from guava_nb.protocol.tensor_bounds import check_tensors
from guava_nb.replica.model.resident import ResidentParts
from guava_nb.worker.loop import WorkerLoop


def _copy(message: Message, buffers: Sequence[memoryview]) -> tuple[Message, memoryview]:
    """What the wire does: encode, decode, and put the payload into memory of its own."""
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))
    payload = bytearray(b"".join(bytes(b) for b in buffers))
    check_tensors(again, len(payload))
    return again, memoryview(payload)


#: Threads of one process share torch's random state on the CPU; real workers are processes of their own.
RANDOM_STATE = threading.Lock()


_OF: WeakKeyDictionary[Cluster, list[DirectWorker]] = WeakKeyDictionary()


class DirectSession:
    """The orchestrator's end."""

    def __init__(self, worker: DirectWorker) -> None:
        self.session_id = worker.identity
        self.identity = worker.identity
        self.wire = Wire(dict.fromkeys(Channel, 0), dict.fromkeys(Channel, 0))  # counted as a real session counts
        self.saved = Wire(dict.fromkeys(Channel, 0), dict.fromkeys(Channel, 0))
        self.round_trip_s, self.silent_s, self.silences = None, 0.0, Silences()
        self.rate_bytes_s = (None, None)
        self.closed = False
        self._worker = worker
        self._kept: list[tuple[Message, memoryview]] = []

    def send(self, message: Message, channel: int, buffers: Sequence[memoryview] = ()) -> None:
        if self.closed:
            raise LinkClosed("closed")
        assert channel == channel_of(message)
        copy = _copy(message, buffers)
        size = len(copy[1])
        self.wire.out_bytes[counted_as(message, size)] += message_bytes(message, size)
        with self._worker.lock:
            if self._worker.away:
                self._kept.append(copy)
                return
        if not self._worker.dead:
            self._worker.take(*copy)

    def release(self) -> None:
        for message, payload in self._kept:
            self._worker.take(message, payload)
        self._kept.clear()

    def close(self, reason: str = "") -> None:
        self.closed = True
        self._worker.loop.end()


class DirectWorker:
    """One worker loop on its own thread.

    `hook(message)` sees everything it sends, on its own thread, before it goes out; it may call `die` or `go_away`.
    `early_rounds` is released for each round of local steps that is begun before the sum of the one before is here.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        hook: Callable[[DirectWorker, Message], None] = lambda worker, message: None,
        own_model: torch.nn.Module | None = None,
        states: Path | None = None,
    ) -> None:
        self.identity = name.encode()
        self.name = name
        self.dead = self.away = self.left = False
        self.lock, self.early_rounds = threading.RLock(), threading.Semaphore(0)
        self.session = DirectSession(self)
        self.error: BaseException | None = None
        self._cluster = cluster
        self._hook = hook
        self._kept: list[MessageArrived] = []
        _OF.setdefault(cluster, []).append(self)
        own = None if own_model is None else ResidentParts(own_model)
        self.loop = WorkerLoop(self._send, torch.device("cpu"), own, states=states)
        steps, preparation = self.loop._steps, self.loop._preparation
        run_shard = steps._run_shard

        def one_at_a_time(*args: Any) -> Any:
            with RANDOM_STATE:
                return run_shard(*args)

        check = preparation.check_step

        def check_alone(*args: Any) -> Any:
            with RANDOM_STATE:
                return check(*args)

        preparation.check_step = check_alone  # type: ignore[method-assign]
        build = preparation.build

        def build_alone(*args: Any) -> Any:
            with RANDOM_STATE:
                return build(*args)

        begin_early = steps._early.begin

        def begin_alone(*args: Any) -> None:
            with RANDOM_STATE:
                begin_early(*args)
            self.early_rounds.release()

        steps._run_shard, preparation.build = one_at_a_time, build_alone  # type: ignore[method-assign]
        steps._early.begin = begin_alone  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._run, name=f"guava-direct-{name}", daemon=True)

    def start(self) -> DirectWorker:
        self.thread.start()
        hello = Hello(
            name=self.name,
            program="spawned",
            versions={},
            hostname="here",
            device="cpu",
            device_name="CPU",
            device_uuid="",
        )
        self._send(hello, ())
        return self

    def take(self, message: Message, payload: memoryview) -> None:
        """Get a message; a worker without sensors or a line says so, as real ones do, and nobody waits for its figures."""
        if isinstance(message, AskEnergy):
            self._send(Energy(run_id=message.run_id, mark=message.mark, seconds=0.0, why="no sensors here"), ())
        elif isinstance(message, MeasureLine):
            self._send(LineMeasured(message.measuring_id, error="there is no line"), ())
        elif isinstance(message, InterruptCode):
            self.loop.user_code.interrupt(message.request_id)
        elif not self.loop.tokens.post(message):
            self.loop.post(message, payload)

    def _run(self) -> None:
        try:
            self.left = self.loop.run()
        except BaseException as error:
            self.error = error

    def _send(self, message: Message, buffers: Sequence[memoryview]) -> None:
        self._hook(self, message)
        if self.dead:
            return
        copy, payload = _copy(message, buffers)
        self.session.wire.in_bytes[counted_as(message, len(payload))] += message_bytes(message, len(payload))
        event = MessageArrived(self.session, channel_of(message), copy, payload, lambda: None)  # type: ignore[arg-type]
        with self.lock:
            if self.away:
                self._kept.append(event)
                return
        self._cluster.on_event(event)

    def die(self) -> None:
        """Vanish: nothing more goes out, nothing more comes in, the session is over."""
        if not self.dead:
            self.dead = True
            self.loop.end()
            self._cluster.on_event(SessionClosed(self.session, LinkBroken("it vanished"), False))  # type: ignore[arg-type]

    def go_away(self) -> None:
        """Break all connections; both sides keep what they send."""
        with self.lock:
            self.away = True
        self._cluster.on_event(SessionSuspect(self.session, LinkBroken("cut")))  # type: ignore[arg-type]

    def come_back(self) -> None:
        """Resume: everything kept arrives in order."""
        with self.lock:
            self.away = False
            kept, self._kept = self._kept, []
        self._cluster.on_event(SessionResumed(self.session))  # type: ignore[arg-type]
        for event in kept:
            self._cluster.on_event(event)
        self.session.release()


class DirectCluster(Cluster):
    """A cluster whose end is the end of its workers too: a loop that waits on costs every test after this one."""

    def __init__(self) -> None:
        super().__init__(OutputLog(None))

    def close(self) -> None:
        super().close()
        end_workers(self)


def end_workers(cluster: Cluster) -> None:
    """End the loops of all workers of a cluster that has been closed, and wait for them."""
    workers = _OF.pop(cluster, [])
    for worker in workers:
        worker.loop.end()
    for worker in workers:
        if worker.thread.is_alive():
            worker.thread.join(10.0)
            assert not worker.thread.is_alive(), f"{worker.name} works on after the end of its cluster"
        worker.loop.keeper.close()


def make_cluster() -> Cluster:
    return DirectCluster()


def once_after(count: int, kind: type[Message], action: Callable[[Any], None]) -> Callable[[Any, Message], None]:
    """A hook that acts before the `count`-th message of a type goes out, once; `hook.fired` tells whether it did."""
    seen = [0]

    def hook(worker: DirectWorker, message: Message) -> None:
        if isinstance(message, kind):
            seen[0] += 1
            if seen[0] == count:
                hook.fired = True  # type: ignore[attr-defined]
                action(worker)

    hook.fired = False  # type: ignore[attr-defined]
    return hook
