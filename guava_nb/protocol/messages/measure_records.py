"""Measuring the line: a visit to a listener, and the order to make one."""

from __future__ import annotations

from typing import ClassVar

from guava_nb.protocol.messages.wire_types import FlatTensor, Message

__all__ = ["Filler", "LineMeasured", "Measure", "MeasureLine", "Measured"]


class Filler(Message, frozen=True):
    """Either side: bytes that mean nothing, to measure the line with."""

    NUMBER: ClassVar[int] = 100

    tensor: FlatTensor


class Measure(Message, frozen=True):
    """Visitor to listener: send me so many bytes of `Filler`, then `Measured`."""

    NUMBER: ClassVar[int] = 101

    nbytes: int


class Measured(Message, frozen=True):
    """Listener to visitor: so much `Filler` came since the last `Measured`."""

    NUMBER: ClassVar[int] = 102

    nbytes: int


class MeasureLine(Message, frozen=True):
    """Orchestrator to worker: visit my listener and measure the line, with bursts of at most so many bytes."""

    NUMBER: ClassVar[int] = 118

    measuring_id: int
    burst_bytes: int


class LineMeasured(Message, frozen=True):
    """Worker to orchestrator: what it found; `error` says why it found nothing."""

    NUMBER: ClassVar[int] = 119

    measuring_id: int
    up_bytes_s: float = 0.0
    down_bytes_s: float = 0.0
    used_bytes: int = 0
    error: str = ""
