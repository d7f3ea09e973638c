"""What a session shows to other processes: while it lives, and after its process was killed."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from guava_nb.cluster.session_status import ShownStatus, StatusWriter, newest_status
from guava_nb.status import RunStatus, Status
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


def test_one_whose_process_was_killed_stays_and_comes_after_one_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "guava_nb"
    folder.mkdir()
    assert newest_status() is None
    (folder / "noise.status").write_bytes(b"\x91")
    other = subprocess.Popen([sys.executable, "-c", HELD, str(folder / "old.json")], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"here\n"
    eventually(lambda: newest_status() is not None, 10, "it is written")
    assert newest_status()[1].lives  # type: ignore[index]
    writer = StatusWriter(folder / "new.json", lambda: STATUS)
    eventually((folder / "new.status").exists, 5, "it is written")
    other.kill()
    other.wait()
    path, shown = newest_status() or (None, None)
    assert path == folder / "new.status" and shown is not None
    writer.close()
    path, shown = newest_status() or (None, None)
    assert path == folder / "old.status" and shown is not None and not shown.lives
    assert newest_status(folder / "old.json") == (path, shown)
