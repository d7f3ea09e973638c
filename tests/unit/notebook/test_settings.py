"""%config Guava: listed, checked, obeyed, and gone with the extension."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from guava_nb.notebook.panel.blocking import follow_lines


def test_settings_are_listed_checked_and_obeyed(notebook: Any, caplog: pytest.LogCaptureFixture) -> None:
    shown = notebook.run("%config Guava").text
    assert "Guava.ui" in shown and "Guava.log_lines" in shown and "how panels are drawn" in shown
    notebook.run("%guava_up --local 2")
    notebook.orchestrator.printed = {f"worker-{rank}": [f"line {n}" for n in range(100)] for rank in (0, 1)}
    notebook.run("%config Guava.log_lines = 3")
    assert notebook.run("%guava_log worker-1").lines == ["line 97", "line 98", "line 99"]
    assert notebook.run("%guava_log worker-1 -n 1").lines == ["line 99"]
    notebook.run("%config Guava.ui = 'fancy'")
    assert "'auto', 'widget', 'html', 'text', 'none'" in caplog.text  # traitlets' own words; the value stays
    notebook.run("%config Guava.ui = 'none'")
    notebook.run("loader = []")
    assert "%|" not in notebook.run("%guava_train --model Net --loss CrossEntropyLoss --data loader").text


def test_the_log_is_followed_to_the_end_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    printed = iter([["one"], [], ["two", "three"], ["the last"]])
    at_work = iter([True, True, True, False])
    follow_lines(lambda: next(printed), lambda: next(at_work))
    assert capsys.readouterr().out.splitlines() == ["one", "two", "three", "the last"]


def test_an_interrupt_ends_following_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def lines() -> list[str]:
        signal.raise_signal(signal.SIGINT)
        return ["one"]

    follow_lines(lines, lambda: True)
    assert capsys.readouterr().out == "one\n"


def test_nothing_is_followed_where_nothing_runs(notebook: Any) -> None:
    notebook.run("%guava_up --local 2")
    notebook.orchestrator.printed = {"worker-1": ["a line"]}
    assert notebook.run("%guava_log worker-1 --follow").lines == ["a line"]
