"""Worker processes killed, stopped, crashed and cut off in the middle of a step, over TCP and TLS.

Two workers, each behind a relay of its own. Whatever happens to one of them, the run equals plain PyTorch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from guava_nb.training.run import Run
from tests.support.processes import ROOT, PlainTraining, Session, Worker, difference, eventually, loader
from tests.support.relay import DOWN, UP

#: Longer than a busy machine keeps a thread waiting, shorter than a test may take.
SILENCE_S = 4.0


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = tmp_path_factory.mktemp("faults")
        made = Session(folder, relayed=True, num_workers=2, heartbeat_s=0.5, silence_s=SILENCE_S, hash_every_steps=1)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def pair(session: Session) -> list[Worker]:
    return session.ensure(2)


def notices(session: Session) -> str:
    return "\n".join(session.orch.status().notes)


class AtStep:
    """A callback that acts once, between two steps."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action
        self.fired = False

    def on_step(self, run: Run, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            self.action()
            self.fired = True


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_worker_killed_in_mid_step_changes_nothing(session: Session, pair: list[Worker], where: str) -> None:
    victim = pair[1]
    victim.trap(where, 3)
    run = session.train(loader(), detach=True)
    victim.wait_trapped()
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.monotonic()
    eventually(lambda: session.state_of(victim.name) == "lost", 5, "the loss is noticed")
    assert time.monotonic() - killed <= 5
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
    assert run.generations == 2
    assert [w["samples"] > 0 for w in run.report()["workers"] if w["worker"] == victim.name] == [True]
    assert "signal 9" in notices(session)


def test_a_worker_killed_in_a_delayed_round_costs_no_sample_and_is_told(session: Session, pair: list[Worker]) -> None:
    victim = pair[1]
    victim.trap("backward", 5)
    run = session.train(loader(), detach=True, sync="local", sync_every=2, sync_delay=1)
    victim.wait_trapped()
    os.kill(victim.pid, signal.SIGKILL)
    assert run.wait(60), run
    run.result()
    samples = len(loader().dataset)  # type: ignore[arg-type]
    assert sum(record["samples"] for record in run.history) == 2 * samples
    assert (run.lost_samples, run.duplicated_samples, run.generations) == (0, 0, 2)
    assert "how far its own weights were from the common ones" in notices(session)


@pytest.mark.parametrize(
    ("do", "printed", "told"),
    [
        ("exit", "about to leave without a word", "exit status 7; last line: about to leave without a word"),
        (
            "segfault",
            "about to touch what is not mine",
            "signal 11; last line: Fatal Python error: Segmentation fault at File \"<cell 'net'>\", line",
        ),
    ],
)
def test_a_crash_in_backward_leaves_its_last_words(
    session: Session, pair: list[Worker], do: str, printed: str, told: str
) -> None:
    victim = pair[1]
    victim.trap("backward", 2, do)
    run = session.train(loader(), detach=True)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
    assert run.generations == 2
    eventually(lambda: told in notices(session), 10, "the crash is told with its cause")
    assert printed in session.orch.log(victim.name)
    eventually(lambda: victim.handle.wait(0), 10, "its watcher ends")
    assert victim.handle.status().state == "crashed"


def test_a_stopped_worker_is_noticed_by_its_silence_and_comes_back(session: Session, pair: list[Worker]) -> None:
    still, victim = pair
    victim.trap("forward", 3)
    goes_on = threading.Event()
    comes_back = AtStep(9, lambda: goes_on.wait(30) or None)
    run = session.train(loader(), epochs=5, detach=True, callbacks=[comes_back])
    victim.wait_trapped()
    os.kill(victim.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        eventually(lambda: session.state_of(victim.name) == "suspect", SILENCE_S + 3, "the silence is noticed")
        noticed_s = time.monotonic() - stopped
        # The last byte may have come up to a heartbeat before the stop.
        assert SILENCE_S - 1.0 <= noticed_s <= SILENCE_S + 3
        eventually(lambda: len(run.history) >= 8, 30, "the run goes on without it")
    finally:
        victim.release()
        os.kill(victim.pid, signal.SIGCONT)
    eventually(lambda: session.state_of(victim.name) in ("ready", "working"), 20, "it is back")
    goes_on.set()
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(5))
    assert comes_back.fired and run.generations == 3
    assert session.ready() == [still.name, victim.name]


CUTS = [
    ("control", UP, 40, False),
    ("control", DOWN, 10, True),
    ("bulk", UP, 1, False),
    ("bulk", UP, 9_000, True),
    ("bulk", DOWN, 2_500, False),
]


@pytest.mark.parametrize(("lane", "way", "byte", "at_once"), CUTS)
def test_a_cut_connection_resumed_in_mid_step_changes_nothing(
    session: Session, pair: list[Worker], lane: str, way: str, byte: int, at_once: bool
) -> None:
    """Cut after so many bytes more: inside a heartbeat, a loss, a bucket going up, a sum or a batch coming down."""
    victim = pair[1]
    link = victim.link(lane)
    opened = len(victim.relay.links)  # type: ignore[union-attr]

    def cut_soon() -> None:
        link.cut_at(way, link.bytes[way] + byte)

    act = AtStep(2, cut_soon)
    model = {"width": 256}
    run = session.train(loader(), epochs=3, detach=True, callbacks=[act], model_args=model)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader(), **model).epochs(3))
    assert act.fired and link.is_cut.is_set()
    eventually(lambda: session.state_of(victim.name) == "ready", 20, "the session is whole again")
    assert len(victim.relay.links) == opened + 1  # type: ignore[union-attr]
    assert session.ready() == [w.name for w in pair]  # the same seats, so the same sessions


def test_a_state_comes_over_a_line_that_passes_a_part_of_it_at_a_time(session: Session) -> None:
    """A proxy that ends connections, a phone: no connection lives for as long as the state takes."""
    (worker,) = session.ensure(1)
    relay, passes, model = worker.relay, 1_300_000, {"width": 20_000}
    assert relay is not None
    run = session.train(loader(), epochs=1, model_args=model)
    opened = len(relay.links)
    relay.plans = [{UP: passes} for _ in range(20)]
    link = worker.link("bulk")
    link.cut_at(UP, link.bytes[UP] + passes)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader(), **model).epochs(1))  # brings 7.2 MB
    assert len(relay.links) - opened >= 4
    assert sum(each.bytes[UP] for each in relay.links[opened:]) < 9_000_000
    relay.plans = []
    assert "connection broke 4 times" in notices(session)


def test_all_connections_cut_for_a_second(session: Session, pair: list[Worker]) -> None:
    relays = [worker.relay for worker in pair]

    def outage() -> None:
        for relay in relays:
            assert relay is not None
            relay.refuse()
            relay.cut_all(reset=True)
        threading.Timer(1.0, lambda: [relay.admit() for relay in relays if relay is not None]).start()

    act = AtStep(3, outage)
    run = session.train(loader(), epochs=3, detach=True, callbacks=[act])
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(3))
    assert act.fired
    for worker in pair:
        eventually(lambda w=worker: session.state_of(w.name) == "ready", 20, "the session is whole again")
    assert session.ready() == [w.name for w in pair]


def test_a_copied_identity_never_gives_two_gradients(session: Session, pair: list[Worker], tmp_path: Path) -> None:
    """A second process with the identity of the first takes its place; the first one's work does not count twice."""
    first = pair[1]
    first.trap("backward", 3)
    run = session.train(loader(), epochs=3, detach=True)
    first.wait_trapped()
    copy = Worker(session, "copy", relayed=False, identity=first.handle._identity)
    session.workers.append(copy)
    eventually(lambda: session.state_of(first.name) == "lost", 60, "the first one has lost its place")
    first.release()
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(3))
    samples = {w["worker"]: w["samples"] for w in run.report()["workers"]}
    assert session.ready() == [pair[0].name, "copy"]
    assert samples["copy"] > 0 or run.generations >= 2
    eventually(lambda: first.handle.wait(0), 20, "the first process ends by itself")
    assert first.handle.status().state == "failed"
    assert "same identity" in first.handle.status().detail


def test_all_workers_killed_and_another_one_joins(session: Session) -> None:
    """The state is gone with them: the run goes back to its last snapshot, samples included, with whoever comes."""
    both = session.ensure(2)
    for worker in both:
        worker.trap("forward", 6)
    run = session.train(loader(), detach=True)
    for worker in both:
        worker.wait_trapped()
    for worker in both:
        os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: run.state == "waiting", 10, "the run waits for a worker")
    told = run.status().message
    assert "%guava_worker with the join code elsewhere" in told and "interrupt, then %guava_up --local 1" in told
    [spare] = session.ensure(1)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
    assert [w["worker"] for w in run.report()["workers"] if w["state"] == "ready"] == [spare.name]


def test_a_lone_worker_that_went_on_while_it_was_away_is_taken_as_it_is(session: Session) -> None:
    """It commits by itself; of steps that it did between two runs nobody heard, and the next run goes on from them."""
    (lone,) = session.ensure(1)
    assert lone.relay is not None
    lone.trap("forward", 6)
    run = session.train(loader(), epochs=50, detach=True)
    lone.wait_trapped()
    session.wait_sent_ahead(lone, run)
    lone.relay.refuse()
    lone.relay.cut_all()
    eventually(lambda: session.state_of(lone.name) == "suspect", 10, "its absence is seen")
    lone.release()  # it has these shards, and does them
    eventually(lambda: lone.handle.status().step >= 7, 30, "it goes on alone")
    run.interrupt()
    run.interrupt()
    assert run.wait(30) and run.state == "stopped"
    lone.relay.admit()
    eventually(lambda: session.ready() == [lone.name], 30, "it is back")
    applied = lone.handle.status().step
    again = session.train(loader(), epochs=1, fresh=False)
    assert again.state == "done" and len(again.history) == 4
    plain = PlainTraining(session.folder, loader()).epochs(50, limit=applied)
    plain.batches = loader()
    assert difference(again.model(), plain.epochs(1).model) <= 1e-9
