"""What a terminal shows of a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from guava_nb.cli.main import main
from guava_nb.cli.status import follow, shown_text
from guava_nb.cluster.session_status import ShownStatus
from guava_nb.status import RunStatus, Status

RUN = RunStatus("run-1", "training", "data", 1, 2, 3, 8, 48, 1.5, loss=0.25)
OPEN = Status("open", "127.0.0.1:7", "data", 1, notes=("w0 joined",))


class Shown:
    """What the file holds, look after look; the process lives until `dies_at`."""

    def __init__(self, *runs: RunStatus | None, dies_at: int = 1000, closes: bool = True) -> None:
        self.runs, self.dies_at, self.closes, self.looks, self.drawn = runs, dies_at, closes, 0, []

    def read(self) -> ShownStatus | None:
        at, self.looks = self.looks, self.looks + 1
        if at >= len(self.runs) and self.closes:
            return None
        shown = ShownStatus(7, 0.0, 0.0, replace(OPEN, run=self.runs[min(at, len(self.runs) - 1)]))
        return type("Seen", (), {"pid": 7, "at": 0.0, "status": shown.status, "lives": at < self.dies_at})()  # type: ignore[return-value]

    def follow(self) -> int:
        return follow(self.read, self.drawn.append, lambda seconds: None)


def test_a_run_is_followed_to_its_end() -> None:
    shown = Shown(None, RUN, replace(RUN, step=5), replace(RUN, state="done", step=8), closes=False)
    assert shown.follow() == 0 and shown.looks == 4
    assert "127.0.0.1:7" in shown.drawn[0] and "3/8" in shown.drawn[1] and "5/8" in shown.drawn[2]
    assert "done" in shown.drawn[3]


def test_a_run_that_ended_before_is_not_the_end() -> None:
    over = replace(RUN, state="done")
    following = replace(RUN, run_id="run-2")
    shown = Shown(over, over, following, replace(following, state="failed"), closes=False)
    assert shown.follow() == 0 and shown.looks == 4


def test_a_killed_process_and_a_closed_session_are_told() -> None:
    shown = Shown(RUN, RUN, dies_at=1)
    assert shown.follow() == 1
    assert "has ended without closing it" in shown.drawn[-1] and "w0 joined" in shown.drawn[-1]
    shown = Shown(RUN)
    assert shown.follow() == 0 and "The session was closed." in shown.drawn[-1]


def test_an_old_status_is_told_to_be_old() -> None:
    shown = ShownStatus(7, 0.0, 1000.0, replace(OPEN, run=RUN))
    assert "Nothing new since" not in shown_text(shown, 1003.0, True)
    assert "63 s ago: the process of this session (pid 7) is there" in shown_text(shown, 1063.0, True)
    assert "it stood at" in shown_text(shown, 1063.0, False)


def test_no_session_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["status", "--follow"]) == 1
    assert "no session of this user is open on this machine" in capsys.readouterr().err
