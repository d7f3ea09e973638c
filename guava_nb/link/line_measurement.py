"""How fast a line is: a visit, proved like every other, that sends bytes without meaning both ways and leaves.

Bursts grow until one takes long enough to be told from noise, so that a slow line is not kept busy and a fast one is not
underrated. Both ends are bounded: what a visitor may ask for, and how long and how many may be there at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from guava_nb.errors import FrameTooLarge, LinkBroken, LinkClosed, LinkTimeout, RemoteProtocolError
from guava_nb.link.handshake import Deadline, attach, receive_record
from guava_nb.link.options import LinkOptions
from guava_nb.link.registry import MEASURE, RefusedJoin
from guava_nb.protocol.framing import UNSEQUENCED, Arrived, Decoder, Limits, OutgoingMessage
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import (
    Attach,
    Channel,
    Filler,
    FlatTensor,
    Goodbye,
    Measure,
    Measured,
    Message,
    Ping,
    Pong,
)
from guava_nb.transport.stream import Stream

__all__ = ["LineFigures", "Measuring", "answer_measuring", "measure_line"]

_PIECE_BYTES = 256 << 10
_FIRST_BURST_BYTES, _LAST_BURST_BYTES, _GROWTH = 64 << 10, 4 << 20, 4
_LONG_ENOUGH_S = 0.5
#: How often a burst is made again that took so long that the line must have stood still.
_AGAIN = 2
_PINGS = 7
#: How long a visit may last, and how many bytes it may cost both ways together.
_VISIT_S = 30.0
_MAX_VISIT_BYTES = 32 << 20
_MAX_VISITORS = 8
_LIMITS = Limits(max_record_bytes=1 << 10, max_payload_bytes=_PIECE_BYTES)


@dataclass(frozen=True)
class LineFigures:
    """What a visit found.

    Attributes:
        round_trip_s: median of some round trips.
        up_bytes_s: from here to the listener.
        down_bytes_s: from the listener to here.
        used_bytes: what the visit cost, both ways together.
    """

    round_trip_s: float
    up_bytes_s: float
    down_bytes_s: float
    used_bytes: int


class Measuring:
    """How many may measure at once. Thread-safe."""

    def __init__(self, seats: int = _MAX_VISITORS) -> None:
        self._free = threading.Semaphore(seats)

    @contextlib.contextmanager
    def seat(self) -> Iterator[None]:
        """Hold one of the seats.

        Raises:
            RefusedJoin: all are taken.
        """
        if not self._free.acquire(blocking=False):
            raise RefusedJoin(
                "busy", "other workers are measuring their lines to this session", "try again in a minute"
            )
        try:
            yield
        finally:
            self._free.release()


class _Talk:
    """Records on one proved connection, both ways, until a deadline.

    Attributes:
        passed_bytes: of filler, both ways.
    """

    def __init__(self, stream: Stream, decoder: Decoder, deadline: Deadline, early: list[Arrived]) -> None:
        self._stream, self._decoder, self._deadline = stream, decoder, deadline
        self._arrived = deque(early)
        self._sequence = 0
        self._filler = memoryview(os.urandom(_PIECE_BYTES))  # nothing on the way can make it smaller
        self.passed_bytes = 0

    def say(self, record: Message, payload: memoryview | None = None) -> None:
        """Send a record."""
        sequenced = type(record) not in UNSEQUENCED
        self._sequence += sequenced
        buffers = () if payload is None else (payload,)
        for frame in OutgoingMessage(record, Channel.CONTROL, self._sequence * sequenced, buffers).frames():
            self._stream.send_all(frame)

    def fill(self, nbytes: int) -> None:
        """Send so many bytes of filler."""
        while nbytes > 0:
            self._deadline.left_s()
            piece = self._filler[: min(nbytes, _PIECE_BYTES)]
            self.say(Filler(FlatTensor("uint8", len(piece))), piece)
            nbytes -= len(piece)
            self.passed_bytes += len(piece)

    def hear(self) -> Message:
        """Wait for the next record."""
        if not self._arrived:
            first, rest = receive_record(self._stream, self._decoder, self._deadline)
            self._arrived.extend((first, *rest))
        arrived = self._arrived.popleft()
        self.passed_bytes += len(arrived.payload)
        return arrived.message


@contextlib.contextmanager
def _ended_in_time(stream: Stream) -> Iterator[None]:
    """Close the stream in the end, and at the latest when a visit is over: who sends to a dead line would wait for long.

    Raises:
        LinkTimeout: the time was over.
    """
    timer = threading.Timer(_VISIT_S, stream.shutdown)
    timer.daemon = True
    timer.start()
    try:
        yield
    except LinkClosed:
        raise LinkTimeout(
            f"{stream.peer} did not finish measuring within {_VISIT_S:g} s: the line is slow or broken"
        ) from None
    finally:
        timer.cancel()
        timer.join()
        stream.close()


def answer_measuring(stream: Stream, decoder: Decoder) -> None:
    """Be the listener's side of a visit, until the visitor leaves; closes the stream.

    Raises:
        FrameTooLarge: it wants more than 32 MiB.
        RemoteProtocolError: it says something else.
        LinkTimeout: it stays too long.
    """
    decoder.limits = _LIMITS
    talk = _Talk(stream, decoder, Deadline(_VISIT_S, "finish measuring", stream.peer), [])
    received = 0
    with _ended_in_time(stream), contextlib.suppress(LinkBroken):
        while not isinstance(record := talk.hear(), Goodbye):
            wanted = record.nbytes if isinstance(record, Measure) else 0
            if talk.passed_bytes + wanted > _MAX_VISIT_BYTES:
                raise FrameTooLarge(f"{stream.peer} wants to measure with more than {_MAX_VISIT_BYTES >> 20} MiB")
            if isinstance(record, Ping):
                talk.say(Pong(record.sent_ns))
            elif isinstance(record, Filler):
                received += record.tensor.numel
            elif isinstance(record, Measure):
                talk.fill(wanted)
                talk.say(Measured(received))
                received = 0
            else:
                raise RemoteProtocolError(f"{stream.peer} came to measure and sent {type(record).__name__}")


def measure_line(
    code: JoinCode,
    options: LinkOptions | None = None,
    on_step: Callable[[str], None] = lambda step: None,
    last_burst_bytes: int = _LAST_BURST_BYTES,
) -> LineFigures:
    """Visit a listener and measure the line to it: about 10 MB on a fast line, less on a slow one.

    Args:
        code: from the listener.
        options: patience.
        on_step: hears what begins: the steps of `attach`, then "line".
        last_burst_bytes: no burst is larger; all together cost up to 2.7 times as much, which a metered line may not want.

    Raises:
        GuavaError: as `guava_nb.link.dialler.dial`; a listener of an older version refuses with JoinRefused.
    """
    options = options or LinkOptions()
    visitor = Attach(
        session_id=bytes(16), identity=secrets.token_bytes(32), purpose=MEASURE, incarnation=0, received={}
    )
    made = attach(code, visitor, options, options.connect_timeout_s, on_step=on_step)
    on_step("line")
    with _ended_in_time(made.stream):
        talk = _Talk(made.stream, made.decoder, Deadline(_VISIT_S, "finish measuring", code.address), made.early)
        round_trip_s = statistics.median(_round_trip_s(talk) for _ in range(_PINGS))
        down_bytes_s = _rate(lambda nbytes: _fetch(talk, nbytes), round_trip_s, last_burst_bytes)
        up_bytes_s = _rate(lambda nbytes: _bring(talk, nbytes), round_trip_s, last_burst_bytes)
        talk.say(Goodbye("measured"))
    return LineFigures(round_trip_s, up_bytes_s, down_bytes_s, talk.passed_bytes)


def _round_trip_s(talk: _Talk) -> float:
    started = time.monotonic()
    talk.say(Ping(time.monotonic_ns()))
    _expect(talk, Pong)
    return time.monotonic() - started


def _fetch(talk: _Talk, nbytes: int) -> None:
    talk.say(Measure(nbytes))
    while not isinstance(record := talk.hear(), Measured):
        if not isinstance(record, Filler):
            raise RemoteProtocolError(f"the listener answered Measure with {type(record).__name__}")


def _bring(talk: _Talk, nbytes: int) -> None:
    talk.fill(nbytes)
    talk.say(Measure(0))
    _expect(talk, Measured)


def _expect(talk: _Talk, kind: type[Message]) -> None:
    record = talk.hear()
    if not isinstance(record, kind):
        raise RemoteProtocolError(f"the listener sent {type(record).__name__} instead of {kind.__name__}")


def _rate(burst: Callable[[int], None], round_trip_s: float, last_burst_bytes: int) -> float:
    """Bytes per second of the first burst that takes long enough, or of the largest.

    A burst takes as many times longer as it is larger than the one before. One that takes longer than that met a break of the
    line, and is made again; else such a line would seem to be many times slower than it is between its breaks. After the first
    one, which a slow line may explain as well, comes a smaller one.
    """
    nbytes, best, again = _FIRST_BURST_BYTES, 0.0, _AGAIN
    while True:
        started = time.monotonic()
        burst(nbytes)
        whole_s = time.monotonic() - started
        took_s = max(
            whole_s - round_trip_s, whole_s / 2
        )  # where round trips vary, the burst may seem to take no time at all
        best = max(best, nbytes / max(took_s, 1e-6))
        if again and took_s > _GROWTH * _LONG_ENOUGH_S:
            again -= 1
            nbytes = nbytes if nbytes > _FIRST_BURST_BYTES else _FIRST_BURST_BYTES // _GROWTH
        elif took_s >= _LONG_ENOUGH_S or nbytes >= last_burst_bytes:
            return best
        else:
            nbytes, best = nbytes * _GROWTH, 0.0
