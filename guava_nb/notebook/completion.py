"""Tab completion of options and their values: choices, shared names, loaders, workers, files."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from guava_nb.notebook.line_options import Command, Offers

__all__ = ["complete_by_dir", "files", "install_completion", "loaders", "names", "remove_completion"]

_IDENTIFIER = "guava_nb.matcher"
#: A magic of ours on a line, also where its value is assigned: its percent signs, its name, and the rest up to the cursor.
_LINE = re.compile(r"\s*(?:[\w.,\s]+=\s*)?(%%?)(guava_\w+)\s(.*)", re.DOTALL)


def install_completion(shell: Any, commands: Sequence[Command], offers: Offers) -> None:
    """Have IPython's completer ask here, for every magic.

    A matcher keeps names of Python's out, which mean nothing on such a line, and knows `run = %guava_train ...` too. IPython
    before 8.6 (Colab) has only hooks by the first word.
    """
    matcher = _matcher({command.name: command for command in commands}, offers)
    if matcher is not None:
        shell.Completer.custom_matchers.append(matcher)
        return
    for command in commands:
        for key in _keys(command):
            shell.set_hook("complete_command", _hook(command, offers), str_key=key)


def remove_completion(shell: Any, commands: Sequence[Command]) -> None:
    """Take it away again; IPython has no call for that."""
    matchers = getattr(shell.Completer, "custom_matchers", [])
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", "") != _IDENTIFIER]
    table = shell.strdispatchers.get("complete_command")
    for command in commands:
        for key in _keys(command):
            if table is not None:
                table.strs.pop(key, None)


def _matcher(table: Mapping[str, Command], offers: Offers) -> Callable[[Any], Any] | None:
    try:
        from IPython.core.completer import SimpleCompletion, completion_matcher
    except ImportError:
        return None

    @completion_matcher(priority=500, identifier=_IDENTIFIER, api_version=2)
    def match(context: Any) -> dict[str, Any]:
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        found = _LINE.fullmatch(line)
        command = table.get(found[2]) if found else None
        if command is None or found is None or (found[1] == "%%" and context.cursor_line):
            return {"completions": []}
        *before, symbol = re.split(r"\s+", found[3])
        words = command.completions([word for word in before if word], symbol, offers)
        return {
            "completions": [SimpleCompletion(word, type="guava") for word in words],
            "matched_fragment": symbol,
            "suppress": True,
            "ordered": True,
        }

    return match


def _keys(command: Command) -> tuple[str, str]:
    return f"%{command.name}", f"%%{command.name}"


def _hook(command: Command, offers: Offers) -> Callable[[Any, Any], list[str]]:
    def complete(shell: Any, event: Any) -> list[str]:
        line = event.text_until_cursor
        before = line[: len(line) - len(event.symbol)].split()[1:]
        return command.completions(before, event.symbol, offers)

    return complete


def complete_by_dir(kind: type) -> None:
    """Have tab offer what objects of a class call theirs by `dir`: without jedi, IPython adds all that the class has."""
    with contextlib.suppress(ImportError, AttributeError):
        from IPython.utils.generics import complete_object

        complete_object.register(kind)(lambda thing, before: [name for name in dir(thing) if name[:1] != "_"])


def names(shell: Any) -> list[str]:
    """Names of a notebook's own variables."""
    hidden = getattr(shell, "user_ns_hidden", {})
    return sorted(name for name in shell.user_ns if not name.startswith("_") and name not in hidden)


def loaders(shell: Any) -> list[str]:
    """Names of what a notebook can train on: its loaders, else all variables of its own."""
    torch = sys.modules.get("torch")
    own_data = sys.modules.get("guava_nb.data.worker_data")
    kinds = tuple(
        kind
        for kind in (
            None if torch is None else torch.utils.data.DataLoader,
            None if own_data is None else own_data.WorkerData,
        )
        if kind is not None
    )
    own = names(shell)
    return [name for name in own if isinstance(shell.user_ns[name], kinds)] or own


def files(symbol: str) -> list[str]:
    """Files and folders that begin so."""
    folder, _, begin = symbol.rpartition("/")
    try:
        there = sorted(Path(folder or ("/" if symbol.startswith("/") else ".")).expanduser().iterdir())
    except (OSError, RuntimeError, ValueError):  # no such folder, no such user, no name of a file
        return []
    head = f"{folder}/" if "/" in symbol else ""
    return [
        f"{head}{path.name}{'/' if path.is_dir() else ''}"
        for path in there
        if path.name.startswith(begin) and (begin.startswith(".") or not path.name.startswith("."))
    ]
