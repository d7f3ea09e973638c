"""Programs that are not here, such as sbatch or kubectl: scripts that note how they were called and say what a test wants."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest


class StandIns:
    """A folder in front of PATH.

    Args:
        folder: for scripts and notes.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(self, name: str, says: str = "", status: int = 0, when: str = "", complains: str = "") -> None:
        """Have a program say something and end so; with `when` only where its line has this word, as told last."""
        case = self.folder / f"{name}.cases"
        answer = f"printf %s {shlex.quote(says)}; printf %s {shlex.quote(complains)} >&2; exit {status}"
        known = case.read_text() if case.exists() else ""
        case.write_text(
            (f'case " $* " in *{shlex.quote(f" {when} ")}*) {answer};; esac\n' if when else f"{answer}\n") + known
        )
        script = self.folder / name
        script.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {self.folder}/{name}.lines\ncat > {self.folder}/{name}.input\n. {case}\n'
        )
        script.chmod(0o755)

    def lines(self, name: str) -> list[str]:
        """The lines that it was called with."""
        path = self.folder / f"{name}.lines"
        return path.read_text().splitlines() if path.exists() else []

    def input(self, name: str) -> str:
        """The standard input of its last call."""
        return (self.folder / f"{name}.input").read_text()
