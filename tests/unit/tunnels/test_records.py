"""What was left of a killed process of ours is found by its record and ended; everything else is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from guava_nb.errors import ConfigError
from guava_nb.tunnels import records
from guava_nb.tunnels.records import began_at, end_orphans, open_record, private_folder, remember, runs

OWNER = """
import os, subprocess, sys
from guava_nb.tunnels import records
words = [sys.executable, "-c", "import signal; signal.pause()", *sys.argv[2:]]
child = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
record = records.remember(child, sys.argv[1])
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return private_folder()


@pytest.fixture
def started() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def owner_of(kind: str, started: list[int], *words: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process that has started a program and noted it."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    started += [owner.pid, pid]
    return owner, psutil.Process(pid)


def end(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.communicate()


def test_an_orphan_is_ended_and_what_has_an_owner_is_not(folder: Path, started: list[int]) -> None:
    first, orphan = owner_of("fake", started)
    second, held = owner_of("fake", started)
    third, other = owner_of("other", started)
    assert end_orphans("fake") == 0
    end(first)
    end(third)
    assert end_orphans("fake") == 1
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert held.is_running() and other.is_running()
    assert end_orphans("fake") == 0
    end(second)
    assert (end_orphans("fake"), end_orphans("other")) == (1, 1)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"started": 1000.0},
        {"arguments": ("-c", "something", "else")},
        {"arguments": ()},
        {"host": "another.machine"},
        {"pid": 2**22 + 1},
    ],
)
def test_a_record_that_does_not_fit_ends_nothing(folder: Path, started: list[int], change: dict[str, object]) -> None:
    owner, program = owner_of("fake", started)
    end(owner)
    (path,) = folder.glob("*.json")
    record = records._read(path)
    assert record is not None and record.pid == program.pid
    for name, value in change.items():
        setattr(record, name, value)
    record.save()
    assert end_orphans("fake") == 0
    assert program.is_running()
    assert path.exists() == ("host" in change), "another machine's record is not ours to remove"


def test_a_program_whose_start_was_not_noted_in_time_is_told_by_its_folder(folder: Path, started: list[int]) -> None:
    record = open_record("fake")
    owner, program = owner_of("unrelated", started, "--config", str(record.folder / "its.yml"))
    end(owner)
    assert end_orphans("fake") == 0, "this process is its owner, and lives"
    record.owner = owner.pid
    record.save()
    assert end_orphans("fake") == 1
    assert not program.is_running() or program.status() == psutil.STATUS_ZOMBIE


def test_a_script_may_have_put_its_interpreter_in_front() -> None:
    assert records._same(("/usr/bin/x", "start", "--config", "a"), ("start", "--config", "a"))
    assert records._same(("start", "--config", "a"), ("/tmp/wrapper", "start", "--config", "a"))
    assert not records._same(("start", "--config", "a"), ("start", "--config", "b"))
    assert not records._same((), ("a",))


def test_a_program_that_does_not_listen_is_ended_all_the_same(
    monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> None:
    monkeypatch.setattr(records, "GRACE_S", 0.1)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as deaf:
        assert deaf.stdout is not None and deaf.stdout.readline() == "deaf\n"
        record = remember(deaf, "fake")
        process = record.process()
        assert process is not None
        records.end_process(process)
        assert not psutil.pid_exists(deaf.pid)
        record.forget()
        record.forget()


def test_files_that_are_no_records_are_passed_over(folder: Path) -> None:
    for name, text in {"fake-1.json": "{", "fake-2.json": "[]", "fake-3.json": '{"kind": "fake"}'}.items():
        (folder / name).write_text(text)
    assert end_orphans("fake") == 0


def test_the_folder_is_for_this_user_alone(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert open_record("fake").folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        end_orphans("fake")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", "7"),
        ("pid", [1]),
        ("pid", 10**30),
        ("pid", -5),
        ("started", "now"),
        ("arguments", 3),
        ("owner", None),
        ("host", 1),
    ],
)
def test_a_record_with_a_wrong_type_is_passed_over(folder: Path, field: str, value: object) -> None:
    record = records.open_record("ngrok")
    held = json.loads(record._file.read_text())
    record._file.write_text(json.dumps({**held, "owner": 2**30, "owner_started": 1.0, field: value}))
    assert records.end_orphans("ngrok") == 0


def test_a_clock_that_is_set_makes_no_process_another(monkeypatch: pytest.MonkeyPatch) -> None:
    me = psutil.Process()
    started = began_at(me)
    shift_s, create_time, boot_time = 3600.0, psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + shift_s)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + shift_s)
    assert runs(me.pid, started) and not runs(me.pid, started + 10)
