"""Which session a connection belongs to: the listener's judgement of an `Attach`.

Knows identities and sessions by their records; does no I/O. A session is found by its id and shown to be meant by its
identity, compared in constant time; a new session takes the place of an older one of the same identity once it stands.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from guava_nb.errors import JoinRefused
from guava_nb.link.lane import BULK, CONTROL
from guava_nb.link.session import Session
from guava_nb.protocol.messages import Attach, Refused

__all__ = ["MEASURE", "REPORT", "SESSION_OVER", "SESSION_UNKNOWN", "WHEEL", "Registry", "RefusedJoin"]

REPORT, MEASURE, WHEEL = "report", "measure", "wheel"  # visits without a session
SESSION_OVER, SESSION_UNKNOWN = "closed", "unknown"  # codes of refusals
_SESSION_ID_BYTES, _IDENTITY_BYTES = 16, 32
#: Open sessions of one listener: as many as a session may have workers. Each holds two sockets and their threads.
MOST_SESSIONS = 4096
#: What is remembered of sessions that are over: why, and of which identity.
_MAX_REMEMBERED = 1024
_S = TypeVar("_S", bound=Session)
_Value = TypeVar("_Value")
_JOIN_AGAIN = "run the worker's cell again with the newest join code"


class RefusedJoin(JoinRefused):
    """The listener's no, with the record that tells the dialler."""

    def __init__(self, code: str, reason: str, next_step: str = _JOIN_AGAIN) -> None:
        """Keep the record; `code` is for programs, the rest for people."""
        super().__init__(reason, code)
        self.record = Refused(code, reason, next_step)


class Registry(Generic[_S]):
    """Sessions of one listener, live and lately closed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[bytes, _S] = {}
        # Digests of identities to the ids of their newest sessions: of those that live none is forgotten, and of those over some.
        self._by_identity: dict[bytes, bytes] = {}
        self._past: OrderedDict[bytes, bytes] = OrderedDict()
        self._closed: OrderedDict[bytes, str] = OrderedDict()

    def sessions(self) -> list[_S]:
        """All sessions that are not closed."""
        with self._lock:
            return list(self._live.values())

    def check(self, attach: Attach) -> None:
        """Judge the form of an `Attach`.

        Raises:
            RefusedJoin: it cannot be meant.
        """
        if len(attach.session_id) != _SESSION_ID_BYTES or len(attach.identity) != _IDENTITY_BYTES:
            raise RefusedJoin("malformed", "session id or identity have the wrong length", "update guava-nb there")
        if attach.purpose not in (CONTROL, BULK, REPORT, MEASURE, WHEEL):
            raise RefusedJoin(
                "purpose", f"connections for {attach.purpose[:20]!r} are not known", "update guava-nb here"
            )

    def find(self, attach: Attach) -> _S | None:
        """Find the session that a connection wants to belong to.

        Returns:
            None when it begins a new session.

        Raises:
            RefusedJoin: unknown, over, another's, or older than the connection that stands.
        """
        with self._lock:
            session = self._live.get(attach.session_id)
            over = self._closed.get(attach.session_id)
            is_full = len(self._live) >= MOST_SESSIONS
            is_replaced = self._newest(attach.identity) not in (b"", attach.session_id)
        if session is None:
            if over is not None:
                raise RefusedJoin("replaced" if is_replaced else SESSION_OVER, f"this session is over: {over}")
            if attach.purpose == CONTROL and attach.incarnation == 0:
                if is_full:
                    raise RefusedJoin(
                        "full",
                        f"{MOST_SESSIONS} workers and programs are connected here, and no more are taken",
                        "end some of them, then run the cell again",
                    )
                return None
            raise RefusedJoin(SESSION_UNKNOWN, "this session is not known here, because the listener was started anew")
        if not hmac.compare_digest(session.identity, attach.identity):
            raise RefusedJoin("identity", "this session belongs to another identity")
        if attach.incarnation < session.incarnation(attach.purpose):
            raise RefusedJoin("stale", "a newer connection of this session is open already")
        return session

    def add(self, session: _S) -> bool:
        """Take a new session in; whether its identity was seen before."""
        with self._lock:
            self._live[session.session_id] = session
            return bool(self._newest(session.identity))

    def promote(self, session: _S) -> _S | None:
        """The session stands: it is its identity's from now on.

        Returns:
            The live session that had the identity until now.
        """
        with self._lock:
            digest = _digest(session.identity)
            older = self._live.get(self._by_identity.get(digest, b""))
            self._past.pop(digest, None)
            self._by_identity[digest] = session.session_id
        return older if older is not session else None

    def forget(self, session: _S) -> None:
        """The session is over; its id stays known for a while, to tell a late dialler why."""
        with self._lock:
            self._live.pop(session.session_id, None)
            digest = _digest(session.identity)
            if self._by_identity.get(digest) == session.session_id:
                _remember(self._past, digest, self._by_identity.pop(digest))
            _remember(self._closed, session.session_id, str(session.close_cause))

    def session(self, session_id: bytes) -> _S | None:
        """Return the session of this id; None when it is over, or there was none."""
        with self._lock:
            return self._live.get(session_id)

    def session_id_of(self, identity: bytes) -> bytes:
        """Id of the newest session of an identity, b"" when there was none."""
        with self._lock:
            return self._newest(identity)

    def _newest(self, identity: bytes) -> bytes:
        digest = _digest(identity)
        return self._by_identity.get(digest) or self._past.get(digest, b"")


def _digest(identity: bytes) -> bytes:
    # Looking up a digest tells nothing about how much of a guessed identity was right.
    return hashlib.sha256(identity).digest()


def _remember(known: OrderedDict[bytes, _Value], key: bytes, value: _Value) -> None:
    known[key] = value
    while len(known) > _MAX_REMEMBERED:
        known.popitem(last=False)
