"""Runs a program of the user's, such as sbatch or kubectl, to its end; what goes wrong becomes a sentence."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from guava_nb.errors import ConfigError

__all__ = ["find_program", "last_line", "run_program"]

RUN_S = 60.0


def find_program(name: str, way: str) -> str:
    """The path of a program.

    Args:
        way: how to get it, for the sentence.

    Raises:
        ConfigError: it is not here.
    """
    found = shutil.which(name)
    if found is None:
        raise ConfigError(f"there is no {name} on this machine: {way}")
    return found


def run_program(
    words: Sequence[str], text: str = "", limit_s: float = RUN_S, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run it with `text` as its standard input.

    Args:
        words: the command line; no shell reads it.
        text: its standard input.
        limit_s: seconds until it is ended.
        environ: of the program; None: that of this process.

    Raises:
        ConfigError: it cannot be run, or has not ended within `limit_s`.
    """
    try:
        return subprocess.run(
            words, input=text, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=limit_s, check=False,
            env=environ,
        )  # fmt: skip
    except subprocess.TimeoutExpired as problem:
        raise ConfigError(f"{words[0]} did not answer within {limit_s:g} s; try it by hand") from problem
    except OSError as problem:
        raise ConfigError(f"{words[0]} cannot be run: {problem}") from problem


def last_line(text: str) -> str:
    """What a program said last; "it said nothing" where that is nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
