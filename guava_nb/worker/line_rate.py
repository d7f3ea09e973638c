"""A worker's part in measuring its line: visits the orchestrator's listener when asked. On a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from guava_nb.errors import GuavaError
from guava_nb.link.line_measurement import measure_line
from guava_nb.link.options import LinkOptions
from guava_nb.protocol.joincode import JoinCode
from guava_nb.protocol.messages import LineMeasured, MeasureLine, Message

__all__ = ["LineProbe"]


class LineProbe:
    """At most one visit at a time, each ended by the time that a visit has.

    Args:
        code: where the orchestrator listens now; None for a worker that is dialled.
        options: patience.
        send: queues a message for the orchestrator; never blocks.
    """

    def __init__(
        self,
        code: Callable[[], JoinCode | None],
        options: LinkOptions,
        send: Callable[[Message, Sequence[memoryview]], None],
    ) -> None:
        """Measure nothing yet."""
        self._code, self._options, self._send = code, options, send
        self._busy = threading.Lock()

    def post(self, message: Message) -> bool:
        """Take a message, in the thread that reads; returns True when it asks for a visit."""
        if not isinstance(message, MeasureLine):
            return False
        threading.Thread(target=self._answer, args=(message,), name="guava-line", daemon=True).start()
        return True

    def _answer(self, order: MeasureLine) -> None:
        self._send(self._measured(order), ())

    def _measured(self, order: MeasureLine) -> LineMeasured:
        code = self._code()
        if code is None:
            return LineMeasured(order.measuring_id, error="this worker listens and has no address to dial back to")
        if not self._busy.acquire(blocking=False):
            return LineMeasured(order.measuring_id, error="it is being measured already")
        try:
            found = measure_line(code, self._options, last_burst_bytes=order.burst_bytes)
        except (GuavaError, OSError) as error:
            return LineMeasured(order.measuring_id, error=str(error))
        finally:
            self._busy.release()
        return LineMeasured(order.measuring_id, found.up_bytes_s, found.down_bytes_s, found.used_bytes)
