"""The front of the command: exit statuses and what goes where."""

from __future__ import annotations

import argparse
import io
import os
import runpy
import subprocess
import sys

import pytest

from guava_nb.cli import DEMO_THREADS, demo, doctor
from guava_nb.cli import main as cli_main
from guava_nb.cli.main import build_parser, command, main
from guava_nb.doctor import Check
from guava_nb.errors import ConfigError, GuavaError, RemoteError, WorkerLost


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("batch_size is 0"), 2, "guava: ConfigError: batch_size is 0\n"),
        (
            WorkerLost("worker a is gone\nand will not return"),
            1,
            "guava: WorkerLost: worker a is gone and will not return\n",
        ),
        (RemoteError("a", "ValueError", "no"), 1, "guava: RemoteError: worker a raised ValueError: no\n"),
        (KeyboardInterrupt(), 130, "guava: interrupted\n"),
    ],
)
def test_errors_are_one_line(
    error: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    assert main(["demo"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line)


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "run_demo", fail)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


@pytest.mark.parametrize(
    "words", [["dmeo"], [], ["demo", "--workers", "many"], ["worker", "--gpus", "all", "--device", "x"]]
)
def test_wrong_lines_leave_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert "usage: guava" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["-h"], ["demo", "-h"], ["worker", "-h"], ["run", "-h"], ["doctor", "-h"], ["--version"]]
)
def test_help_and_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith(("usage: guava", "guava-nb "))


def test_every_command_has_a_function() -> None:
    for line in (["demo"], ["worker"], ["run", "script.py"], ["doctor"]):
        args = build_parser().parse_args(line)
        assert isinstance(args, argparse.Namespace)
        assert callable(args.run)


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["guava", "doctor"])
    monkeypatch.setattr(doctor, "run_checks", lambda: [Check("x", "fail", "broken", "mend it")])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("guava_nb", run_name="__main__")
    assert exit_.value.code == 1


def test_a_demo_s_process_ends_at_once_and_another_command_s_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def fail(options: object) -> None:
        raise ConfigError("it is wrong")

    begun: list[int] = []
    monkeypatch.setattr(cli_main, "expect_workers", begun.append)
    monkeypatch.setattr(cli_main, "close_unused", lambda: begun.append(0))
    monkeypatch.setattr(demo, "run_demo", fail)
    monkeypatch.setattr(sys, "argv", ["guava", "demo"])
    assert command() == 2 and ended == [2]
    assert begun == [DEMO_THREADS, 0]  # before anything else is read, and ended where nothing is started
    monkeypatch.setattr(sys, "argv", ["guava", "demo", "-h"])
    with pytest.raises(SystemExit):
        command()
    assert begun == [DEMO_THREADS, 0, 0]
    monkeypatch.setattr(sys, "argv", ["guava", "doctor"])
    monkeypatch.setattr(doctor, "run_checks", list)
    assert command() == 0 and ended == [2]


@pytest.mark.parametrize(("word", "shown"), [("status", b"a worker called ?"), ("run", None)])
def test_a_worker_s_name_that_the_output_cannot_hold_ends_no_command(
    word: str, shown: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe of Windows; a program of the user's fails there as it does without guava run."""
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="cp1252", errors="strict"))
    monkeypatch.setattr(sys, "argv", ["guava", word])
    monkeypatch.setattr("guava_nb.cli.main.main", lambda: print("a worker called \u72d0") or 0)
    if shown is None:
        with pytest.raises(UnicodeEncodeError):
            command()
    else:
        assert command() == 0
        sys.stdout.flush()
        assert shown in held.getvalue()


def test_the_command_is_loaded_after_its_workers_have_begun_to_load() -> None:
    code = "import sys\nimport guava_nb.cli.main\nprint(*{'numpy', 'msgspec', 'guava_nb.cli.demo'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stdout.strip()


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.argv[1:] = ['-h']\nfrom guava_nb.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(("status", "expected"), [("ok", 0), ("warning", 0), ("fail", 1)])
def test_doctor_command(
    status: str, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("torch", status, "2.13.0", "pip install it")]  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "run_checks", lambda: checks)
    assert main(["doctor"]) == expected
    shown = capsys.readouterr().out
    assert "torch  " + status in shown
    assert "torch: pip install it" in shown


def test_errors_have_a_common_root() -> None:
    assert issubclass(ConfigError, GuavaError)


@pytest.mark.parametrize("word", ["up", "train", "push"])
def test_a_magic_in_a_terminal_is_told_where_it_belongs(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--local", "2"]) == 2
    assert f"write %guava_{word} in a cell, below %load_ext guava_nb" in capsys.readouterr().err


def test_every_magic_without_a_command_of_its_name_is_told_so() -> None:
    from guava_nb.cli.main import _OF_NOTEBOOKS
    from guava_nb.notebook.commands import COMMANDS

    commands = {"demo", "worker", "run", "status", "doctor"}
    assert set(_OF_NOTEBOOKS) | commands == {one.name.removeprefix("guava_") for one in COMMANDS} | {"demo"}
