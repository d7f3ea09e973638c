"""What compression makes of a run's bytes: as it was in this session, else as trying it on the first batch tells.

A link compresses where that arrives sooner, so it depends on the rate of the line. What was never sent here and cannot be
tried, gradients of a model that was not trained yet, counts in full.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from guava_nb.cluster.traffic import KINDS, Traffic, kind_of
from guava_nb.link.adaptive_compression import MIN_BYTES
from guava_nb.link.session_events import SessionHandle
from guava_nb.protocol.compression import CODECS, compress
from guava_nb.protocol.header import CHUNK_BYTES
from guava_nb.protocol.messages import Channel

__all__ = ["NOT_SQUEEZED", "Squeezed", "Trial", "squeezed_so_far", "tried"]

#: Bytes of a kind from which its share counts as measured.
_MEASURED_BYTES = 1 << 20
#: Part of the time that is left where a link finds that compression pays.
_GAIN = 0.9
_TRIED_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Squeezed:
    """Which part of the bytes of each kind is left, out and back; kinds that were not measured are left out."""

    out: dict[str, float]
    back: dict[str, float]

    def of(self, traffic: Traffic) -> Traffic:
        """What is left of these bytes."""
        return Traffic(
            tuple(n * self.out.get(kind, 1.0) for kind, n in zip(KINDS, traffic.out, strict=True)),
            tuple(n * self.back.get(kind, 1.0) for kind, n in zip(KINDS, traffic.back, strict=True)),
        )


NOT_SQUEEZED = Squeezed({}, {})


def squeezed_so_far(sessions: Iterable[SessionHandle], parameters_come_down: bool) -> Squeezed:
    """Return what compression has left of the bytes of these sessions so far."""
    found: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
    for session in sessions:
        wire, saved = session.wire, session.saved
        for way, sent, spared in ((0, wire.out_bytes, saved.out_bytes), (1, wire.in_bytes, saved.in_bytes)):
            for channel in (Channel.GRADIENT, Channel.BATCH, Channel.CHECKPOINT):
                kind = kind_of(channel, way == 0, parameters_come_down)
                total = found[way].setdefault(kind, [0, 0])
                total[0] += sent[channel]
                total[1] += spared[channel]
    shares = [
        {kind: sent / (sent + spared) for kind, (sent, spared) in way.items() if sent + spared >= _MEASURED_BYTES}
        for way in found
    ]
    return Squeezed(*shares)


@dataclass(frozen=True, slots=True)
class Trial:
    """Some chunks, compressed: the part of the bytes that is left, and how long that took in seconds per byte."""

    share: float
    seconds: float

    @property
    def pays_below_bytes_s(self) -> float:
        """The rate of a line below which compressed chunks arrive sooner; 0: of none."""
        return max(0.0, (_GAIN - self.share) / self.seconds)


def tried(buffers: Sequence[memoryview]) -> Trial | None:
    """Compress some chunks of a message as a link would; None where it would not try."""
    whole = b"".join(bytes(buffer) for buffer in buffers[:64])[: _TRIED_CHUNKS * CHUNK_BYTES]
    if not CODECS or len(whole) < MIN_BYTES:
        return None
    chunks = [whole[at : at + CHUNK_BYTES] for at in range(0, len(whole), CHUNK_BYTES)]
    started = time.perf_counter()
    packed = sum(len(compress([chunk])) for chunk in chunks)
    return Trial(min(1.0, packed / len(whole)), max(1e-12, (time.perf_counter() - started) / len(whole)))
