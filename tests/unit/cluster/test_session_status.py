"""What a session shows to other processes: while it lives, and after its process was killed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from guava_nb.cluster.session_status import ShownStatus, StatusWriter, session_statuses
from guava_nb.status import RunStatus, Status
from guava_nb.tunnels.records import began_at
from tests.support.processes import eventually

RUN = RunStatus("run-1", "training", "data", 1, 2, 3, 8, 48, 1.5, loss=math.nan, losses=((1, 0.5), (2, math.inf)))
STATUS = Status("open", "127.0.0.1:7", "data", 1, run=RUN, notes=("one",))

HELD = """
import sys, time
from pathlib import Path
from guava_nb.cluster.session_status import StatusWriter
from guava_nb.status import Status
writer = StatusWriter(Path(sys.argv[1]), lambda: Status("open", "127.0.0.1:7", "data", 1))
print("here", flush=True)
time.sleep(60)
"""


def test_what_is_shown_is_read_with_every_number(tmp_path: Path) -> None:
    writer = StatusWriter(tmp_path / "one.json", lambda: STATUS)
    shown = eventually(lambda: ShownStatus.read(tmp_path / "one.status"), 5, "it is written")
    assert shown.lives and shown.status.notes == ("one",) and math.isnan(shown.status.run.loss)
    assert shown.status.run.losses == RUN.losses
    assert (tmp_path / "one.status").stat().st_mode & 0o077 == 0
    writer.close()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_session_that_is_dropped_is_shown_no_more(tmp_path: Path) -> None:
    there: list[Status | None] = [None]
    writer = StatusWriter(tmp_path / "one.json", there.pop)
    writer._thread.join(5)
    assert not writer._thread.is_alive() and list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sessions of this user lie."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "guava_nb").mkdir()
    return tmp_path / "guava_nb"


def test_one_whose_process_was_killed_stays_and_comes_after_one_that_lives(
    folder: Path,
) -> None:
    assert not session_statuses()
    (folder / "noise.status").write_bytes(b"\x91")
    other = subprocess.Popen([sys.executable, "-c", HELD, str(folder / "old.json")], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"here\n"
    eventually(lambda: bool(session_statuses()), 10, "it is written")
    assert session_statuses()[0][1].lives
    writer = StatusWriter(folder / "new.json", lambda: STATUS)
    eventually((folder / "new.status").exists, 5, "it is written")
    other.kill()
    other.wait()
    path, shown = session_statuses()[0]
    assert path == folder / "new.status" and shown is not None
    writer.close()
    path, shown = session_statuses()[0]
    assert path == folder / "old.status" and shown is not None and not shown.lives
    assert session_statuses(folder / "old.json") == [(path, shown)]


def test_one_with_a_run_that_goes_on_comes_before_newer_ones_without(
    folder: Path,
) -> None:
    ended = replace(STATUS, run=replace(RUN, state="done"))
    shown = {"trains": STATUS, "idle": replace(STATUS, run=None), "ended": ended}
    began = began_at(psutil.Process())
    for place, (name, status) in enumerate(shown.items()):
        content = ShownStatus(os.getpid(), began, time.time() + place, status)
        (folder / f"{name}.status").write_bytes(msgspec.msgpack.encode(content))
    assert [path.stem for path, _ in session_statuses()] == ["trains", "ended", "idle"]
