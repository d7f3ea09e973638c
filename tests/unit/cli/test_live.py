"""Lines that are written over: what a terminal shows in the end, whatever was drawn and said before."""

from __future__ import annotations

import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.cli.live import LiveLines, live_lines


class Screen:
    """A terminal of so many columns and rows, as far as these codes go: what scrolled out cannot be reached any more."""

    def __init__(self, columns: int = 40, rows: int = 12) -> None:
        self.columns, self.rows = columns, rows
        self.lines, self.at, self.writes = [""], 0, 0

    def isatty(self) -> bool:
        return True

    def flush(self) -> None: ...

    def write(self, text: str) -> None:
        self.writes += 1
        for part in re.split(r"(\x1b\[\d*[AJ]|\n)", text):
            if part.endswith("A"):
                self.at -= int(part[2:-1])
                assert self.at >= max(0, len(self.lines) - self.rows), "moved out of the screen"
            elif part.endswith("J"):
                self.lines = [*self.lines[: self.at], ""]
            elif part == "\n":
                self.at += 1
                self.lines.append("") if self.at == len(self.lines) else None
            elif part:
                wide = sum(
                    2 if unicodedata.east_asian_width(letter) in "WF" else not unicodedata.combining(letter)
                    for letter in part
                )
                assert wide < self.columns or not part.startswith("draw"), "it would wrap"
                self.lines[self.at] += part


texts = st.lists(st.text(st.sampled_from("ab 数\u0301\x1b\r\t["), max_size=60).map(lambda t: "draw" + t), max_size=20)


@given(st.lists(st.one_of(texts, st.integers(0, 99)), max_size=12))
def test_only_the_last_drawing_and_all_that_was_said_stand_there(actions: list[list[str] | int]) -> None:
    screen = Screen()
    live = LiveLines(screen, lambda: (screen.columns, screen.rows))
    said = []
    for action in actions:
        if isinstance(action, int):
            live.say(f"say {action}")
            said.append(f"say {action}")
        else:
            live.draw("\n".join(action))
    drawn = next((action for action in reversed(actions) if isinstance(action, list)), [])
    text = "\n".join(drawn).splitlines()[: screen.rows - 1]
    assert screen.lines[: len(said)] == said
    assert len(screen.lines) == len(said) + len(text) + 1 and screen.lines[-1] == ""


def test_the_same_again_is_not_written() -> None:
    screen = Screen()
    live = LiveLines(screen, lambda: (40, 12))
    for _ in range(5):
        live.draw("one\ntwo")
    assert screen.writes == 1
    live.draw("")
    assert screen.lines == [""]


def test_a_terminal_that_breaks_is_left_alone() -> None:
    class Broken(Screen):
        def write(self, text: str) -> None:
            super().write(text)
            raise OSError("gone")

    screen = Broken()
    live = LiveLines(screen, lambda: (40, 12))
    for number in range(3):
        live.draw(f"{number}")
        live.say("x")
    assert screen.writes == 1


def test_pipes_and_simple_terminals_get_no_live_lines(monkeypatch: object) -> None:
    class Pipe(Screen):
        def isatty(self) -> bool:
            return False

    assert live_lines(Pipe()) is None
    assert live_lines(object()) is None  # type: ignore[arg-type]
