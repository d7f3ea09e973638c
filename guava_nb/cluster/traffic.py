"""Bytes of a session by what they are for, both ways: the words that forecast, budget and figures have in common.

Pure. What is counted is the message with its headers, before encryption.
"""

from __future__ import annotations

from dataclasses import dataclass

from guava_nb.protocol.framing import message_bytes
from guava_nb.protocol.messages import Ack, Channel, Message, RunSpec, counted_as

__all__ = ["KINDS", "NOTHING", "Gauge", "Traffic", "collectives_of", "kind_of"]

#: What bytes are for, in the order of `Traffic`'s tuples.
KINDS = ("sample", "gradient", "activation", "parameter", "control")
_ZERO = (0.0,) * len(KINDS)
_LINK_CHANNELS = {
    Channel.CHECKPOINT: "parameter",
    Channel.GRADIENT: "gradient",
    Channel.ACTIVATION: "activation",
}


def kind_of(channel: Channel, outwards: bool, parameters_come_down: bool, collectives: str = "gradient") -> str:
    """Return what the bytes of a channel are for.

    Args:
        outwards: from the orchestrator to a worker.
        parameters_come_down: the channel of gradients carries parameters outwards (optimizer_site="orchestrator").
        collectives: what a group's operations carry.
    """
    if channel is Channel.COLLECTIVE:
        return collectives
    if channel is Channel.BATCH:
        return "sample" if outwards else "control"
    if channel is Channel.GRADIENT and outwards and parameters_come_down:
        return "parameter"
    return _LINK_CHANNELS.get(channel, "control")


def collectives_of(spec: RunSpec) -> str:
    """Return what a group's operations carry: pipelines and shared layers exchange activations, replicas gradients."""
    shape = spec.parallel
    return "gradient" if shape is None or shape.pp * shape.tp == 1 else "activation"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by kind in the order of `KINDS`: those that go out from the orchestrator, and those that come back."""

    out: tuple[float, ...] = _ZERO
    back: tuple[float, ...] = _ZERO

    @classmethod
    def going(cls, kind: str, nbytes: float) -> Traffic:
        """Bytes of one kind that go out."""
        return cls(out=tuple(nbytes if kind == name else 0.0 for name in KINDS))

    @classmethod
    def coming(cls, kind: str, nbytes: float) -> Traffic:
        """Bytes of one kind that come back."""
        return cls(back=tuple(nbytes if kind == name else 0.0 for name in KINDS))

    @property
    def out_bytes(self) -> float:
        """All that goes out."""
        return sum(self.out)

    @property
    def in_bytes(self) -> float:
        """All that comes back."""
        return sum(self.back)

    @property
    def total_bytes(self) -> float:
        """Both ways."""
        return self.out_bytes + self.in_bytes

    def of(self, kind: str) -> float:
        """Bytes of one kind, both ways."""
        place = KINDS.index(kind)
        return self.out[place] + self.back[place]

    def without(self, *kinds: str) -> Traffic:
        """The same without some kinds: those that the workers exchange directly."""
        return Traffic(
            tuple(0.0 if name in kinds else n for name, n in zip(KINDS, self.out, strict=True)),
            tuple(0.0 if name in kinds else n for name, n in zip(KINDS, self.back, strict=True)),
        )

    def __add__(self, other: Traffic) -> Traffic:
        """The sum of both."""
        return Traffic(
            tuple(a + b for a, b in zip(self.out, other.out, strict=True)),
            tuple(a + b for a, b in zip(self.back, other.back, strict=True)),
        )

    def __mul__(self, factor: float) -> Traffic:
        """So many times the same."""
        return Traffic(tuple(n * factor for n in self.out), tuple(n * factor for n in self.back))

    def record(self) -> dict[str, int]:
        """Return whole bytes under the names of `WireBytes`."""
        kinds = {f"{kind}_bytes": round(self.of(kind)) for kind in KINDS}
        return {"out_bytes": round(self.out_bytes), "in_bytes": round(self.in_bytes), **kinds}


NOTHING = Traffic()


@dataclass(frozen=True, slots=True)
class Gauge:
    """Tells what messages of a run take.

    Attributes:
        parameters_come_down, collectives: see `kind_of`.
    """

    parameters_come_down: bool
    collectives: str

    @classmethod
    def of(cls, spec: RunSpec) -> Gauge:
        """The gauge of a run."""
        return cls(spec.optimizer_site == "orchestrator", collectives_of(spec))

    def out(self, message: Message, payload_bytes: int = 0) -> Traffic:
        """A message to a worker."""
        channel = counted_as(message, payload_bytes)
        kind = kind_of(channel, True, self.parameters_come_down, self.collectives)
        return Traffic.going(kind, message_bytes(message, payload_bytes))

    def back(self, message: Message, payload_bytes: int = 0) -> Traffic:
        """A message from a worker."""
        channel = counted_as(message, payload_bytes)
        kind = kind_of(channel, False, self.parameters_come_down, self.collectives)
        return Traffic.coming(kind, message_bytes(message, payload_bytes))

    def acks(self, out: float, back: float) -> Traffic:
        """So many acknowledgements each way."""
        size = message_bytes(Ack(6, 1000))
        return Traffic.going("control", out * size) + Traffic.coming("control", back * size)
