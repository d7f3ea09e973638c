"""What one connection may do when: a single table for both roles.

Two rules hold. Everything that changes a connection's state is in this file, and nothing else is. This file knows which
role a side plays only as a column of the table; it has no bytes, no clock and no idea what the records mean.

    PROVING     the mutual proof runs; no record may pass
    ATTACHING   proved; the dialler owes `Attach`
    ANSWERING   `Attach` is made; the listener owes `Attached` or `Refused`, and the dialler waits
    OPEN        anything but the records of the beginning
    CLOSING     this side said goodbye (or refused); it sends nothing more and reads until the peer ends
    CLOSED      over, on purpose
    FAILED      over, by a fault of the stream or the peer; the session may go on over another connection

The dialler waits in ANSWERING because the listener's decoder keeps its tight limits until it has answered: a message
sent earlier could come in the same read and be judged by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from guava_nb.errors import LocalProtocolError, RemoteProtocolError
from guava_nb.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Goodbye,
    Message,
    Ping,
    Pong,
    Refused,
)

__all__ = ["TRANSITIONS", "Event", "Role", "State", "advance", "received", "sent"]


class Role(Enum):
    """Who opened the connection. Either may be orchestrator or worker."""

    DIALLER = "dialler"
    LISTENER = "listener"


class State(Enum):
    """Where a connection stands, as this side sees it."""

    PROVING = "proving"
    ATTACHING = "attaching"
    ANSWERING = "answering"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


class Event(Enum):
    """What can happen to a connection: a record passed, or something about the stream."""

    PROVED = "the proof is done"
    ENDED = "the stream ended"
    VIOLATED = "the peer broke a rule"
    SENT_ATTACH = "sent Attach"
    SENT_ATTACHED = "sent Attached"
    SENT_REFUSED = "sent Refused"
    SENT_GOODBYE = "sent Goodbye"
    SENT_LIFE = "sent Ping, Pong or Ack"
    SENT_MESSAGE = "sent a message of the session"
    RECEIVED_ATTACH = "received Attach"
    RECEIVED_ATTACHED = "received Attached"
    RECEIVED_REFUSED = "received Refused"
    RECEIVED_GOODBYE = "received Goodbye"
    RECEIVED_LIFE = "received Ping, Pong or Ack"
    RECEIVED_MESSAGE = "received a message of the session"


_SENT: Mapping[type[Message], Event] = {
    Attach: Event.SENT_ATTACH,
    Attached: Event.SENT_ATTACHED,
    Refused: Event.SENT_REFUSED,
    Goodbye: Event.SENT_GOODBYE,
    Ping: Event.SENT_LIFE,
    Pong: Event.SENT_LIFE,
    Ack: Event.SENT_LIFE,
}
_RECEIVED: Mapping[type[Message], Event] = {
    Attach: Event.RECEIVED_ATTACH,
    Attached: Event.RECEIVED_ATTACHED,
    Refused: Event.RECEIVED_REFUSED,
    Goodbye: Event.RECEIVED_GOODBYE,
    Ping: Event.RECEIVED_LIFE,
    Pong: Event.RECEIVED_LIFE,
    Ack: Event.RECEIVED_LIFE,
}
_RECEIPTS = frozenset(event for event in Event if event.name.startswith("RECEIVED_"))

# A stream that ends, or a peer that breaks a rule, before anyone said goodbye is a fault wherever it happens.
_FAULTS = {Event.ENDED: State.FAILED, Event.VIOLATED: State.FAILED}
_REFUSAL = {Event.SENT_REFUSED: State.CLOSING, Event.RECEIVED_REFUSED: State.CLOSED}
_OPEN = {
    Event.SENT_LIFE: State.OPEN,
    Event.SENT_MESSAGE: State.OPEN,
    Event.SENT_GOODBYE: State.CLOSING,
    Event.RECEIVED_LIFE: State.OPEN,
    Event.RECEIVED_MESSAGE: State.OPEN,
    Event.RECEIVED_GOODBYE: State.CLOSED,
    **_REFUSAL,
    **_FAULTS,
}
# What the peer sent before it heard of our goodbye still comes in. When both say goodbye at once, neither waits.
_CLOSING = {
    Event.RECEIVED_LIFE: State.CLOSING,
    Event.RECEIVED_MESSAGE: State.CLOSING,
    Event.RECEIVED_ATTACH: State.CLOSING,
    Event.RECEIVED_ATTACHED: State.CLOSING,
    Event.RECEIVED_GOODBYE: State.CLOSED,
    Event.RECEIVED_REFUSED: State.CLOSED,
    Event.ENDED: State.CLOSED,
    Event.VIOLATED: State.CLOSED,
}
# After the end only the end may be noticed again: both threads of a connection see it.
_CLOSED = {Event.ENDED: State.CLOSED, Event.VIOLATED: State.CLOSED}
_FAILED = {Event.ENDED: State.FAILED, Event.VIOLATED: State.FAILED}

_PROVING = {Event.PROVED: State.ATTACHING, **_FAULTS}
_COMMON = {
    State.PROVING: _PROVING,
    State.OPEN: _OPEN,
    State.CLOSING: _CLOSING,
    State.CLOSED: _CLOSED,
    State.FAILED: _FAILED,
}

#: The table: role, state, event to next state. What is not in it is not allowed.
TRANSITIONS: Mapping[Role, Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        Role.DIALLER: {
            **_COMMON,
            State.ATTACHING: {
                Event.SENT_ATTACH: State.ANSWERING,
                Event.RECEIVED_REFUSED: State.CLOSED,
                **_FAULTS,
            },
            State.ANSWERING: {
                Event.RECEIVED_ATTACHED: State.OPEN,
                Event.SENT_GOODBYE: State.CLOSING,
                **_REFUSAL,
                **_FAULTS,
            },
        },
        Role.LISTENER: {
            **_COMMON,
            State.ATTACHING: {
                Event.RECEIVED_ATTACH: State.ANSWERING,
                Event.SENT_REFUSED: State.CLOSING,
                **_FAULTS,
            },
            State.ANSWERING: {
                Event.SENT_ATTACHED: State.OPEN,
                Event.RECEIVED_GOODBYE: State.CLOSED,
                **_REFUSAL,
                **_FAULTS,
            },
        },
    }
)


def sent(record: type[Message]) -> Event:
    """The event that this side sends a record of this type."""
    return _SENT.get(record, Event.SENT_MESSAGE)


def received(record: type[Message]) -> Event:
    """The event that a record of this type came from the peer."""
    return _RECEIVED.get(record, Event.RECEIVED_MESSAGE)


def advance(state: State, role: Role, event: Event) -> State:
    """Apply one event.

    Args:
        state: where the connection stands.
        role: which side this is.
        event: from `sent`, `received`, or one about the stream.

    Returns:
        The next state; the same one for most messages.

    Raises:
        RemoteProtocolError: the peer sent what it must not send now.
        LocalProtocolError: this side was about to; a bug of ours.
    """
    following = TRANSITIONS[role][state].get(event)
    if following is not None:
        return following
    sentence = f"{event.value} while the connection is {state.value} and this side is its {role.value}"
    if event in _RECEIPTS:
        raise RemoteProtocolError(f"{sentence}: the peer must not send that now")
    raise LocalProtocolError(sentence)
