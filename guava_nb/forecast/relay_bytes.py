"""What a group's operations take at the hub: up from every rank, and down to every rank that gets something.

Pure: sizes and numbers of ranks in, bytes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from guava_nb.backend.operation import CHUNK_BYTES
from guava_nb.cluster.traffic import NOTHING, Traffic
from guava_nb.forecast.run_facts import RunFacts
from guava_nb.protocol.messages import CallSpec, FlatTensor, Message, Parcel, Piece

__all__ = ["Operation", "Relayed"]

#: Acknowledgements of a message: most go in company.
_ACKS = 0.5
_TENSOR = FlatTensor("float32", 100_000)
_KNOWN: dict[str, Any] = {"group": "run-1/1/0/mesh_dim", "offset": 100_000, "total": 100_000, "tensor": _TENSOR}
_CALL = CallSpec("all_reduce", "sum", "float32", (100_000,))


@dataclass(frozen=True, slots=True)
class Relayed:
    """Operations of one group of a run; a group of one rank does none.

    Attributes:
        ranks: of the group.
    """

    run: RunFacts
    ranks: int

    def all_of(self, operations: Iterable[Operation], times: float) -> Traffic:
        """Operations one after the other, each with so many times its bytes."""
        return sum((does(self, nbytes * times) for does, nbytes in operations), NOTHING)

    def _cut(self, way: Callable[..., Traffic], kind: type[Message], nbytes: float, **first: Any) -> Traffic:
        """A tensor in messages of a chunk each; `first`: what only the first one says."""
        further = max(0, -(-int(nbytes) // CHUNK_BYTES) - 1)
        return way(kind, int(nbytes), **_KNOWN, **first) + way(kind, **_KNOWN) * further

    def sent(self, nbytes: float) -> Traffic:
        """A tensor from one rank to another."""
        both = self._cut(self.run.back, Parcel, nbytes) + self._cut(self.run.out, Parcel, nbytes)
        return both + self.run.acks(_ACKS, _ACKS)

    def _up(self, nbytes: float) -> Traffic:
        return self._cut(self.run.back, Piece, nbytes, reduce="sum", call=_CALL) + self.run.acks(_ACKS, 0.0)

    def _down(self, nbytes: float) -> Traffic:
        return self._cut(self.run.out, Piece, nbytes, reduce="sum") + self.run.acks(0.0, _ACKS)

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


#: What ranks do, a method of `Relayed`, and of how many bytes, of one row perhaps.
Operation = tuple[Callable[[Relayed, float], Traffic], float]
