"""Worker processes that are told to end, and those that cannot use their device any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from guava_nb.errors import RemoteError
from tests.support.processes import CELL, ROOT, PlainTraining, Session, eventually, loader


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Session(tmp_path_factory.mktemp("ends"), num_workers=1)
        try:
            yield made
        finally:
            made.close()


def test_a_lone_worker_that_is_sent_sigterm_hands_its_state_over_and_exits_with_0(session: Session) -> None:
    [only] = session.ensure(1)
    only.trap("forward", 5)
    run = session.train(loader(), epochs=3, detach=True)
    only.wait_trapped()
    os.kill(only.pid, signal.SIGTERM)
    only.release()
    assert only.handle.wait(40) and only.handle.status().exit_status == 0
    assert only.handle.status().state == "left"
    eventually(lambda: run.state == "waiting", 20, "the run waits for another worker")
    assert len(run.history) >= 4
    [another] = session.ensure(1)
    assert another is not only
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(3))


def test_a_process_that_lost_its_device_is_replaced_and_the_next_run_trains(session: Session) -> None:
    [only] = session.ensure(1)
    before = only.pid
    stand_in = 'raise RuntimeError("CUDA error: device-side assert triggered")'
    only.trap("forward", 3, do="raise")
    cell = CELL.format(folder=str(session.folder)).replace('raise ValueError("this batch is cursed")', stand_in)
    run = session.train(loader(), cell=cell, detach=True)
    with pytest.raises(RemoteError, match="device-side assert triggered. The process cannot use its device"):
        run.wait(40) and run.result()
    eventually(lambda: only.handle.alive and only.pid != before and session.ready() == [only.name], 60, "it is back")
    eventually(
        lambda: only.handle.status().state == "ready" or "1 of 3" in only.handle.status().detail, 20, "it says so"
    )
    only.release()
    session.assert_undisturbed(session.train(loader(), cell=cell), PlainTraining(session.folder, loader()).epochs(2))
