"""A worker that listens: orchestrators dial it, one after another, and each gets a member of its own.

Who holds the join code may come. While one orchestrator is connected, a second one is told so and sent away; the place of
one whose connections are broken goes to the orchestrator that dials next, because a restarted program is a new one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from guava_nb.errors import LinkBroken, LinkClosed, LinkTimeout, WorkerLost
from guava_nb.link.listener import Listener
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import (
    Event,
    MessageArrived,
    SessionClosed,
    SessionHandle,
    SessionOpened,
    VisitArrived,
)
from guava_nb.link.tunnel_keeper import TunnelKeeper
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import Message
from guava_nb.status import OwnFigures
from guava_nb.worker.worker_session import WorkerSession

__all__ = ["ListeningLoop"]

_BUSY = "this worker works for another orchestrator already; dial again when that one has closed its session"
_REPLACED = "another orchestrator dialled this worker while this one was away, and took its place"
_LOOK_S = 0.25
_TURN_S = 1.0


class ListeningLoop:
    """Listens for orchestrators and works for them in turn.

    Args:
        new_member: makes this worker's end for one session.
        options: patience and sizes.
        host: where to listen; loopback unless told otherwise.
        port: 0 takes a free one.
        tls: encrypt.
    """

    def __init__(
        self,
        new_member: Callable[[], WorkerSession],
        options: LinkOptions,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: bool = True,
    ) -> None:
        self._new_member = new_member
        self._listener = Listener(options, self._on_event, host, port, tls=tls)
        self._lock = threading.Condition()
        self._members: dict[bytes, WorkerSession] = {}
        self._present: SessionHandle | None = None  # the session that is worked for, or waits to be
        self._waiting: queue.SimpleQueue[SessionHandle | None] = queue.SimpleQueue()
        self._working: WorkerSession | None = None
        self._leaving = False

    def open(self) -> JoinCode:
        """Start listening; returns the code for this machine's own address.

        Raises:
            ConfigError: the port is taken or the address is not ours.
        """
        self._listener.start()
        return self._listener.join_code()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._listener.port

    def keeper(
        self, on_notice: Callable[[str], None], patience_s: float, on_code: Callable[[JoinCode], None]
    ) -> TunnelKeeper:
        """Make the keeper of a tunnel that leads here; arguments as for `TunnelKeeper`."""
        return TunnelKeeper(self._listener, on_notice, patience_s, on_code)

    def serve(self, once: bool, patience_s: float | None = None, on_wait: Callable[[], None] = lambda: None) -> str:
        """Work for the orchestrators that dial, one at a time.

        Args:
            once: return when an orchestrator has closed its session; else wait for the next one.
            patience_s: with `once`, how long to wait for another one after the first was lost; None waits without end.
            on_wait: called whenever no orchestrator is connected.

        Returns:
            Why it ended.

        Raises:
            WorkerLost: the orchestrator was lost, and none came within `patience_s`.
        """
        lost: Exception | None = None
        try:
            while not self._leaving:
                on_wait()
                session = self._next(patience_s if once and lost is not None else None)
                if session is None and not self._leaving:
                    raise WorkerLost(
                        f"the orchestrator was lost ({lost}) and none dialled again within {patience_s:g} s; the model is as "
                        "the last committed step left it"
                    ) from lost
                if session is None or session.state == "closed":
                    continue
                try:
                    reason = self._work(session)
                except (LinkBroken, LinkTimeout, LinkClosed) as error:
                    lost = error
                    continue
                if once:
                    return reason
            return "it was asked to leave"
        finally:
            self._leaving = False

    def _next(self, patience_s: float | None) -> SessionHandle | None:
        """Wait for a session, in pieces, so that an interrupt of the main thread is seen everywhere."""
        left = patience_s
        while not self._leaving and (left is None or left > 0):
            try:
                session = self._waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                left = None if left is None else left - _LOOK_S
                continue
            if session is not None:
                return session
        return None

    def _work(self, session: SessionHandle) -> str:
        member = self._new_member()
        with self._lock:
            self._working = self._members[session.session_id] = member
            if self._leaving:
                member.loop.leave("asked to leave")
        if session.state == "closed":  # before its end could be told to the member
            member.loop.end()
        try:
            member.greet(session)
            return member.work()
        finally:
            with self._lock:
                self._working = None
                self._members.pop(session.session_id, None)
                if self._present is session:
                    self._present = None

    def leave(self) -> None:
        """Leave after the step in work and serve no other orchestrator; from any thread."""
        with self._lock:
            self._leaving = True
            if self._working is not None:
                self._working.loop.leave("asked to leave")
        self._waiting.put(None)

    def send(self, message: Message) -> None:
        """Queue a message for the orchestrator that is worked for; does nothing when there is none."""
        member = self._working
        if member is not None:
            member.send(message)

    def figures(self) -> OwnFigures:
        """Return what the worker knows of its work for the orchestrator that is here; nothing when there is none."""
        member = self._working
        return OwnFigures() if member is None else member.figures()

    def close(self) -> None:
        """Stop listening and end what is open; may be called again."""
        self._listener.close("the worker stopped listening")

    # ------------------------------------------------------------------------------------------ events from sessions

    def _on_event(self, event: Event) -> None:
        if isinstance(event, VisitArrived):
            return  # crashes of orchestrators are not reported
        if isinstance(event, SessionOpened):
            self._welcome(event.session)
            return
        with self._lock:
            member = self._members.get(event.session.session_id)
            if isinstance(event, SessionClosed) and self._present is event.session:
                self._present = None
            if not isinstance(event, MessageArrived):
                self._lock.notify_all()
        if member is not None:
            member.on_event(event)

    def _welcome(self, session: SessionHandle) -> None:
        """Let it wait for its turn; `serve` greets it, because only then it is known with what."""
        with self._lock:
            # One program often closes a session and dials again at once: its goodbye may still be on its way.
            busy = not self._lock.wait_for(self._is_free, _TURN_S)
            present = self._present
            if not busy:
                self._present = session
        if busy:
            session.end(LinkClosed(_BUSY), by_peer=False, farewell=_BUSY)
            return
        if present is not None:
            present.end(LinkBroken(_REPLACED), by_peer=False, farewell=_REPLACED)
        self._waiting.put(session)

    def _is_free(self) -> bool:
        return self._present is None or self._present.state != "open"
