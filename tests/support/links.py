"""What tests of links share: a recorder of events, numbered messages, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from guava_nb.link.dialler import DialledSession, dial
from guava_nb.link.listener import Listener
from guava_nb.link.options import LinkOptions
from guava_nb.link.session import Session
from guava_nb.link.session_events import Event, MessageArrived, SessionClosed, SessionOpened, VisitArrived
from guava_nb.protocol.messages import Channel, FlatTensor, Leave, Message, SumBucket

QUICK = LinkOptions(heartbeat_s=0.05, silence_s=1.0, grace_s=10.0, connect_timeout_s=5.0, auth_timeout_s=5.0)


class Recorder:
    """Collects events and checks their order per session."""

    def __init__(self, consume: bool = True) -> None:
        self.events: list[Event] = []
        self.problems: list[str] = []
        self.consume = consume
        self._changed = threading.Condition()
        self._stage: dict[int, str] = {}

    def __call__(self, event: Event) -> None:
        with self._changed:
            if not isinstance(event, VisitArrived):
                self._check(event)
            self.events.append(event)
            self._changed.notify_all()
        if self.consume and isinstance(event, MessageArrived):
            event.done()

    def _check(self, event: Event) -> None:
        assert not isinstance(event, VisitArrived)
        stage = self._stage.get(id(event.session), "new")
        if (stage == "new") != isinstance(event, SessionOpened) or stage == "closed":
            self.problems.append(f"{event} while {stage}")
        self._stage[id(event.session)] = "closed" if isinstance(event, SessionClosed) else "open"

    def of(self, kind: type) -> list:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 30.0) -> list:
        """Wait for so many events of a kind; gives all of them."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.of(kind)) >= count, timeout_s)
        assert came, f"only {len(self.of(kind))} of {count} {kind.__name__} came: {self.events[-5:]}"
        return self.of(kind)

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), f"never came true: {self.events[-5:]}"


class World:
    """A listener and sessions dialled to it, closed at the end with nothing left behind."""

    def __init__(
        self, options: LinkOptions = QUICK, tls: bool = True, consume: bool = True, **listener: object
    ) -> None:
        self.options, self.tls = options, tls
        self.here = Recorder(consume)  # the listener's events
        self.there = Recorder(consume)  # the diallers'
        self.dialled: list[DialledSession] = []
        self.listener = Listener(options, self.here, tls=tls, **listener)  # type: ignore[arg-type]
        self.listener.start()

    def dial(self, port: int | None = None, identity: bytes | None = None) -> tuple[DialledSession, Session]:
        """Dial, directly or through a relay's port; gives both ends."""
        code = self.listener.join_code("127.0.0.1", port)
        before = len(self.here.of(SessionOpened))
        ours = dial(code, self.there, self.options, identity)
        self.dialled.append(ours)
        opened = self.here.wait_for(SessionOpened, before + 1)
        return ours, next(event.session for event in opened if event.session.session_id == ours.session_id)

    def close(self) -> None:
        for session in self.dialled:
            session.close("the test is over")
        self.listener.close("the test is over")


@contextlib.contextmanager
def world(*args: object, **kwargs: object) -> Iterator[World]:
    made = World(*args, **kwargs)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
    assert made.here.problems == made.there.problems == []


def own_port() -> int:
    """A port of the loopback that no outgoing connection of a test beside us takes while it is closed for a moment."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def sockets() -> int:
    return len(psutil.Process().net_connections("all"))


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    before_threads, before_sockets = set(threading.enumerate()), sockets()
    yield
    eventually(lambda: set(threading.enumerate()) <= before_threads, "threads are left")
    eventually(lambda: sockets() <= before_sockets, "sockets are left")


def eventually(condition: Callable[[], object], what: str = "never came true", timeout_s: float = 10.0) -> None:
    """Poll what cannot be waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, (what, threading.enumerate())
        time.sleep(0.005)


def numbered(number: int, channel: Channel, nbytes: int) -> tuple[Message, Channel, list[memoryview]]:
    """Arguments of `send` for a message whose payload tells its number and channel."""
    if channel < Channel.COLLECTIVE:
        return Leave(str(number)), channel, []
    payload = memoryview(pattern(number, channel, nbytes))
    half = nbytes // 3
    return (
        SumBucket(run_id="", generation=0, step=number, bucket=0, present=b"", tensor=FlatTensor("uint8", nbytes)),
        channel,
        [payload[:half], payload[half:]],
    )


def pattern(number: int, channel: Channel, nbytes: int) -> bytes:
    return random.Random(number * 8 + channel).randbytes(nbytes)


def number_of(message: Message) -> int:
    return int(message.reason) if isinstance(message, Leave) else message.step  # type: ignore[attr-defined]


def check_exactly_once(recorder: Recorder, channels: list[Channel], count: int, nbytes: Callable[[int], int]) -> None:
    """Every message once, in order per channel, with its own bytes."""
    arrived = recorder.of(MessageArrived)
    for channel in channels:
        mine = [event for event in arrived if event.channel == channel]
        assert [number_of(event.message) for event in mine] == list(range(count)), channel.name
        for event in mine:
            if channel >= Channel.COLLECTIVE:
                number = number_of(event.message)
                assert bytes(event.payload) == pattern(number, channel, nbytes(number)), (channel.name, number)


def rss_bytes() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


CHANNELS = [Channel.CONTROL, Channel.GRADIENT, Channel.BATCH, Channel.CHECKPOINT]
FOREVER = replace(QUICK, silence_s=60.0)


def sizes(number: int) -> int:
    """Payload sizes from nothing to several frames."""
    return [0, 1, 3000, 100_000, 1 << 20, 3_500_000][number % 6]


def send_all(session, count: int, nbytes=sizes) -> None:
    for number in range(count):
        for channel in CHANNELS:
            session.send(*numbered(number, channel, nbytes(number)))


def exchange(made: World, ours, theirs, count: int, nbytes=sizes) -> None:
    """Send both ways at once; check that each message came once, in order, whole."""
    with ThreadPoolExecutor(2) as pool:
        for sent in [pool.submit(send_all, session, count, nbytes) for session in (ours, theirs)]:
            sent.result()
    for recorder in (made.here, made.there):
        recorder.wait_for(MessageArrived, count * len(CHANNELS), 60)
        check_exactly_once(recorder, CHANNELS, count, nbytes)


def exchange_the_rest(made: World, theirs, count: int) -> None:
    send_all(theirs, count)
    for recorder in (made.here, made.there):
        recorder.wait_for(MessageArrived, count * len(CHANNELS), 60)
        check_exactly_once(recorder, CHANNELS, count, sizes)


def exchange_done(made: World, count: int) -> None:
    for recorder in (made.here, made.there):
        recorder.wait_for(MessageArrived, count * len(CHANNELS), 60)
        check_exactly_once(recorder, CHANNELS, count, sizes)
