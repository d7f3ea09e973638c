"""What every stream of bytes can do.

Knows bytes, deadlines and ends; knows nothing of messages. One thread reads; any number of threads may write, one at a
time (the caller holds a lock). `shutdown` may come from any thread and wakes both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Union

__all__ = ["Buffer", "Stream", "flatten"]

Buffer = Union[bytes, bytearray, memoryview]  # noqa: UP007 - an alias is evaluated at run time


class Stream(ABC):
    """A two-way stream of bytes between two parties.

    Attributes:
        local: name of this end, for messages to people ("127.0.0.1:40112", "[::1]:40112", "memory").
        peer: name of the other end.
    """

    local: str = "?"
    peer: str = "?"

    @abstractmethod
    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Send these bytes in order; returns when the system took all of them.

        Raises:
            LinkBroken: the peer or the network is gone; how much arrived is unknown.
            LinkClosed: this side was shut down.
        """

    @abstractmethod
    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes and put them at the start of `view`.

        Args:
            view: writable bytes, not empty.

        Returns:
            How many bytes came; 0 when the peer ended the stream.

        Raises:
            LinkTimeout: no byte came within the receive deadline.
            LinkBroken: the connection broke.
            LinkClosed: this side was shut down.
        """

    @abstractmethod
    def can_send_now(self) -> bool:
        """Whether a few kilobytes would go at once; also True when sending would fail at once."""

    @abstractmethod
    def set_deadline(self, recv_s: float | None) -> None:
        """Let each later wait of `recv_into` last at most `recv_s` seconds; None waits for ever."""

    @abstractmethod
    def shutdown(self) -> None:
        """End both directions and wake every thread that waits here or at the other end. Idempotent, from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Shut down and give back what the system lent. Call it when no thread waits here any more."""


def flatten(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Give plain byte views of all buffers that are not empty, copying nothing."""
    views = (memoryview(buffer) for buffer in buffers)
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views if view.nbytes]
