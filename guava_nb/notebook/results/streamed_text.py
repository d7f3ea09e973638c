"""What follows prompts, written into the cell as it is made: one line a prompt, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guava_nb.notebook.display import say

__all__ = ["StreamedText"]

#: What a decoder makes of the first bytes of a letter whose others are still to come.
_HALF_A_LETTER = "\N{REPLACEMENT CHARACTER}"


class StreamedText:
    """The first prompt that is not done is written as it grows; the others when it is their turn.

    Args:
        prompts: as the user gave them.
    """

    def __init__(self, prompts: Sequence[Any]) -> None:
        """Write nothing yet."""
        self._prompts = prompts
        self._at, self._written = 0, ""  # the prompt in turn, and what stands in its line
        self._so_far: dict[int, Any] = {}

    def add(self, number: int, found: Any) -> None:
        """Take what follows a prompt so far: a text, or a list of tokens."""
        if number < self._at:
            return
        self._so_far[number] = found
        if number == self._at:
            self._write(self._line(number, found, is_done=False))

    def end(self, number: int, found: Any) -> None:
        """Take all that follows a prompt; they come in their order."""
        line = self._line(number, found, is_done=True)
        if not line.startswith(
            self._written
        ):  # a decoder may write the end of a part in another way than that of the whole
            self.break_line()
        self._write(line)
        self.break_line()
        self._at = number + 1
        if self._at in self._so_far:
            self.add(self._at, self._so_far[self._at])

    def break_line(self) -> None:
        """End a line that was begun, for something else to stand below it."""
        if self._written:
            say("")
            self._written = ""

    def _write(self, line: str) -> None:
        if line.startswith(self._written):
            say(line[len(self._written) :], end="")
            self._written = line

    def _line(self, number: int, found: Any, is_done: bool) -> str:
        if isinstance(found, str):
            text = f"{number}: {self._prompts[number]}{found}"
            return text if is_done else text.rstrip(_HALF_A_LETTER)
        return f"{number}: {found}" if is_done else f"{number}: {found}"[:-1]
