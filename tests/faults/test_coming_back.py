"""Workers that were given up and come back: they take their seat again, with what they hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from guava_nb import DistributedConfig
from guava_nb.processes.local_workers import launch
from guava_nb.worker.network_worker import start_worker
from tests.support.processes import ROOT, PlainTraining, Session, Worker, difference, eventually, loader


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Session(
            tmp_path_factory.mktemp("back"),
            relayed=True,
            num_workers=2,
            heartbeat_s=0.5,
            silence_s=4.0,
            grace_s=0.5,
            hash_every_steps=1,
        )
        try:
            yield made
        finally:
            made.close()


def stop_until_lost(session: Session, victim: Worker) -> None:
    victim.wait_trapped()
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        eventually(lambda: session.state_of(victim.name) == "lost", 20, "its seat is given up")
    finally:
        victim.release()
        os.kill(victim.pid, signal.SIGCONT)


def seats(session: Session) -> list[str]:
    return [worker.name for worker in session.orch.status().workers]


def test_a_lone_worker_that_was_given_up_goes_on_where_it_was(session: Session) -> None:
    [only] = session.ensure(1)
    before = seats(session)
    only.trap("forward", 5)
    run = session.train(loader(), epochs=2, detach=True)
    stop_until_lost(session, only)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
    assert seats(session) == before
    notes = "\n".join(session.orch.status().notes)
    assert f"{only.name} came back with all " in notes and f"{only.name} joined again" in notes


def test_one_of_two_workers_takes_its_seat_again(session: Session) -> None:
    _, victim = session.ensure(2)
    before = seats(session)
    victim.trap("forward", 3)
    run = session.train(loader(), epochs=5, detach=True)
    stop_until_lost(session, victim)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(5))
    assert seats(session) == before
    eventually(lambda: session.state_of(victim.name) == "ready", 20, "it is back")


def test_the_steps_that_a_lone_worker_took_while_it_was_given_up_count(session: Session) -> None:
    [only] = session.ensure(1)
    assert only.relay is not None
    only.trap("forward", 6)
    run = session.train(loader(), epochs=3, detach=True)
    only.wait_trapped()
    session.wait_sent_ahead(only, run)
    only.relay.refuse()
    only.relay.cut_all()
    try:
        eventually(lambda: session.state_of(only.name) == "lost", 20, "its seat is given up")
        only.release()
        eventually(lambda: only.handle.status().step >= 6, 30, "it goes on alone")
    finally:
        only.relay.admit()
    plain = PlainTraining(session.folder, loader()).epochs(3)
    assert run.wait(60) and run.state == "done", run
    assert len(run.history) == len(plain.losses) and difference(run.model(), plain.model) <= 1e-9
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert "not known here before" in "\n".join(session.orch.status().notes)


def test_a_silent_worker_that_is_there_keeps_its_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than silence and grace: one call holds Python's lock, or the process is stopped. No other is there to help."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("guava_nb.cluster.vitals.TELL_S", 3.0)
    made = Session(tmp_path, num_workers=1, heartbeat_s=0.5, silence_s=4.0, grace_s=0.5)
    config = DistributedConfig(silence_s=3.0, heartbeat_s=0.5)
    made.launch = lambda code, name: launch(code, "cpu", name, 1, made.orch.log_folder, config)  # type: ignore[method-assign]

    def notes() -> str:
        return "\n".join(made.orch.status().notes)

    try:
        [only] = made.ensure(1)
        for do, words in (
            ("hold the lock", "in one call that holds Python's lock"),
            ("hold", "its process is stopped"),
        ):
            only.trap("forward", 4, do=do, seconds=6)
            run = made.train(loader(), epochs=2, detach=True)
            only.wait_trapped()
            if do == "hold":
                os.kill(only.pid, signal.SIGSTOP)
            eventually(lambda words=words: words in notes(), 20, "its silence is told")
            if do == "hold":
                threading.Event().wait(3)  # the length of the fault itself
                only.release()
                os.kill(only.pid, signal.SIGCONT)
            made.assert_undisturbed(run, PlainTraining(tmp_path, loader()).epochs(2))
            assert run.generations == 1
            eventually(lambda: "runs again, after" in notes(), 10, "its return is told")
            assert not any(word in notes() for word in ("connection broke", "lost", "joined again"))
            only.release()
    finally:
        made.close()


SCRIPT = """
from guava_nb import Orchestrator
orchestrator = Orchestrator(num_workers=1)
print(orchestrator.open().encode(), flush=True)
orchestrator.wait_for_workers(timeout=60)
{end}
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1)])
def test_a_script_that_ends_without_close_lets_its_workers_go(end: str, status: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (tmp_path / "script.py").write_text(SCRIPT.format(end=end))
    script = subprocess.Popen(
        [sys.executable, "-m", "tests.support.script", str(tmp_path / "script.py")], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    assert script.stdout is not None
    worker = start_worker(script.stdout.readline().strip(), device="cpu")
    try:
        assert worker.wait(90), "the worker ends with the script, and long before it would give up waiting"
        assert worker.status().state == "left" and worker.status().exit_status == 0
        assert script.wait(30) == status
    finally:
        worker.kill()
        script.kill()
        script.communicate()
