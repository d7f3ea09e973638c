"""The table, walked without bytes."""

from __future__ import annotations

from collections import deque

import pytest

from guava_nb.errors import LocalProtocolError, RemoteProtocolError
from guava_nb.protocol.messages import MESSAGE_KINDS, Ack, Attach, Attached, EndRun, Goodbye, Ping, Refused
from guava_nb.protocol.state import TRANSITIONS, Event, Role, State, advance, received, sent

STREAM_EVENTS = {Event.PROVED, Event.ENDED, Event.VIOLATED}


def walk(role: Role, *events: Event) -> State:
    state = State.PROVING
    for event in events:
        state = advance(state, role, event)
    return state


def test_dialler_opens_and_says_goodbye():
    opened = walk(Role.DIALLER, Event.PROVED, sent(Attach), received(Attached))
    assert opened is State.OPEN
    assert advance(opened, Role.DIALLER, sent(EndRun)) is State.OPEN
    assert advance(opened, Role.DIALLER, received(Ping)) is State.OPEN
    closing = advance(opened, Role.DIALLER, sent(Goodbye))
    assert closing is State.CLOSING
    assert advance(closing, Role.DIALLER, received(EndRun)) is State.CLOSING
    assert advance(closing, Role.DIALLER, Event.ENDED) is State.CLOSED


def test_listener_opens_and_hears_goodbye():
    opened = walk(Role.LISTENER, Event.PROVED, received(Attach), sent(Attached))
    assert opened is State.OPEN
    assert advance(opened, Role.LISTENER, received(Goodbye)) is State.CLOSED


def test_refusal_ends_both_sides():
    assert walk(Role.LISTENER, Event.PROVED, received(Attach), sent(Refused), Event.ENDED) is State.CLOSED
    assert walk(Role.DIALLER, Event.PROVED, sent(Attach), received(Refused)) is State.CLOSED
    assert walk(Role.LISTENER, Event.PROVED, sent(Refused)) is State.CLOSING


def legal_records(state: State, role: Role) -> frozenset[type]:
    allowed = TRANSITIONS[role][state]
    return frozenset(record for record in MESSAGE_KINDS.values() if received(record) in allowed)


@pytest.mark.parametrize("role", Role)
def test_a_stream_that_ends_without_goodbye_is_a_fault(role):
    for state in (State.PROVING, State.ATTACHING, State.ANSWERING, State.OPEN):
        assert advance(state, role, Event.ENDED) is State.FAILED
        assert advance(state, role, Event.VIOLATED) is State.FAILED


@pytest.mark.parametrize("role", Role)
def test_nothing_but_the_proof_comes_first(role):
    assert legal_records(State.PROVING, role) == frozenset()
    for record in MESSAGE_KINDS.values():
        with pytest.raises(RemoteProtocolError, match="must not send that now"):
            advance(State.PROVING, role, received(record))
        with pytest.raises(LocalProtocolError):
            advance(State.PROVING, role, sent(record))


def test_legal_records_before_and_after_the_join():
    assert legal_records(State.ATTACHING, Role.LISTENER) == {Attach}
    assert legal_records(State.ANSWERING, Role.DIALLER) == {Attached, Refused}
    for role in Role:
        assert legal_records(State.OPEN, role) == set(MESSAGE_KINDS.values()) - {Attach, Attached}
        assert legal_records(State.CLOSED, role) == legal_records(State.FAILED, role) == frozenset()


def test_dialler_waits_for_its_answer():
    waiting = walk(Role.DIALLER, Event.PROVED, sent(Attach))
    for record in (Attach, EndRun, Ping, Ack):
        with pytest.raises(LocalProtocolError):
            advance(waiting, Role.DIALLER, sent(record))


@pytest.mark.parametrize("role", Role)
def test_nothing_is_sent_after_goodbye(role):
    for state in (State.CLOSING, State.CLOSED, State.FAILED):
        for record in MESSAGE_KINDS.values():
            with pytest.raises(LocalProtocolError):
                advance(state, role, sent(record))


@pytest.mark.parametrize("role", Role)
def test_every_state_is_in_the_table_and_can_end(role):
    assert set(TRANSITIONS[role]) == set(State)
    for state in State:
        assert advance(state, role, Event.ENDED) in (State.CLOSED, State.FAILED)


@pytest.mark.parametrize("role", Role)
def test_ends_are_final(role):
    for state in (State.CLOSED, State.FAILED):
        assert set(TRANSITIONS[role][state].values()) == {state}


def test_a_whole_record_type_has_its_event():
    assert {received(record) for record in MESSAGE_KINDS.values()} | {sent(r) for r in MESSAGE_KINDS.values()} | (
        STREAM_EVENTS
    ) == set(Event)


ROLES = (Role.DIALLER, Role.LISTENER)
RECORDS = (Attach, Attached, Refused, Ping, Goodbye, EndRun)


def moves(states, queues):
    """Every next situation of a pair: a side sends what its own table allows, or reads the next record."""
    for side, role in enumerate(ROLES):
        state, mine, theirs = states[side], queues[side], queues[1 - side]
        following = []
        if len(theirs) < 3:
            allowed = (record for record in RECORDS if sent(record) in TRANSITIONS[role][state])
            following += [(advance(state, role, sent(record)), mine, (*theirs, record)) for record in allowed]
        if mine and state not in (State.CLOSED, State.FAILED):
            following.append((advance(state, role, received(mine[0])), mine[1:], theirs))
        for after, my_queue, their_queue in following:
            pair = [(after, my_queue), (states[1 - side], their_queue)]
            ordered = pair if side == 0 else pair[::-1]
            yield tuple(state for state, _ in ordered), tuple(queue for _, queue in ordered)


def test_two_sides_that_keep_to_the_table_never_break_it_for_each_other():
    # All interleavings with up to three records under way in each direction: what one side may send, the other may
    # receive, or `advance` would raise here.
    start = ((State.ATTACHING, State.ATTACHING), ((), ()))
    seen, to_visit = {start}, deque([start])
    while to_visit:
        for situation in moves(*to_visit.popleft()):
            if situation not in seen:
                seen.add(situation)
                to_visit.append(situation)
    reached = {states for states, _ in seen}
    assert (State.OPEN, State.OPEN) in reached
    assert (State.CLOSED, State.CLOSED) in reached
