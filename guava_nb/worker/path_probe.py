"""A worker's part in a probe of the direct path: listens, dials, reports. On threads of its own, whatever the loop does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from guava_nb.errors import GuavaError
from guava_nb.link.reachability import ReachListener, dial_all
from guava_nb.protocol.messages import Message, ProbeDial, ProbeEnd, ProbeListen, ProbeListening, ProbeReport

__all__ = ["PathProbe"]

log = logging.getLogger(__name__)


class PathProbe:
    """At most one probe at a time.

    Args:
        send: queues a message for the orchestrator; never blocks.
    """

    def __init__(self, send: Callable[[Message, Sequence[memoryview]], None]) -> None:
        """Listen nowhere yet."""
        self._send = send
        self._lock = threading.Lock()
        self._probe_id = -1
        self._listener: ReachListener | None = None
        self._timer: threading.Timer | None = None

    def post(self, message: Message) -> bool:
        """Take a message, in the thread that reads; returns True when it belongs to a probe."""
        act: Callable[[], None]
        match message:
            case ProbeListen():
                act = lambda: self._listen(message)  # noqa: E731
            case ProbeDial():
                act = lambda: self._dial(message)  # noqa: E731
            case ProbeEnd(probe_id=probe_id):
                act = lambda: self._end(probe_id)  # noqa: E731
            case _:
                return False
        threading.Thread(target=act, name="guava-probe", daemon=True).start()
        return True

    def close(self) -> None:
        """Stop listening."""
        self._end(self._probe_id)

    def _listen(self, order: ProbeListen) -> None:
        self.close()
        try:
            listener = ReachListener(order.secret, order.loopback)
        except (GuavaError, OSError) as error:
            self._send(ProbeListening(order.probe_id, (), str(error)), ())
            return
        with self._lock:
            self._probe_id, self._listener = order.probe_id, listener
            self._timer = threading.Timer(order.timeout_s, self._end, (order.probe_id,))
            self._timer.daemon = True
            self._timer.start()
        self._send(ProbeListening(order.probe_id, listener.addresses), ())

    def _dial(self, order: ProbeDial) -> None:
        self._send(ProbeReport(order.probe_id, dial_all(order.targets, order.timeout_s)), ())

    def _end(self, probe_id: int) -> None:
        with self._lock:
            if probe_id != self._probe_id:
                return
            listener, timer = self._listener, self._timer
            self._listener = self._timer = None
        if timer is not None:
            timer.cancel()
        if listener is not None:
            listener.close()
