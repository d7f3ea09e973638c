"""The side that opens connections: dial a listener, come back when a connection breaks, pay a short visit."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable

from guava_nb.errors import ConfigError, GuavaError, JoinRefused, LinkClosed, VersionMismatch
from guava_nb.link.adaptive_compression import offered
from guava_nb.link.handshake import Attachment, Deadline, attach, receive_record
from guava_nb.link.lane import BULK, CONTROL
from guava_nb.link.options import LinkOptions
from guava_nb.link.session import Session
from guava_nb.link.session_events import Event
from guava_nb.protocol.framing import OutgoingMessage
from guava_nb.protocol.joincode import JoinCode, check_same_session
from guava_nb.protocol.messages import Attach, Channel, Message
from guava_nb.protocol.state import Role

__all__ = ["IDENTITY_BYTES", "Backoff", "DialledSession", "dial", "visit"]

IDENTITY_BYTES = 32
_SESSION_ID_BYTES = 16
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 3.0
_LONGEST_OUTAGE_S = 86400.0  # whatever the listener says
_STEADY_S = 10.0  # a connection that stood for so long makes the next outage a new one


class Backoff:
    """Pauses between attempts: none before the first, then doubling, with jitter so that workers do not come in step.

    Remembers across outages: a tunnel that lets each connection in and cuts it at once is not dialled in a tight loop.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._last_at = 0.0

    def next_s(self, now: float) -> float:
        """Seconds to wait before the next attempt; `now` on the monotonic clock."""
        if now - self._last_at > _STEADY_S:
            self._pause_s = 0.0
        pause_s = self._pause_s
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))
        self._last_at = now + pause_s
        return pause_s * random.uniform(0.5, 1.0)


class DialledSession(Session):
    """A session whose connections this side opens, and opens again. Made by `dial`."""

    role = Role.DIALLER

    def __init__(
        self, code: JoinCode, identity: bytes, options: LinkOptions, on_event: Callable[[Event], None]
    ) -> None:
        """Start with nothing attached; see `dial`.

        Args:
            code, identity, options, on_event: as for `dial`.
        """
        super().__init__(secrets.token_bytes(_SESSION_ID_BYTES), identity, code.address, options, on_event)
        self._code = code
        self._backoff = Backoff()
        self._look_again = threading.Event()
        self._redialler: threading.Thread | None = None
        self._outage_s = 0.0
        self._redirected_at = float("-inf")

    def redirect(self, code: JoinCode) -> None:
        """The same listener is reached by another code now: dial that one, with all patience from here on.

        Raises:
            JoinCodeError: the code is of another listener; nothing has changed.
        """
        check_same_session(self._code, code)
        self._code = code
        self._redirected_at = time.monotonic()
        self._backoff = Backoff()
        self._look_again.set()

    @property
    def waits_s(self) -> float:
        """How long it is dialled again when a connection breaks, in seconds."""
        return max(self._options.grace_s, self._outage_s)

    @property
    def is_tunnelled(self) -> bool:
        """Whether it was let in through a tunnel, whose address may change."""
        return self._outage_s > 0

    def _kept_until(self, lost_at: float) -> float:
        return max(lost_at, self._redirected_at) + self.waits_s

    def connect(self) -> None:
        """Open both connections for the first time.

        Raises:
            GuavaError: as `guava_nb.link.handshake.attach`.
        """
        until = time.monotonic() + self._options.connect_timeout_s
        try:
            first = self._attach(CONTROL, until)
            self._attach(BULK, until)
        except BaseException:
            self.end(LinkClosed("dialling failed"), by_peer=False)
            raise
        self.open(first.attached.resumed)

    def _join(self) -> None:
        super()._join()
        redialler = self._redialler
        if redialler is not None and redialler is not threading.current_thread():
            redialler.join(self._options.linger_s)  # an attempt under way ends by its own deadline

    def _attach(self, name: str, until: float) -> Attachment:
        """Open and adopt one connection."""
        lane = self._lanes[name]
        received, begun = self.fence(name)
        lane.incarnation += 1
        mine = self.progress
        record = Attach(
            session_id=self.session_id,
            identity=self.identity,
            purpose=name,
            incarnation=lane.incarnation,
            received=received,
            last_generation=mine.last_generation,
            last_step=mine.last_step,
            last_kind=mine.last_kind,
            codecs=offered(self._options.compression),
            begun={channel: one.received_bytes for channel, one in begun.items()},
        )
        made = attach(self._code, record, self._options, max(0.05, until - time.monotonic()), begun)
        self._outage_s = min(made.attached.outage_s, _LONGEST_OUTAGE_S)
        try:
            self.adopt(name, made.stream, made.decoder, made.attached, made.early)
        except BaseException:
            made.stream.close()
            raise
        return made

    def _wake(self) -> None:
        with self._events:
            self._look_again.set()
            if self._state == "suspect" and self._redialler is None:
                name = f"guava-redial-{self.session_id.hex()[:8]}"
                self._redialler = threading.Thread(target=self._redial, name=name, daemon=True)
                self._redialler.start()

    def _redial(self) -> None:
        last: GuavaError | None = None
        while (missing := self._missing()) is not None:
            until = self._give_up_at()
            if time.monotonic() >= until:
                self.give_up(last)
                continue
            self._look_again.clear()
            self._look_again.wait(min(self._backoff.next_s(time.monotonic()), until - time.monotonic()))
            try:
                for name in missing:
                    self._attach(name, min(until, time.monotonic() + self._options.connect_timeout_s))
            except (JoinRefused, VersionMismatch) as problem:
                self.end(problem, by_peer=True)
            except GuavaError as problem:
                last = problem

    def _missing(self) -> list[str] | None:
        """Lanes to dial; None when there is nothing to do, which ends the thread that asks."""
        with self._events:
            missing = [name for name, lane in self._lanes.items() if lane.connection is None and lane.goodbye is None]
            if self._state != "suspect" or self._closing or not missing:
                self._redialler = None
                return None
            return missing

    def _give_up_at(self) -> float:
        return self._kept_until(self.lost_at or time.monotonic())


def dial(
    code: JoinCode,
    on_event: Callable[[Event], None],
    options: LinkOptions | None = None,
    identity: bytes | None = None,
) -> DialledSession:
    """Join a listener: prove both sides, open control and bulk, and keep them.

    A connection that breaks later is dialled again for `options.grace_s`, and behind a tunnel for as long as the listener
    then waits; after that the session is closed.

    Args:
        code: from the listener.
        on_event: gets the session's events, `SessionOpened` before this returns.
        options: patience and sizes.
        identity: 32 secret bytes; who shows the same ones takes the place of an earlier session. Drawn when None.

    Raises:
        ConfigError: the identity has another length, or the code's way to connect is not known here.
        AuthenticationError: secret or certificate do not match the code.
        JoinRefused: the listener said no, with its reason.
        VersionMismatch: it speaks another version.
        RemoteProtocolError: what answers there is no listener of ours.
        LinkTimeout: no answer within `options.connect_timeout_s`.
        LinkBroken: it cannot be reached, or left.
    """
    identity = secrets.token_bytes(IDENTITY_BYTES) if identity is None else identity
    if len(identity) != IDENTITY_BYTES:
        raise ConfigError(f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}")
    session = DialledSession(code, identity, options or LinkOptions(), on_event)
    session.connect()
    return session


def visit(code: JoinCode, identity: bytes, message: Message, options: LinkOptions | None = None) -> None:
    """Bring one message without a session, as when a worker's process died and its watcher tells why.

    Args:
        code: from the listener.
        identity: of the session it is about; need not be known there.
        message: a record without payload.
        options: patience.

    Raises:
        GuavaError: as `dial`; the message may not have arrived then.
    """
    options = options or LinkOptions()
    record = Attach(
        session_id=bytes(_SESSION_ID_BYTES), identity=identity, purpose="report", incarnation=0, received={}
    )
    made = attach(code, record, options, options.connect_timeout_s)
    try:
        for frame in OutgoingMessage(message, Channel.CONTROL, 1).frames():
            made.stream.send_all(frame)
        deadline = Deadline(options.connect_timeout_s, "confirm the report", code.address)
        receive_record(made.stream, made.decoder, deadline)  # its goodbye
    finally:
        made.stream.close()
