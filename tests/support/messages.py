"""Every text of the package that a user may see: errors, notices, help of magics and commands, labels of panel and doctor.

python -m tests.support.messages [room ...]    # prints those of all rooms, or of some, with their places
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["PACKAGE", "Text", "messages", "texts"]

PACKAGE = Path(__file__).resolve().parents[2] / "guava_nb"
#: A text and its place: file, line.
Text = tuple[str, str]
#: A text of so many words is a sentence, or a part of one, and not a name or a format.
_WORDS = 3


@cache
def texts() -> list[Text]:
    """All texts of the package with their places, docstrings left out; an f-string is one text, with X for its values."""
    return list(_texts())


def _texts() -> Iterator[Text]:
    for path in sorted(PACKAGE.rglob("*.py")):
        tree, place = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(PACKAGE.parent).as_posix()
        skipped = {
            id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        }
        for one in ast.walk(tree):
            if isinstance(one, ast.JoinedStr):
                skipped |= {id(part) for part in one.values}
                parts = (part.value if isinstance(part, ast.Constant) else "X" for part in one.values)
                yield "".join(map(str, parts)), f"{place}:{one.lineno}"
            elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in skipped:
                yield one.value, f"{place}:{one.lineno}"


def messages(room: str = "") -> list[Text]:
    """The texts that are sentences or parts of one, of a room or of all."""
    return [
        (text, place)
        for text, place in texts()
        if place.startswith(f"guava_nb/{room}") and len(re.findall(r"[A-Za-z]{2,}", text)) >= _WORDS and " " in text
    ]


if __name__ == "__main__":
    for name in sys.argv[1:] or [""]:
        for text, place in messages(name):
            print(f"{place}\n    {text}")
