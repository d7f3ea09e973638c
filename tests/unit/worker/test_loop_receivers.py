"""Each record that a worker may get has code there that takes it: one without would be lost, and no one would hear of it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from guava_nb.backend import Endpoint
from guava_nb.protocol.header import UNSEQUENCED
from guava_nb.protocol.messages import (
    FROM_WORKERS,
    MESSAGE_KINDS,
    CrashReport,
    Failure,
    FailureKind,
    Filler,
    LeaveGroup,
    Measure,
    Measured,
    Message,
    Parcel,
    Piece,
    Vitals,
)
from guava_nb.telemetry.energy_reporter import EnergyReporter
from guava_nb.worker.loop import WorkerLoop
from guava_nb.worker.path_probe import PathProbe
from guava_nb.worker.token_teller import TokenTeller
from guava_nb.worker.worker_session import LineProbe, WorkerSession
from tests.support.hostile_text import hostile

#: What visitors say and are told, without a session.
VISITS = {CrashReport, Vitals, Filler, Measure, Measured}
#: What ranks send to each other through the hub.
BOTH_WAYS = {Piece, Parcel, LeaveGroup}
TO_WORKERS = (set(MESSAGE_KINDS.values()) - UNSEQUENCED - FROM_WORKERS - VISITS) | BOTH_WAYS
#: All that look at a message of the session, in `WorkerSession.on_event` and behind it.
RECEIVERS: tuple[Callable[..., Any], ...] = (
    *(WorkerSession.on_event, Endpoint.post, PathProbe.post, LineProbe.post, EnergyReporter.post, TokenTeller.post),
    *(WorkerLoop._handle, WorkerLoop._handle_of_run),
)


def taken_by(*receivers: Callable[..., Any]) -> set[str]:
    """The names of the classes that these functions tell apart, by `case X()` or `isinstance`."""
    found: set[str] = set()
    for receiver in receivers:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(receiver)))):
            if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
                found.add(node.cls.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                found |= {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    return found


def test_every_record_that_a_worker_may_get_has_a_receiver_there() -> None:
    known = taken_by(*RECEIVERS)
    assert sorted(record.__name__ for record in TO_WORKERS if record.__name__ not in known) == []


def test_a_record_without_a_receiver_is_found() -> None:
    def receiver(message: Message) -> None:
        match message:
            case Piece() | Parcel():
                return
        assert isinstance(message, Vitals | Filler)

    assert taken_by(receiver) == {"Piece", "Parcel", "Vitals", "Filler"}


def test_an_order_of_a_run_that_no_code_takes_is_told_and_the_run_given_up() -> None:
    sent: list[Message] = []
    loop = WorkerLoop(lambda message, buffers: sent.append(message), torch.device("cpu"))
    run: Any = mock.Mock(run_id="run-1")
    loop._run = run
    loop._handle(hostile(Vitals), memoryview(b""))  # of no run: nothing is waited for
    assert sent == [] and loop._run is run
    loop._handle(hostile(Failure, "run-1"), memoryview(b""))  # as an order without a case here would be
    assert [(one.kind, one.text) for one in sent if isinstance(one, Failure)] == [
        (FailureKind.INTERNAL, "no code of a worker takes a Failure")
    ]
    assert loop._run is None
