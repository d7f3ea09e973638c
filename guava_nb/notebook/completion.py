"""Tab completion of options and their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from guava_nb.notebook.options import Command

__all__ = ["install_completion", "remove_completion"]


def install_completion(shell: Any, commands: Sequence[Command], worker_names: Callable[[], list[str]]) -> None:
    """Hook every magic into IPython's completer, by its name with its percent signs."""
    for command in commands:
        for key in _keys(command):
            shell.set_hook("complete_command", _completer(command, worker_names), str_key=key)


def remove_completion(shell: Any, commands: Sequence[Command]) -> None:
    """Take the hooks away again; IPython has no call for that."""
    table = shell.strdispatchers.get("complete_command")
    for command in commands:
        for key in _keys(command):
            if table is not None:
                table.strs.pop(key, None)


def _keys(command: Command) -> tuple[str, str]:
    return f"%{command.name}", f"%%{command.name}"


def _completer(command: Command, worker_names: Callable[[], list[str]]) -> Callable[[Any, Any], list[str]]:
    def complete(shell: Any, event: Any) -> list[str]:
        line = event.text_until_cursor
        before = line[: len(line) - len(event.symbol)].split()[1:]
        if command.name == "guava_log" and not event.symbol.startswith("-") and not before:
            return [name for name in worker_names() if name.startswith(event.symbol)] + list(command.flags())
        return command.completions(before, event.symbol, shell.user_ns)

    return complete
