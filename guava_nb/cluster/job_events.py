"""What happens to a job: the events of its mailbox."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from guava_nb.protocol.messages import Message

__all__ = ["FromWorker", "Interrupted", "JobEvent", "Joined", "Leaving", "Lost", "Resumed", "Suspected", "Wake"]


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A member said something. `done` gives its bytes back to the sender's window; call it once."""

    rank: int
    message: Message
    payload: memoryview
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Joined:
    """A newcomer is seated and ready to be prepared."""

    rank: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """A member's connections broke; it may come back."""

    rank: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A suspect member came back with its session."""

    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is gone for good."""

    rank: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A member wants to go, and serves until it is released (`Cluster.release`) or has waited too long."""

    rank: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user wants to stop; the second time at once."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Something outside the mailbox changed (a batch is loaded, the loader ended)."""


JobEvent = FromWorker | Joined | Suspected | Resumed | Leaving | Lost | Interrupted | Wake
