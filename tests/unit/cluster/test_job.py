from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.cluster.job import Job
from guava_nb.cluster.job_events import FromWorker
from guava_nb.cluster.owed_answers import OwedAnswer
from guava_nb.errors import RemoteError, RemoteProtocolError
from guava_nb.protocol.messages import Failure, FailureKind, Leave

NOTHING = memoryview(b"")


def failure(request: int) -> Failure:
    kind, name, text = FailureKind.USER, "ZeroDivisionError", "division by zero"
    return Failure(run_id="run", kind=kind, type_name=name, text=text, traceback="", request_id=request)


@pytest.fixture
def job() -> Any:
    job = Job(SimpleNamespace(name=lambda rank: f"w{rank}"))  # type: ignore[arg-type]
    job.run_id = "run"
    return job


def test_a_job_that_asks_hears_no_error_of_a_step_that_was_told_already(job: Any) -> None:
    job._on_failure(1, failure(0), NOTHING)
    job.trains = True
    with pytest.raises(RemoteError, match="worker w1 raised ZeroDivisionError: division by zero"):
        job._on_failure(1, failure(0), NOTHING)


def test_an_error_of_what_was_asked_is_raised_and_one_of_an_earlier_request_is_not(job: Any) -> None:
    job.about_request = {7: "validation"}.get
    job._on_failure(1, failure(6), NOTHING)
    with pytest.raises(RemoteError, match=r"division by zero \(validation\)"):
        job._on_failure(1, failure(7), NOTHING)


def test_what_cannot_be_used_ends_its_senders_session_and_not_the_job(job: Any) -> None:
    handled, done, told = [], [], []

    def expel(rank: int, violation: str) -> None:
        job.cluster.expelled.add(rank)
        told.append((rank, violation))

    def handler(rank: int, message: Leave, payload: memoryview) -> None:
        handled.append(rank)
        raise RemoteProtocolError("it has no sense")

    job.cluster.expelled, job.cluster.expel = set(), expel
    job.on(Leave, handler)
    for rank in (2, 2, 1):
        job.handle(FromWorker(rank, Leave(""), NOTHING, lambda: done.append(1)))
    assert handled == [2, 1] and len(done) == 3
    assert told == [
        (2, "a Leave that cannot be used: it has no sense"),
        (1, "a Leave that cannot be used: it has no sense"),
    ]


@pytest.mark.parametrize(("outcome", "end"), [
    ("", "it computes"), ("the others then go on", "it computes; if it hangs, end its process: the others then go on"),
])  # fmt: skip
def test_where_no_other_can_do_its_work_a_person_is_told_what_can_be_done(job: Any, outcome: str, end: str) -> None:
    told: list[str] = []
    answer, job.ready, job.without = OwedAnswer(1, "shard", 0, "it computes"), {1}, lambda rank: outcome
    job.cluster = SimpleNamespace(
        name=lambda rank: f"w{rank}", notice=told.append, vitals=SimpleNamespace(text=lambda rank, now: ""),
        seats=SimpleNamespace(silent_s=lambda rank: 0.0), silence_s=15.0,
    )  # fmt: skip
    job._waits = SimpleNamespace(
        look=lambda owed, now: (list(owed), []), limit_s=lambda answer: 30.0, waited_s=lambda answer, now: 20.0
    )
    job.watch(lambda: [answer])
    job._looked = 0.0
    job._look_at_waits()
    assert told == [f"waits for w1 since 20 s: {end}"]


def test_an_answer_of_a_member_that_was_not_asked_is_not_kept(job: Any) -> None:
    answers = job.collect(Leave, lambda message: message.reason != "old", lambda rank: rank == 1)
    job.cluster.expelled = set()
    for rank, reason in ((2, "new"), (1, "old"), (1, "new")):
        job.handle(FromWorker(rank, Leave(reason), NOTHING, lambda: None))
    assert answers == {1: Leave("new")}
