"""What compression makes of a run's bytes: as it was in this session, else as trying it on the first batch tells.

A link compresses where that arrives sooner, so it depends on the rate of the line. What was never sent here and cannot be
tried, gradients of a model that was not trained yet, counts in full.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from guava_nb.cluster.seat_sessions import Counted
from guava_nb.cluster.traffic import KINDS, Traffic, kind_of
from guava_nb.config import DistributedConfig
from guava_nb.config.units import show_bytes
from guava_nb.data.codec import pack
from guava_nb.data.split import RowSplitter
from guava_nb.forecast.run_facts import RunFacts
from guava_nb.link.adaptive_compression import CHANNELS, GAIN, MIN_BYTES
from guava_nb.protocol.compression import CODECS, compress
from guava_nb.protocol.header import CHUNK_BYTES

__all__ = ["NOT_SQUEEZED", "Squeezed", "squeezed_in", "squeezed_so_far"]

#: Bytes of a kind from which its share counts as measured.
_MEASURED_BYTES = 1 << 20
_TRIED_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Squeezed:
    """Which part of the bytes of each kind is left, out and back; kinds that were not measured are left out."""

    out: dict[str, float]
    back: dict[str, float]

    def of(self, traffic: Traffic) -> Traffic:
        """What is left of these bytes."""
        ways = ((traffic.out, self.out), (traffic.back, self.back))
        return Traffic(*(tuple(n * left.get(k, 1.0) for k, n in zip(KINDS, way, strict=True)) for way, left in ways))


NOT_SQUEEZED = Squeezed({}, {})


def squeezed_so_far(sessions: Iterable[Counted], parameters_come_down: bool) -> Squeezed:
    """Return what compression has left of the bytes of these sessions so far."""
    found: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
    for session in sessions:
        wire, saved = session.wire, session.saved
        for way, sent, spared in ((0, wire.out_bytes, saved.out_bytes), (1, wire.in_bytes, saved.in_bytes)):
            for channel in CHANNELS:
                total = found[way].setdefault(kind_of(channel, way == 0, parameters_come_down), [0, 0])
                total[0] += sent[channel]
                total[1] += sent[channel] + spared[channel]
    return Squeezed(*({kind: n / of for kind, (n, of) in way.items() if of >= _MEASURED_BYTES} for way in found))


def squeezed_in(
    run: RunFacts, config: DistributedConfig, rate_bytes_s: float | None, so_far: Squeezed
) -> tuple[Squeezed, list[str]]:
    """Return what compression will leave of a run's bytes, and the sentence on it.

    Args:
        rate_bytes_s: of the lines out; None: not measured.
        so_far: what it has left in this session.
    """
    if config.compression == "off":
        return NOT_SQUEEZED, []
    if measured := ", ".join(sorted({*so_far.out, *so_far.back})):
        return so_far, [f"Compression as it was in this session so far ({measured}); all else counts in full."]
    share, pays_below = _tried(run)
    if not pays_below:
        return NOT_SQUEEZED, ["Counted without compression, which would not make these batches smaller."]
    told = f"samples compress to {share:.0%}, which a line slower than {show_bytes(round(pays_below))}/s uses"
    if config.compression == "on" or (rate_bytes_s is not None and rate_bytes_s < pays_below):
        return Squeezed({"sample": share}, {}), [
            f"Compression is reckoned for samples: {told}; all else counts in full."
        ]
    return NOT_SQUEEZED, [f"Counted without compression: {told}; gradients and states may take less, too."]


def _tried(run: RunFacts) -> tuple[float, float]:
    """Compress some chunks of what a worker gets of the first batch, as a link would.

    Returns:
        The part of the bytes that is left, and the rate of a line in bytes a second below which compressed chunks arrive
        sooner; 0: of none, or a link would not try.
    """
    first = run.train.first
    if first is None or not CODECS:
        return 1.0, 0.0
    batch = first.batch
    splitter = RowSplitter(run.plan.split_fn, run.plan.feed.reading)
    if run.spec.parallel is None and not first.source and not splitter.problem:
        rows = min(first.rows, max(1, round(run.train.batch_rows / run.workers)))
        batch = splitter.split(batch, [(0, rows)], first.rows)[0]
    _, buffers = pack(batch)
    whole = b"".join(bytes(buffer) for buffer in buffers[:64])[: _TRIED_CHUNKS * CHUNK_BYTES]
    if len(whole) < MIN_BYTES:
        return 1.0, 0.0
    started = time.perf_counter()
    packed = sum(len(compress([whole[at : at + CHUNK_BYTES]])) for at in range(0, len(whole), CHUNK_BYTES))
    seconds = max(1e-12, (time.perf_counter() - started) / len(whole))
    share = min(1.0, packed / len(whole))
    return share, max(0.0, (GAIN - share) / seconds)
