"""Process groups of workers: who belongs to one, and which workers reach each other."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from guava_nb.protocol.messages.wire_types import Message, Tree

__all__ = ["FormGroup", "GroupFormed", "ProbeAddress", "ProbeAnswer", "ProbeDial", "ProbeEnd", "ProbeListen"]
__all__ += ["ProbeListening", "ProbeReport", "ProbeTarget"]


class FormGroup(Message, frozen=True, kw_only=True):
    """Orchestrator to worker: become this rank of a process group; it is good for one generation.

    Attributes:
        name: prefix of everything that belongs to the group, new for every generation.
        rank: the receiver's rank in the group.
        members: names of all members, in order of rank.
        backend: torch.distributed's name: "guava", "gloo" or "nccl".
        timeout_s: for the meeting of all members.
        interface: on the direct path the receiver's network interface, and
        addresses: of all members, in order of rank: those that were proved to be reachable.
        example: inputs of some samples, for the member that measures how long the model's modules take.
        machines: number of every member's machine, where GPUs of one machine use NCCL among themselves.
        want_digest: of the weights that the model was built with, before it was spread.
    """

    NUMBER: ClassVar[int] = 36

    run_id: str
    generation: int
    name: str
    rank: int
    members: tuple[str, ...]
    backend: str
    timeout_s: float
    interface: str = ""
    addresses: tuple[str, ...] = ()
    example: Tree | None = None
    machines: tuple[int, ...] = ()
    want_digest: bool = False


class GroupFormed(Message, frozen=True, kw_only=True):
    """Worker to orchestrator: the group stands and the model is spread over it, or why not.

    Attributes:
        broken: the group, not the model, was in the way: a member did not come or was lost.
        layout: how the model is spread, in words for people.
        digest: as in `Prepared`.
    """

    NUMBER: ClassVar[int] = 37

    run_id: str
    generation: int
    ok: bool
    problem: str = ""
    traceback: str = ""
    broken: bool = False
    layout: str = ""
    digest: str = ""


class ProbeListen(Message, frozen=True):
    """Orchestrator to worker: listen on free ports of your addresses, so that others can try to reach you.

    Attributes:
        probe_id: of this probe; all its records carry it.
        secret: who dials must prove to hold it; drawn anew for every listener.
        loopback: listen on the loopback too, since all members are on one host.
        timeout_s: when to stop listening if nothing more is heard.
    """

    NUMBER: ClassVar[int] = 38

    probe_id: int
    secret: bytes
    loopback: bool
    timeout_s: float


class ProbeAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker listens: an address of a network interface, and a port."""

    interface: str
    address: str
    port: int


class ProbeListening(Message, frozen=True):
    """Worker to orchestrator: here I listen; or why I cannot."""

    NUMBER: ClassVar[int] = 39

    probe_id: int
    addresses: tuple[ProbeAddress, ...]
    problem: str = ""


class ProbeTarget(msgspec.Struct, frozen=True, array_like=True):
    """Another member, its listener's secret, and where it may be reached."""

    member: int
    secret: bytes
    addresses: tuple[ProbeAddress, ...]


class ProbeDial(Message, frozen=True):
    """Orchestrator to worker: try to reach these members at all of their addresses, all at once."""

    NUMBER: ClassVar[int] = 40

    probe_id: int
    targets: tuple[ProbeTarget, ...]
    timeout_s: float


class ProbeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Whether a member answered at an address; `problem` is empty if it did."""

    member: int
    address: str
    problem: str = ""


class ProbeReport(Message, frozen=True):
    """Worker to orchestrator: who answered."""

    NUMBER: ClassVar[int] = 41

    probe_id: int
    answers: tuple[ProbeAnswer, ...]


class ProbeEnd(Message, frozen=True):
    """Orchestrator to worker: stop listening."""

    NUMBER: ClassVar[int] = 42

    probe_id: int
