"""Lines pasted into a command that goes on meanwhile."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from guava_nb.cli.pasting import PastedLines
from tests.support.processes import eventually


def gone() -> bool:
    return "guava-stdin" not in [thread.name for thread in threading.enumerate()]


def test_whole_lines_come_once_and_nothing_is_read_before_somebody_asks(pipe: int) -> None:
    pasted, found = PastedLines(), []
    os.write(pipe, b"early\nguava1:ab")
    assert gone()
    assert eventually(lambda: found.extend(pasted.take()) or found, 10, "a line") == ["early"]
    os.write(pipe, "c\xe9\n\nlast\n".encode())
    eventually(lambda: found.extend(pasted.take()) or len(found) == 4, 10, "the other lines")
    assert found[1:] == ["guava1:abcé", "", "last"] and pasted.take() == []
    pasted.close()
    eventually(gone, 10, "the thread ends")


def test_no_standard_input_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert PastedLines().take() == []
    eventually(gone, 10, "the thread ends")


@pytest.mark.skipif(os.name == "nt", reason="terminals of POSIX")
def test_a_terminal_is_not_read_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: theirs))
    monkeypatch.setattr(os, "tcgetpgrp", lambda number: os.getpgrp() + 1)
    asked = threading.Event()
    monkeypatch.setattr(os, "isatty", lambda number: asked.set() or True)
    pasted = PastedLines()
    os.write(ours, b"typed for the shell\n")
    assert pasted.take() == [] and asked.wait(10) and pasted.take() == []
    monkeypatch.setattr(os, "tcgetpgrp", lambda number: os.getpgrp())
    assert eventually(pasted.take, 10, "the line is read in the foreground") == ["typed for the shell"]
    pasted.close()
    eventually(gone, 10, "the thread ends")
    for end in (ours, theirs):
        os.close(end)
