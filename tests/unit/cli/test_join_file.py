"""The join code from a file or standard input, and what comes there later."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from guava_nb.cli.join_file import JoinFile
from guava_nb.errors import ConfigError
from tests.support.processes import eventually


def test_a_file_is_read_and_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "code"
    path.write_text("guava1:first\n")
    file = JoinFile(str(path))
    assert file.first() == "guava1:first" and file.take() == []
    path.write_text("guava1:second")
    assert file.take() == ["guava1:second"] and file.take() == []
    path.write_text("")
    assert file.take() == []
    path.unlink()
    assert file.take() == []
    file.close()


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_file_without_a_code_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "code").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path / "code")):
        JoinFile(str(tmp_path / "code")).first()


def test_standard_input_gives_codes_and_the_order_to_leave(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("guava_nb.systems.os.kill", lambda pid, number: sent.append((pid, number)))
    file, found = JoinFile("-"), []
    os.write(pipe, b"guava1:first\nguava1:second\nleave\n")
    assert file.first() == "guava1:first"
    eventually(lambda: found.extend(file.take()) or (found and sent), 10, "the second code and the order")
    assert found == ["guava1:second"] and sent == [(os.getpid(), signal.SIGTERM)]
    file.close()


def test_standard_input_that_ends_before_a_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: reading))
    os.close(writing)
    with pytest.raises(ConfigError, match="standard input"):
        JoinFile("-").first()
    os.close(reading)
