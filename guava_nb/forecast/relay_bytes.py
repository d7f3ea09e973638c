"""What a group's operations take at the hub: up from every rank, and down to every rank that gets something.

Pure: sizes and numbers of ranks in, bytes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from guava_nb.cluster.traffic import NOTHING, Gauge, Traffic
from guava_nb.protocol.messages import CallSpec, FlatTensor, Message, Parcel, Piece

__all__ = ["Relayed"]

#: Payload of one message of the backend.
_CHUNK_BYTES = 1 << 20
#: Acknowledgements of a message: most go in company.
_ACKS = 0.5
_GROUP = "run-1/1/0/mesh_dim"
_CALL = CallSpec("all_reduce", "sum", "float32", (100_000,))


@dataclass(frozen=True, slots=True)
class Relayed:
    """Operations of one group.

    Attributes:
        gauge: of the run.
        ranks: of the group.
    """

    gauge: Gauge
    ranks: int

    def _split(self, nbytes: float, first: Message, other: Message, up: bool) -> Traffic:
        """A tensor in messages of a chunk each."""
        chunks = max(1, -(-int(nbytes) // _CHUNK_BYTES))
        weigh = self.gauge.back if up else self.gauge.out
        return (
            weigh(first, int(nbytes))
            + weigh(other) * (chunks - 1)
            + self.gauge.acks(_ACKS if up else 0.0, 0.0 if up else _ACKS)
        )

    def sent(self, nbytes: float) -> Traffic:
        """A tensor from one rank to another."""
        record = Parcel(
            group=_GROUP,
            source=0,
            target=1,
            tag=0,
            number=1000,
            offset=100_000,
            total=100_000,
            tensor=FlatTensor("float32", 100_000),
        )
        return self._split(nbytes, record, record, True) + self._split(nbytes, record, record, False)

    def _up(self, nbytes: float) -> Traffic:
        tensor = FlatTensor("float32", 100_000)
        plain = Piece(
            group=_GROUP, sequence=1000, target=-1, source=0, offset=100_000, total=100_000, tensor=tensor, reduce="sum"
        )
        return self._split(
            nbytes,
            Piece(
                group=_GROUP,
                sequence=1000,
                target=-1,
                source=0,
                offset=0,
                total=100_000,
                tensor=tensor,
                reduce="sum",
                call=_CALL,
            ),
            plain,
            True,
        )

    def _down(self, nbytes: float) -> Traffic:
        plain = Piece(
            group=_GROUP,
            sequence=1000,
            target=-1,
            source=0,
            offset=100_000,
            total=100_000,
            tensor=FlatTensor("float32", 100_000),
            reduce="sum",
        )
        return self._split(nbytes, plain, plain, False)

    def all_reduce(self, nbytes: float) -> Traffic:
        """Every rank sends a tensor and gets the sum."""
        return NOTHING if self.ranks < 2 else (self._up(nbytes) + self._down(nbytes)) * self.ranks

    def broadcast(self, nbytes: float) -> Traffic:
        """One rank's tensor to all others, who only say that they have called."""
        if self.ranks < 2:
            return NOTHING
        return self._up(nbytes) + (self._up(0) + self._down(nbytes)) * (self.ranks - 1)

    def all_gather(self, nbytes: float) -> Traffic:
        """Every rank sends so many bytes and gets those of all others."""
        return NOTHING if self.ranks < 2 else (self._up(nbytes) + self._down(nbytes) * (self.ranks - 1)) * self.ranks

    def reduce_scatter(self, nbytes: float) -> Traffic:
        """Every rank sends all of a tensor, in parts, and gets its part of the sum."""
        if self.ranks < 2:
            return NOTHING
        part = nbytes / self.ranks
        return (self._up(part) * self.ranks + self._down(part)) * self.ranks
