"""Hands the wheel of this very version to who proved the join code and asks for it: so many at once, for so long at most."""

from __future__ import annotations

import contextlib
import threading

from guava_nb.errors import GuavaError
from guava_nb.link.registry import RefusedJoin
from guava_nb.transport.stream import Stream

__all__ = ["WheelDesk"]

_SEATS = 8
#: For a megabyte or two over a bad line. Then the visitor is cut off, and pastes its cell again.
_VISIT_S = 180.0
#: For the visitor to close once it has all.
_LAST_S = 10.0


class WheelDesk:
    """What is handed out, and to how many at once. Thread-safe."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(_SEATS)
        self._wheel = b""

    def offer(self, wheel: bytes) -> None:
        """Hand this out from now on."""
        self._wheel = wheel

    def serve(self, stream: Stream) -> None:
        """Send the wheel as it is, without frames: who asked knows its size and its hash. Ends when the visitor closes.

        Raises:
            RefusedJoin: nothing is offered, or too many fetch it now.
            LinkBroken: the visitor left, or took too long.
        """
        wheel = self._wheel
        if not wheel:
            raise RefusedJoin(
                "no wheel", "this session offers no wheel of guava_nb", "run %guava_up there and paste its newest cell"
            )
        if not self._free.acquire(blocking=False):
            raise RefusedJoin(
                "busy", f"{_SEATS} other notebooks are fetching the wheel of guava_nb", "run the cell again in a minute"
            )
        too_long = threading.Timer(_VISIT_S, stream.shutdown)
        too_long.daemon = True
        too_long.start()
        try:
            stream.send_all((wheel,))
            stream.set_deadline(_LAST_S)
            with contextlib.suppress(GuavaError):
                stream.recv_into(memoryview(bytearray(1)))
        finally:
            too_long.cancel()
            self._free.release()
            stream.close()
