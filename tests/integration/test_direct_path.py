"""Process groups straight between worker processes: chosen where they reach each other, given up where they do not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from guava_nb.cluster.group_path import Finding, Findings
from guava_nb.cluster.path_probe import OPEN_TO_ALL
from guava_nb.errors import ClusterError
from guava_nb.protocol.messages import ProbeAddress
from tests.support.processes import PlainTraining, Session, eventually, loader

SETTINGS: dict[str, dict[str, Any]] = {"data": {}, "zero": {"zero_stage": 2}}


@pytest.fixture
def session(three: Session) -> Iterator[Session]:
    """Three workers on this host, in whatever mode a test sets."""
    before = three.orch.config
    yield three
    three.orch.config = before


def prepare(session: Session, mode: str, **more: Any) -> None:
    """Set a mode, and have no finding from another test."""
    assert session.orch._cluster is not None
    session.orch._cluster.findings = Findings()
    session.orch.set_mode(mode, **{**SETTINGS[mode], **more})


def found(session: Session, finding: Finding) -> None:
    """Have the next group believe this of its members."""
    assert session.orch._cluster is not None
    session.orch._cluster.findings.found[frozenset(session.orch._cluster.roster.ready())] = finding


def notes(session: Session) -> str:
    return "\n".join(session.orch.status().notes)


@pytest.mark.parametrize("stage", [1, 3])
def test_auto_takes_the_direct_path_on_one_host_and_says_so(session: Session, stage: int) -> None:
    prepare(session, "zero", zero_stage=stage)
    run = session.train(loader(), epochs=1)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(1))
    assert run.report()["path"] == {
        "path": "direct", "backend": "gloo", "reason": "all workers reach each other on one host"
    }  # fmt: skip
    assert run.status().path == "direct (gloo): all workers reach each other on one host"
    wire = run.report()["wire"]
    assert (wire["gradient_bytes"], wire["activation_bytes"]) == (None, None) and wire["sample_bytes"] > 0


def test_data_mode_keeps_the_star_unless_it_is_told_to_go_directly(session: Session) -> None:
    prepare(session, "data")
    run = session.train(loader(), epochs=1)
    assert run.report()["path"]["backend"] == "star"
    prepare(session, "data", path="direct")
    run = session.train(loader(), epochs=1)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(1))
    assert (run.mode, run.report()["path"]["backend"]) == ("data", "gloo")


def test_the_relay_when_it_is_asked_for_and_nothing_is_probed(session: Session) -> None:
    prepare(session, "zero", path="relay")
    run = session.train(loader(), epochs=1)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(1))
    assert run.report()["path"] == {"path": "relay", "backend": "guava", "reason": "path='relay' was asked for"}
    assert session.orch._cluster is not None
    assert not session.orch._cluster.findings.found


def test_an_unreachable_member_is_refused_before_training_where_the_direct_path_was_asked_for(session: Session) -> None:
    prepare(session, "zero", path="direct")
    found(session, Finding({}, "w1 cannot reach w2 at 10.0.0.2: timed out"))
    with pytest.raises(ClusterError, match=r"w1 cannot reach w2 at 10\.0\.0\.2: timed out\. path='direct' needs"):
        session.train(loader(), epochs=1)


def test_auto_leaves_public_addresses_alone_and_direct_takes_them(session: Session) -> None:
    assert session.orch._cluster is not None
    ranks = session.orch._cluster.roster.ready()
    public = Finding({rank: ProbeAddress("lo", "127.0.0.1", 1) for rank in ranks}, private=False, where="somewhere")
    prepare(session, "zero")
    found(session, public)
    assert session.train(loader(), epochs=1).report()["path"] == {
        "path": "relay", "backend": "guava", "reason": OPEN_TO_ALL
    }  # fmt: skip
    prepare(session, "zero", path="direct")
    found(session, public)
    assert session.train(loader(), epochs=1).report()["path"]["path"] == "direct"


def test_a_direct_group_that_cannot_be_formed_falls_back(session: Session) -> None:
    prepare(session, "zero")
    assert session.orch._cluster is not None
    ranks = session.orch._cluster.roster.ready()
    found(session, Finding({rank: ProbeAddress("no-such-interface", "10.255.255.1", 1) for rank in ranks}))
    run = session.train(loader(), epochs=1)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(1))
    assert run.report()["path"]["path"] == "relay"
    assert "the direct group could not be formed" in run.report()["path"]["reason"]
    assert "this run goes through the orchestrator" in notes(session)


def test_an_abort_wakes_who_is_blocked_in_gloo_and_the_next_run_goes_directly_again(session: Session) -> None:
    workers = session.ensure(3)
    prepare(session, "data", path="direct")
    workers[1].trap("forward", call=2)
    run = session.train(loader(), detach=True)
    workers[1].wait_trapped()  # the other two wait for it in a sum
    run.interrupt()
    run.interrupt()
    began = time.monotonic()
    workers[1].release()
    assert run.wait(20), run
    assert (run.state, time.monotonic() - began < 15) == ("stopped", True)
    run = session.train(loader(), epochs=1)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(1))
    assert run.report()["path"]["backend"] == "gloo"
    assert [worker.pid for worker in session.ensure(3)] == [worker.pid for worker in workers]


@pytest.mark.parametrize("place", [0, 2])
def test_a_killed_member_ends_the_step_of_the_others_and_they_form_a_new_group(session: Session, place: int) -> None:
    victim = session.ensure(3)[place]
    prepare(session, "data", path="direct")
    victim.trap("forward", call=3)
    run = session.train(loader(), detach=True)
    victim.wait_trapped()
    began = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    eventually(lambda: run.generations > 1, 15, "the group is given up")
    assert time.monotonic() - began < 15
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
    assert run.report()["path"]["backend"] == "gloo"
    assert {worker["worker"]: worker["state"] for worker in run.report()["workers"]}[victim.name] == "lost"


@pytest.mark.skipif(not hasattr(psutil.Process, "num_fds"), reason="descriptors are not counted here")
@pytest.mark.parametrize(("mode", "more"), [("data", {"path": "direct"}), ("zero", {})])
def test_runs_one_after_another_leave_no_group_behind(session: Session, mode: str, more: dict[str, Any]) -> None:
    """Neither their listening sockets nor the threads that serve them."""
    prepare(session, mode, **more)
    workers = [psutil.Process(worker.pid) for worker in session.workers]

    def held(runs: int) -> list[tuple[int, int]]:
        for _ in range(runs):
            assert session.train(loader(), epochs=1).report()["path"]["path"] == "direct"
        return [(worker.num_fds(), worker.num_threads()) for worker in workers]

    before = held(4)  # torch keeps some of the last ones: what its caches and its last backward refer to
    after = held(4)
    assert all(now <= then for then, now in zip(before, after, strict=True)), (before, after)
