"""From the text of a magic's line to its words.

IPython would fill in `{x}` and `$x` itself, but it does so nowhere on the line when one name is unknown, says nothing
of it, and takes JSON for a name. So the magics opt out of that; here quotes and brackets keep a word
together, ` #` starts a comment, `{name}`, `$name` and expressions as `{step + 1:03d}` are replaced by their text, an unknown
name is an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

__all__ = [
    "expand",
    "in_a_folder",
    "is_background",
    "near",
    "no_variable",
    "note_background",
    "split_line",
    "take_code",
    "value_of",
]

_CODE = re.compile(r"guava\s*\d+\s*:", re.IGNORECASE)
_MISSPELT = r"--[a-z][a-z-]{0,19}"
_OPENING = {"(": ")", "[": "]", "{": "}"}
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*|\[\w+\])*"
# "$$" and "{{name}}" stand for the plain signs. JSON passes unchanged: its objects never look like {name}.
_VARIABLE = re.compile(
    rf"\$(?P<dollar>\$)|\{{(?P<plain>\{{{_NAME}\}})\}}|\{{(?P<braced>{_NAME})\}}|\$(?P<word>[^\W\d]\w*)"
    r"|\{(?P<expression>[^{}\s](?:[^{}]*[^{}\s])?)\}"
)


#: Whether this is the process of a background session, which has no variable of a notebook's kernel.
_of_background: list[bool] = []


def note_background() -> None:
    """This is the process of a background session."""
    _of_background.append(True)


def is_background() -> bool:
    """Whether this is the process of a background session."""
    return bool(_of_background)


def no_variable(name: str, names: Iterable[str]) -> str:
    """The sentence on a variable that is not among these, with what to do."""
    if not is_background():
        return f"this notebook has no variable {name}{near(name, [one for one in names if not one.startswith('_')])}"
    return (
        f"the background session has no variable {name}: variables of a notebook stay in its kernel. Put %%guava_share "
        "--background on top of the cell that makes it and run that cell; a loader may also be named as package.module:name"
    )


def near(word: str, names: Iterable[str]) -> str:
    """The end of a sentence that proposes the name `word` may have meant, or nothing."""
    found = get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def take_code(line: str, flags: Iterable[str]) -> tuple[str, str]:
    """Take a pasted join code off a line: (the line without it, the code with whatever came along).

    People paste it with quotes, prompts and blanks in it. None of that may be read as words: a piece of a code would be
    taken for an option, and be shown in the message about it. The code ends where an option or a comment begins; so it does
    at a misspelt one, which looks like a word and not like a piece of a code.
    """
    start = _CODE.search(line)
    if start is None or re.search(r"(^|\s)#", line[: start.start()]):
        return line, ""
    names = "|".join(map(re.escape, flags))
    end = re.compile(rf"\s(?:#|(?:{names}|{_MISSPELT})(?=[\s=]|$))").search(line, start.end())
    stop = end.start() if end else len(line)
    before = line[: start.start()].rstrip(" \t\"'`\u2018\u201c([{<")
    return f"{before} {line[stop:]}", line[start.start() : stop]


def split_line(line: str) -> list[str]:
    """Words of a line. Outside brackets quotes are taken off; backslashes are plain characters (Windows paths).

    Raises:
        UsageError: a quote or a bracket is never closed.
    """
    words: list[str] = []
    position = 0
    while position < len(line):
        if line[position].isspace():
            position += 1
        elif line[position] == "#":
            break
        else:
            word, position = _word(line, position)
            words.append(word)
    return words


def _word(line: str, position: int) -> tuple[str, int]:
    """One word from `position` to the next blank outside quotes and brackets, and where it ends."""
    characters: list[str] = []
    closing: list[str] = []
    quote = ""
    while position < len(line):
        character = line[position]
        if quote:
            quote, keep = ("", bool(closing)) if character == quote else (quote, True)
        elif character.isspace() and not closing:
            break
        elif character in "'\"":
            quote, keep = character, bool(closing)
        else:
            keep = True
            _nest(character, closing)
        if keep:
            characters.append(character)
        position += 1
    if quote or closing:
        # The line itself is not repeated: it may hold half a join code, which nothing recognises.
        raise UsageError(f"this line opens a quote or a bracket and never closes it: {quote or closing[-1]} is missing")
    return "".join(characters), position


def _nest(character: str, closing: list[str]) -> None:
    if character in _OPENING:
        closing.append(_OPENING[character])
    elif closing and character == closing[-1]:
        closing.pop()


def expand(word: str, namespace: Mapping[str, Any]) -> str:
    """Put the text of variables in place of `{name}`, `{name.attribute}`, `{name[key]}` and `$name`.

    Raises:
        UsageError: the notebook has no such variable.
    """
    return _VARIABLE.sub(lambda match: _value(match, namespace), word)


def _value(match: re.Match[str], namespace: Mapping[str, Any]) -> str:
    if match["expression"]:
        return _of_expression(match["expression"], namespace)
    expression = match["braced"] or match["word"]
    if expression is None:
        return match["dollar"] or match["plain"]
    root, *steps = re.split(r"[.\[]", expression)
    if root not in namespace:
        double = "$$" if match["word"] else f"{{{{{root}}}}}"
        raise UsageError(
            f"{match[0]}: this notebook has no variable {root}{near(root, namespace)} ({double} gives the plain sign)"
        )
    value = namespace[root]
    for step in steps:
        value = _step(value, step, match[0])
    return str(value)


def value_of(expression: str | ast.Expression, namespace: Mapping[str, Any], where: str) -> Any:
    """The value of an expression that the user typed in the notebook, as if it stood in the cell; raises what it raises."""
    return eval(compile(expression, where, "eval"), dict(namespace))  # noqa: S307 - no more than the cell itself can do


def _of_expression(text: str, namespace: Mapping[str, Any]) -> str:
    """What an f-string has for `{text}`; JSON, sets of numbers and what is no expression stay as they are."""
    plain = "{" + expand(text, namespace) + "}"
    try:
        tree = ast.parse(f"f{'{' + text + '}'!r}", mode="eval")
    except SyntaxError:
        return plain
    if not any(isinstance(node, ast.Name) for node in ast.walk(tree)) or ": " in text:
        return plain
    try:
        return str(value_of(tree, namespace, "<line>"))
    except Exception as error:
        name, colon, _ = text.partition(":")
        hint = f'. JSON has its names in double quotes: {{"{name}": ...}}' if colon and name.isidentifier() else ""
        raise UsageError(f"{{{text}}}: {type(error).__name__}: {error}{hint}") from None


def _step(value: Any, step: str, whole: str) -> Any:
    """An attribute, or an item when the step ends with the closing bracket."""
    try:
        if not step.endswith("]"):
            return getattr(value, step)
        key = step[:-1]
        return value[int(key)] if key.isdigit() else value[key]
    except (AttributeError, LookupError, TypeError) as error:
        raise UsageError(f"{whole}: {type(error).__name__}: {error}") from None


def in_a_folder(text: str, option: str) -> Path:
    """Return the path that a word names, which must lie in a folder that is there: a slip of the pen makes no new one.

    Raises:
        UsageError: there is no folder of this name.
    """
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise UsageError(f"{option} {text}: there is no folder {path.parent}; make it, or name another one")
    return path
