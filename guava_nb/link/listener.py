"""The side that is dialled: lets in who proves the join code, and keeps the sessions.

One thread accepts and watches over deadlines; each newcomer gets one short-lived thread until it has proved itself and
is attached to its session, or is refused. A refusal is counted, logged in one line, and disturbs no other session.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from guava_nb.errors import (
    AuthenticationError,
    FrameTooLarge,
    GuavaError,
    LinkBroken,
    LinkClosed,
    LinkTimeout,
    RemoteProtocolError,
    VersionMismatch,
)
from guava_nb.link.adaptive_compression import offered
from guava_nb.link.grace_period import GracePeriod
from guava_nb.link.handshake import SHARED_MEMORY, Deadline, prove, receive_record, send_record, unwrap
from guava_nb.link.line_measurement import Measuring, answer_measuring
from guava_nb.link.loglimit import LogLimit
from guava_nb.link.options import LinkOptions
from guava_nb.link.registry import MEASURE, REPORT, WHEEL, RefusedJoin, Registry
from guava_nb.link.session import Session
from guava_nb.link.session_events import Event, VisitArrived
from guava_nb.link.unauthenticated import Unauthenticated
from guava_nb.link.wheel_desk import WheelDesk
from guava_nb.protocol.framing import Decoder, Incoming, Limits
from guava_nb.protocol.handshake_proof import ListenerProof
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Attach, Attached, Goodbye, Vitals
from guava_nb.protocol.state import Event as StateEvent
from guava_nb.protocol.state import Role, State, advance, received
from guava_nb.transport.certificate import Certificate, self_signed_certificate
from guava_nb.transport.descriptors import advice_if_full, make_room
from guava_nb.transport.forks import close_in_children
from guava_nb.transport.stream import Stream
from guava_nb.transport.tcp import TcpStream, listen

__all__ = ["ListenedSession", "Listener", "ListenerStats"]

logger = logging.getLogger(__name__)

_SECRET_BYTES = 16
_REPORT_LIMITS = Limits(max_record_bytes=1 << 20, max_payload_bytes=0)
_SEAT_WAIT_S = 1.0
_ACCEPT_PAUSE_S = 0.05  # when the system has no more file descriptors
_LOOK_EVERY_S = (
    0.05  # at most so often at all sessions: 1,000 that join would have each other looked at a million times
)
_REASONS: tuple[tuple[type[GuavaError], str], ...] = (
    (AuthenticationError, "wrong code"),
    (VersionMismatch, "other version"),
    (FrameTooLarge, "too large"),
    (RemoteProtocolError, "not guava"),
    (LinkTimeout, "too slow"),
    (LinkClosed, "crowded"),
    (LinkBroken, "left"),
)


#: Sessions that end between two calls that give free memory back to the system: the threads of each leave some KB in C's heaps.
_GIVE_BACK_EVERY = 64


def _give_back_memory() -> None:
    """Have C's allocator return what is free: glibc keeps it where threads came and went, and alone has a call for it."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class ListenerStats:
    """Connections so far.

    Attributes:
        accepted: proved and attached.
        refused: all others, by reason.
    """

    accepted: int
    refused: dict[str, int]


class ListenedSession(Session):
    """A session that came to a listener.

    Attributes:
        attaching: held while one of its connections is exchanged: they come in threads of their own.
        seen_before: its identity had a session here before.
    """

    role = Role.LISTENER

    def __init__(
        self,
        attach: Attach,
        peer_address: str,
        options: LinkOptions,
        on_event: Callable[[Event], None],
        on_closed: Callable[[ListenedSession], None],
        on_change: Callable[[], None],
        patience: GracePeriod,
    ) -> None:
        super().__init__(attach.session_id, attach.identity, peer_address, options, on_event)
        self.attaching = threading.Lock()
        self.seen_before = False
        self._closed_hook, self._changed_hook, self._patience = on_closed, on_change, patience

    def _forget(self) -> None:
        self._closed_hook(self)

    def _wake(self) -> None:
        self._changed_hook()

    @property
    def in_outage(self) -> bool:
        """As of any session; the listener knows of outages."""
        lost_at = self.lost_at
        return lost_at is not None and self._patience.kept_until(lost_at) > lost_at + self._options.grace_s

    def _kept_until(self, lost_at: float) -> float:
        return max(self._patience.kept_until(lost_at), *(lane.vouched_until for lane in self._lanes.values()))


class Listener:
    """Accepts sessions on one port.

    Args:
        options: patience and sizes.
        on_event: gets the events of all sessions, from several threads.
        host: where to listen; loopback unless told otherwise.
        port: 0 lets the system choose.
        tls: encrypt; without it, proof and identity hold but every machine on the way can read and change what passes.
        secret: 16 bytes; drawn when None.
        certificate: for TLS; made when None.

    Attributes:
        host: where it listens.
        secret, certificate: by which it is known; None for the certificate without TLS.
        wheels: hands out the wheel of this package, once one is offered there.
        patience: with sessions whose connections broke; the tunnel's keeper tells it of outages, then calls `look`.
    """

    def __init__(
        self,
        options: LinkOptions | None,
        on_event: Callable[[Event], None],
        host: str = "127.0.0.1",
        port: int = 0,
        tls: bool = True,
        secret: bytes | None = None,
        certificate: Certificate | None = None,
    ) -> None:
        self._options = options or LinkOptions()
        self._on_event = on_event
        self.host, self._wanted_port = host, port
        self.secret = secret or secrets.token_bytes(_SECRET_BYTES)
        self.certificate = (certificate or self_signed_certificate()) if tls else None
        self._tls = self.certificate.server_context() if self.certificate else None
        self._fingerprint = self.certificate.fingerprint16 if self.certificate else b""
        self._registry: Registry[ListenedSession] = Registry()
        self._guests = Unauthenticated(self._options.max_unauthenticated)
        self.patience = GracePeriod(self._options.grace_s)
        self._measuring = Measuring()
        self.wheels = WheelDesk()
        self._sockets: list[socket.socket] = []
        self._accepted = self._over = 0
        self._refused: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._log = LogLimit(logger)
        self._closing, self._looked = False, float("-inf")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen from now on.

        Raises:
            ConfigError: the port is taken or the address is not ours.
        """
        self._sockets = listen(self.host, self._wanted_port, self._options.socket)
        self._waker, self._woken = socket.socketpair()
        for sock in (self._waker, self._woken):
            close_in_children(sock)
            sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"guava-listen-{self.port}", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on; 0 before `start`."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets and not self._closing else 0

    def join_code(self, host: str | None = None, port: int | None = None) -> JoinCode:
        """The code that lets a dialler in, for this address or for the one of a tunnel."""
        default = self.host if self.host not in ("", "0.0.0.0", "::") else socket.gethostname()
        return JoinCode.new(host or default, port or self.port, self._fingerprint, self.secret)

    @property
    def sessions(self) -> list[ListenedSession]:
        """Sessions that are not closed, also those that are joining."""
        return self._registry.sessions()

    @property
    def stats(self) -> ListenerStats:
        """Connections so far."""
        with self._counting:
            return ListenerStats(self._accepted, dict(self._refused))

    def close(self, reason: str = "the listener was closed") -> None:
        """Stop listening and end all sessions as `Session.close` does; leaves no thread and no socket behind."""
        if self._closing or self._thread is None:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._guests.dismiss_all(self._options.linger_s)
        sessions = self._registry.sessions()
        for session in sessions:
            session.begin_close(reason)
        until = time.monotonic() + self._options.linger_s
        for session in sessions:
            session.end_close(until, reason)

    # --------------------------------------------------------------------------------------------- the accepting thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for sock in (*self._sockets, self._woken):
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(self._patience_s()):
                    self._ready(key.fileobj)
        for sock in (*self._sockets, self._waker, self._woken):
            sock.close()

    def _ready(self, sock: object) -> None:
        if sock is self._woken:
            self._woken.recv(4096)
            return
        assert isinstance(sock, socket.socket)
        try:
            accepted, _ = sock.accept()
        except (BlockingIOError, ConnectionError):
            return  # it left before we came
        except OSError as problem:
            self._log.warning("cannot accept a connection: %s", advice_if_full(problem) or problem)
            time.sleep(_ACCEPT_PAUSE_S)
            return
        make_room(accepted.fileno())
        seat = None if self._closing else self._guests.sit(_SEAT_WAIT_S)
        if seat is None:
            accepted.close()
            self._count_refusal("crowded")
            return
        name = f"guava-guest-{seat}"
        threading.Thread(target=self._welcome, args=(accepted, seat), name=name, daemon=True).start()

    def _patience_s(self) -> float | None:
        """Give up what is overdue; seconds until the next may be."""
        now = time.monotonic()
        if now < self._looked + _LOOK_EVERY_S:
            return self._looked + _LOOK_EVERY_S - now
        self._looked = now
        shortest: float | None = None
        sessions = self._registry.sessions()
        self.patience.look(now, [session.lost_at for session in sessions if session.state in ("open", "suspect")])
        for session in sessions:
            left_s = session.patience_s(now)
            if left_s is not None and left_s <= 0:
                session.give_up()
            elif left_s is not None:
                shortest = left_s if shortest is None else min(shortest, left_s)
        return shortest

    def look(self) -> None:
        """See anew how long each session may stay away, after `patience` was told something."""
        self._wake()

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except OSError:
            return  # full: it is awake already; closed: no thread to wake

    # ---------------------------------------------------------------------------------------------- a newcomer's thread

    def _welcome(self, sock: socket.socket, seat: int) -> None:
        stream: Stream | None = None
        try:
            stream = TcpStream(sock, self._options.socket)
            self._guests.name(seat, stream)
            self._let_in(stream)
            stream = None  # its session has it
        except GuavaError as problem:
            self._refuse(problem, stream)
        except Exception as problem:
            logger.exception("a connection could not be welcomed")
            self._refuse(LinkBroken(repr(problem)), stream)
        finally:
            if stream is not None:
                stream.close()
            self._guests.leave(seat)

    def _let_in(self, tcp: Stream) -> None:
        deadline = Deadline(self._options.auth_timeout_s, "prove itself", tcp.peer)
        stream, begun = unwrap(tcp, self._tls, deadline)
        prove(stream, ListenerProof(self.secret, self._fingerprint), deadline, begun)
        state = advance(State.PROVING, Role.LISTENER, StateEvent.PROVED)
        decoder = Decoder(Limits.before_join(), SHARED_MEMORY)
        arrived, early = receive_record(stream, decoder, deadline)
        advance(state, Role.LISTENER, received(type(arrived.message)))
        if not isinstance(arrived.message, Attach) or early or decoder.unfinished:
            raise RemoteProtocolError(f"{tcp.peer} sent more than Attach before it was answered")
        try:
            self._attach(stream, decoder, arrived.message, deadline)
        except RefusedJoin as no:
            send_record(stream, no.record)
            raise
        with self._counting:
            self._accepted += 1

    def _attach(self, stream: Stream, decoder: Decoder, attach: Attach, deadline: Deadline) -> None:
        self._registry.check(attach)
        if attach.purpose == REPORT:
            self._take_report(stream, decoder, attach, deadline)
            return
        if attach.purpose == WHEEL:
            self.wheels.serve(stream)
            return
        if attach.purpose == MEASURE:
            with self._measuring.seat():
                send_record(
                    stream,
                    Attached(
                        resumed=False,
                        received={},
                    ),
                )
                answer_measuring(stream, decoder)
            return
        session = self._registry.find(attach)
        if session is None:
            session = self._new_session(attach, stream.peer)
        with session.attaching:
            received_here, begun = session.fence(attach.purpose)
            send_record(stream, self._answer(session, received_here, begun))
            decoder.limits = self._options.limits(attach.session_id, bool(offered(self._options.compression)))
            decoder.carry(begun)
            session.adopt(attach.purpose, stream, decoder, attach)
        self._wake()  # one that came back ends an outage for all
        if session.state == "joining" and session.whole:
            self._open(session)

    def _new_session(self, attach: Attach, peer: str) -> ListenedSession:
        session = ListenedSession(attach, peer, self._options, self._on_event, self._on_over, self._wake, self.patience)
        session.seen_before = self._registry.add(session)
        self._wake()  # its patience has to be watched
        return session

    def _on_over(self, session: ListenedSession) -> None:
        self._registry.forget(session)
        with self._counting:
            self._over += 1
            is_due = self._over % _GIVE_BACK_EVERY == 0
        if is_due:
            _give_back_memory()

    def _answer(self, session: ListenedSession, received_here: dict[int, int], begun: dict[int, Incoming]) -> Attached:
        mine = session.progress
        resumed = session.state != "joining" or session.seen_before
        return Attached(
            resumed=resumed,
            received=received_here,
            last_generation=mine.last_generation,
            last_step=mine.last_step,
            last_kind=mine.last_kind,
            codecs=offered(self._options.compression),
            outage_s=self.patience.outage_s,
            begun={channel: one.received_bytes for channel, one in begun.items()},
        )

    def _open(self, session: ListenedSession) -> None:
        older = self._registry.promote(session)
        if older is not None:
            reason = "a newer process joined with the same identity and took this one's place"
            older.end(LinkBroken(reason), by_peer=False, farewell=reason)
        session.open(session.seen_before)

    def _take_report(self, stream: Stream, decoder: Decoder, attach: Attach, deadline: Deadline) -> None:
        send_record(
            stream,
            Attached(
                resumed=False,
                received={},
            ),
        )
        decoder.limits = _REPORT_LIMITS
        arrived, _ = receive_record(stream, decoder, deadline)
        session_id = self._registry.session_id_of(attach.identity)
        session = self._registry.session(session_id)
        if session is not None and isinstance(arrived.message, Vitals):
            session.vouch()
        self._on_event(VisitArrived(session_id, arrived.message))
        send_record(stream, Goodbye("thank you"))
        stream.close()

    # ---------------------------------------------------------------------------------------------------- being refused

    def _refuse(self, problem: GuavaError, stream: Stream | None) -> None:
        reason = next((name for kind, name in _REASONS if isinstance(problem, kind)), "refused")
        self._count_refusal(reason)
        peer = stream.peer if stream is not None else "a newcomer"
        # Scanners, and tunnels that try whether their address is reached, connect and leave: the user can do nothing about it.
        tell = logger.debug if reason == "left" else self._log.warning
        tell("refused a connection from %s (%s): %s", peer, reason, problem)

    def _count_refusal(self, reason: str) -> None:
        with self._counting:
            self._refused[reason] += 1
