"""What happens to a job: the events of its mailbox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from guava_nb.protocol.messages import Message

__all__ = ["FromWorker", "Interrupted", "JobEvent", "Joined", "Leaving", "Lost", "Resumed", "Suspected", "Wake"]


@dataclass(frozen=True, slots=True)
class _OfMember:
    rank: int


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A member said something. `done` gives its bytes back to the sender's window; call it once."""

    rank: int
    message: Message
    payload: memoryview
    done: Callable[[], None]


class Joined(_OfMember):
    """A newcomer is seated and ready to be prepared."""


class Suspected(_OfMember):
    """A member's connections broke; it may come back."""


class Resumed(_OfMember):
    """A suspect member came back with its session."""


class Lost(_OfMember):
    """A member is gone for good."""


class Leaving(_OfMember):
    """A member wants to go, and serves until it is released (`Cluster.release`) or has waited too long."""


class Interrupted:
    """The user wants to stop; the second time at once."""


class Wake:
    """Something outside the mailbox changed (a batch is loaded, the loader ended)."""


JobEvent = FromWorker | Joined | Suspected | Resumed | Leaving | Lost | Interrupted | Wake
