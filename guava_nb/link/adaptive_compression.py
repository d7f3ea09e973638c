"""Whether a payload's chunks go out compressed: measured per channel, and measured again.

The decision is pure (`Payoff`); `AdaptiveCompression` carries it out. Worth it is what arrives sooner: the time to
compress and the smaller chunk over the measured line, against the chunk as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from guava_nb.protocol.compression import CODECS, compress
from guava_nb.protocol.framing import pack_chunk
from guava_nb.protocol.messages import Channel

__all__ = ["CHANNELS", "GAIN", "MIN_BYTES", "MODES", "Frame", "Payoff", "AdaptiveCompression", "offered"]

MODES = ("auto", "on", "off")
#: What may be compressed: batches, gradients and means, parameters and checkpoints. Activations and collectives wait for
#: each other on the way, and control is small.
CHANNELS = frozenset({Channel.GRADIENT, Channel.BATCH, Channel.CHECKPOINT})
MIN_BYTES = 16 << 10

GAIN = 0.9  # below this share of the time it counts as quicker
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 512  # chunks between two trials while it does not pay

Buffers = Sequence[memoryview | bytes]


def offered(mode: str) -> tuple[str, ...]:
    """Return the codecs that this side tells its peer it reads; with "off" none, so that nothing comes compressed either."""
    return () if mode == "off" else CODECS


@dataclass(slots=True)
class Payoff:
    """One channel: whether its next chunk shall be compressed, with "auto"."""

    pays: bool = False
    _pause: int = _FIRST_PAUSE
    _left: int = 0

    def wants(self, rate_bytes_s: float | None) -> bool:
        """Whether to compress the next chunk, be it to find out. Nothing is known before the line was measured."""
        if self.pays:
            return True
        if rate_bytes_s is None:
            return False
        self._left -= 1
        return self._left < 0

    def measured(self, raw_bytes: int, packed_bytes: int, seconds: float, rate_bytes_s: float | None) -> None:
        """A chunk was compressed: learn from it.

        Args:
            raw_bytes, packed_bytes: of the chunk, before and after.
            seconds: that compressing took.
            rate_bytes_s: of the line; None: not measured yet.
        """
        if rate_bytes_s is None:
            return
        self.pays = seconds + packed_bytes / rate_bytes_s < GAIN * raw_bytes / rate_bytes_s
        self._pause = _FIRST_PAUSE if self.pays else min(_LONGEST_PAUSE, 2 * self._pause)
        self._left = 0 if self.pays else self._pause


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that may be made smaller before it goes out: head (header and record) and the pieces of its chunk."""

    channel: Channel
    buffers: Buffers

    def __len__(self) -> int:
        """Its bytes as it is."""
        return sum(map(len, self.buffers))


class AdaptiveCompression:
    """Decides and compresses for one lane. `wants` is called under the lane's lock, `squeeze` without it."""

    def __init__(self, mode: str) -> None:
        """Make one for a mode of `MODES`."""
        self._mode = mode
        self._payoffs = {channel: Payoff() for channel in CHANNELS}

    def wants(self, channel: Channel, nbytes: int, rate_bytes_s: float | None) -> bool:
        """Whether a frame of so many bytes shall pass through `squeeze`.

        Args:
            channel: of the frame.
            nbytes: of its chunk.
            rate_bytes_s: of the line; None: not measured yet.
        """
        if self._mode == "off" or nbytes < MIN_BYTES or channel not in CHANNELS:
            return False
        return self._mode == "on" or self._payoffs[channel].wants(rate_bytes_s)

    def squeeze(self, frame: Frame, rate_bytes_s: float | None) -> Buffers:
        """Return the buffers of the frame as they go out: compressed if that is smaller."""
        raw = sum(map(len, frame.buffers[1:]))
        started = time.perf_counter()
        packed = compress(frame.buffers[1:])
        self._payoffs[frame.channel].measured(raw, len(packed), time.perf_counter() - started, rate_bytes_s)
        return pack_chunk(frame.buffers[0], packed) if len(packed) < raw else frame.buffers
