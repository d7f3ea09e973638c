"""Where a program that starts `guava worker` leaves the join code: a file, or standard input; never the command line."""

from __future__ import annotations

import contextlib
from pathlib import Path

from guava_nb.cli.pasting import PastedLines
from guava_nb.errors import ConfigError
from guava_nb.systems import ask_to_end

__all__ = ["LEAVE", "JoinFile"]

#: The name that means standard input.
STANDARD_INPUT = "-"
#: A line of standard input that lets the workers leave, as SIGTERM does.
LEAVE = "leave"
FIRST_LINE_S = 60.0
#: A join code has some 150 characters.
LONGEST_CHARS = 4096


class JoinFile:
    """The source of the code, and of newer ones when the session's address has changed.

    Args:
        path: a file, or "-" for standard input, of which each line is a join code or "leave".
        leaves_at_end: the end of standard input means "leave" too: who wrote it is gone.
    """

    def __init__(self, path: str, leaves_at_end: bool = False) -> None:
        self._path = None if path == STANDARD_INPUT else Path(path).expanduser()
        self._lines = PastedLines(_is_code, ask_to_end if leaves_at_end else lambda: None)
        self._last = ""

    def first(self) -> str:
        """The code to join with.

        Raises:
            ConfigError: there is no such file, nothing is in it, or no line came on standard input.
        """
        if self._path is None:
            text = self._lines.first(FIRST_LINE_S)
            if not text.strip():
                raise ConfigError(
                    f"no join code came on standard input within {FIRST_LINE_S:g} s: write it there as one line"
                )
            return text
        try:
            self._last = self._path.read_text(encoding="utf-8")[:LONGEST_CHARS].strip()
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(f"--join-file {self._path} cannot be read: {problem}") from problem
        if not self._last:
            raise ConfigError(f"--join-file {self._path} is empty: it should hold the join code")
        return self._last

    def take(self) -> list[str]:
        """Codes that came since the last call."""
        if self._path is None:
            return self._lines.take()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = self._path.read_text(encoding="utf-8")[:LONGEST_CHARS].strip()
            if text and text != self._last:
                self._last = text
                return [text]
        return []

    def close(self) -> None:
        """Read no more."""
        self._lines.close()


def _is_code(line: str) -> bool:
    if line.strip() != LEAVE:
        return True
    ask_to_end()  # the way that a scheduler takes, too
    return False
