"""Workers that listen and that the orchestrator dialled: their sessions, until the orchestrator closes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import LinkTimeout
from guava_nb.link.dialler import DialledSession, dial
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.joincode import JoinCode

__all__ = ["DialledWorkers"]

#: For what was sent before the goodbye, all workers together.
_LINGER_S = 2.0


class DialledWorkers:
    """One session per join code. A code names a listener by its secret, wherever its address leads."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, DialledSession] = {}

    def join(self, codes: Sequence[JoinCode], cluster: Cluster, options: LinkOptions) -> list[str]:
        """Dial those that are not connected; returns the workers' names in the order of the codes.

        Raises:
            GuavaError: one cannot be reached or sent us away.
        """
        return [self._join(code, cluster, options) for code in codes]

    def _join(self, code: JoinCode, cluster: Cluster, options: LinkOptions) -> str:
        """Dial, and wait for the worker's hello, which is on its way when the session stands."""
        session = self._sessions.get(code.secret)
        if session is None or session.state == "closed":
            session = self._sessions[code.secret] = dial(code, cluster.on_event, options)
        else:
            session.redirect(code)  # a tunnel may have got another address
        rank = cluster.wait_for_seat(session, options.connect_timeout_s)
        if rank is None:
            cause = session.close_cause
            session.close("no hello came")
            self._sessions.pop(code.secret, None)
            raise cause or LinkTimeout(
                f"{code.address} accepted the connection and sent no hello within {options.connect_timeout_s:g} s. Either no "
                "worker serves there now (call start_training or start_service there), or the code is of an orchestrator: give "
                "it to %guava_worker"
            )
        return cluster.name(rank)

    def close(self, reason: str) -> None:
        """End all sessions as `Session.close` does, together."""
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            session.begin_close(reason)
        until = time.monotonic() + _LINGER_S
        for session in sessions:
            session.end_close(until, reason)
