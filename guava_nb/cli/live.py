"""Lines at the bottom of a terminal that are written over: what a notebook's panel is, for `guava worker`.

Only where lines can be taken back. A fault of the terminal ends the drawing, never the work.
"""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Callable
from typing import Protocol

__all__ = ["LiveLines", "Terminal", "live_lines"]

_UP_AND_ERASE = "\x1b[{}A\x1b[J"


class Terminal(Protocol):
    """As much of a text stream as is needed here."""

    def write(self, text: str, /) -> object: ...  # noqa: D102
    def flush(self) -> object: ...  # noqa: D102
    def isatty(self) -> bool: ...  # noqa: D102


class LiveLines:
    """Lines that the next drawing replaces.

    Args:
        terminal: takes the escape codes for "up" and "erase".
        size: tells its columns and rows.
    """

    def __init__(self, terminal: Terminal, size: Callable[[], tuple[int, int]] = shutil.get_terminal_size) -> None:
        """Nothing is drawn yet."""
        self._terminal, self._size = terminal, size
        self._shown: list[str] = []
        self._broken = False

    def draw(self, text: str) -> None:
        """Show a text instead of the last one. "" takes it away; an equal one is not written again."""
        columns, rows = self._size()
        # A line that wraps, or that has left the screen, could not be taken back.
        lines = [_fitting(line, columns - 1) for line in text.splitlines()][: max(1, rows - 1)]
        if lines != self._shown:
            self._write(self._erased() + "".join(f"{line}\n" for line in lines))
            self._shown = lines

    def say(self, line: str) -> None:
        """Write a line that stays, above those that are drawn."""
        self._write(self._erased() + f"{line}\n" + "".join(f"{drawn}\n" for drawn in self._shown))

    def _erased(self) -> str:
        return _UP_AND_ERASE.format(len(self._shown)) if self._shown else ""

    def _write(self, text: str) -> None:
        if self._broken:
            return
        try:
            self._terminal.write(text)
            self._terminal.flush()
        except Exception:  # a terminal that is gone, or cannot show a letter
            self._broken = True


def live_lines(terminal: Terminal) -> LiveLines | None:
    """Live lines on this stream; None where no line can be taken back."""
    try:
        can = terminal.isatty() and os.environ.get("TERM", "") != "dumb" and os.name != "nt"
    except (AttributeError, ValueError):  # replaced by something smaller, or closed
        return None
    return LiveLines(terminal) if can else None


def _fitting(line: str, columns: int) -> str:
    """As much of a line as has room, without what would move the cursor."""
    kept, used = [], 0
    for letter in line.expandtabs():
        if unicodedata.category(letter) in ("Cc", "Cf"):
            continue
        used += 0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if used > columns:
            break
        kept.append(letter)
    return "".join(kept)
