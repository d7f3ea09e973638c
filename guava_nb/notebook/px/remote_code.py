"""What `%%guava_px`, `%%guava_run` and the magics for values, packages and files do: a call each, and what is shown of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from guava_nb.errors import ClusterError, ConfigError, SourceError
from guava_nb.notebook.display import cell_number, say
from guava_nb.notebook.line_words import no_variable
from guava_nb.notebook.lines import ShownLines
from guava_nb.notebook.panel.panel import Frame, Panel
from guava_nb.notebook.train import check_variable
from guava_nb.render import program_view

__all__ = ["RemoteCode"]


class RemoteCode:
    """The user's code on the workers.

    Args:
        shell: of the notebook.
        session: gives the open orchestrator, or raises what to do.
    """

    def __init__(self, shell: Any, session: Callable[[], Any]) -> None:
        self._shell, self._session = shell, session

    def run(self, args: argparse.Namespace, cell: str) -> Any:
        """Run a cell there; returns the values of its last expression, None where all are None or were bound to a name.

        Raises:
            UsageError: no worker of this name or rank.
            RemoteError: it raised there.
        """
        check_variable(args.out, "--out")
        name, session = f"px {cell_number(self._shell)}", self._session()
        with _said(session) as say_lines:
            found = session.run_code(cell, self._on(args), cell=name, on_output=say_lines)
        value = self._value(args, found)
        if args.out is None:
            return value if any(one is not None for one in found.values()) else None
        self._shell.user_ns[args.out] = value
        return None

    def run_program(self, args: argparse.Namespace, cell: str | None, panel: Panel) -> None:
        """Run a cell, or a file, as a program over the workers; the panel shows them and what ranks print.

        Raises:
            UsageError: there is no such file, or no worker of this name.
            RemoteError: a rank raised.
        """
        text, name, arguments = _program(args.arguments, cell, cell_number(self._shell))
        session = self._session()
        lines: list[str] = []
        begun = time.monotonic()

        def frame(state: str = "running") -> Frame:
            new, lines[:] = list(lines), []
            return program_view(state, name, time.monotonic() - begun, session.status().workers), new

        def take(worker: str, new: Sequence[str]) -> None:
            lines.extend(f"{worker} | {line}" if worker else line for line in new)

        state = "failed"
        try:
            session.run_program(
                text, *arguments, on=self._on(args), name=name, path=args.path or "auto", on_output=take,
                on_wait=lambda: panel.update(frame),
            )  # fmt: skip
            state = "ended"
        except KeyboardInterrupt:
            state = "interrupted"
            raise
        except (
            ClusterError,
            SourceError,
            ConfigError,
        ):  # where nothing began there is nothing to show but the sentence
            state = "failed" if lines else ""
            raise
        finally:
            if state:
                panel.finish(lambda: frame(state))
            panel.close()

    def push(self, args: argparse.Namespace) -> str:
        """Set variables of the notebook there; returns the sentence on it.

        Raises:
            UsageError: the notebook has no variable of this name.
        """
        names, wanted = self._shell.user_ns, _names(args.names)
        for name in wanted:
            if name not in names:
                way = "" if name.isidentifier() else f"; it takes names: value = {name}, then %guava_push value"
                raise UsageError(f"{no_variable(name, names)}{way}")
        session = self._session()
        with _said(session) as say_lines:
            workers = session.push({name: names[name] for name in wanted}, self._on(args), on_output=say_lines)
        return f"{_are(wanted)} on {', '.join(workers)}. A worker that joins later has to be given them too."

    def pull(self, args: argparse.Namespace) -> tuple[str, Any]:
        """Set variables of the notebook to what workers have; returns the sentence on it and the value, a dict of several."""
        wanted = _names(args.names)
        for name in wanted:
            check_variable(name, "a name to pull")
        session = self._session()
        with _said(session) as say_lines:
            found = session.pull(*wanted, on=self._on(args), on_output=say_lines)
        values = {
            name: self._value(args, {worker: values[name] for worker, values in found.items()}) for name in wanted
        }
        self._shell.user_ns.update(values)
        form = "" if self._is_one(args) else ", a dict by worker"
        from guava_nb.spec.plain_values import RemoteObject  # loads torch

        told = [name for name in wanted if any(isinstance(values[name], RemoteObject) for values in found.values())]
        form += f" ({', '.join(told)}: only as text, for it is no plain data; pull what it holds)" if told else ""
        value = values if len(values) > 1 else values[wanted[0]]
        return f"{_are(wanted)} here{form}, from {', '.join(found)}.", value

    def install(self, args: argparse.Namespace) -> str:
        """Have pip install packages there; returns sentences on it."""
        session = self._session()
        with _said(session) as say_lines:
            return _by_worker(session.install(*args.packages, on=self._on(args), on_output=say_lines))

    def send_files(self, args: argparse.Namespace) -> str:
        """Send files and folders; returns sentences on it."""
        session = self._session()
        with _said(session) as say_lines:
            told = _by_worker(session.send_files(*args.paths, on=self._on(args), on_output=say_lines))
        later = "" if self._on(args) else "\nA worker that joins later gets them too."
        return told + later

    def _on(self, args: argparse.Namespace) -> list[str] | None:
        """Names of the workers that a line means; None for all."""
        rank = getattr(args, "rank", None)
        if args.on is not None and rank is not None:
            raise UsageError("--on and --rank both choose workers: give one of them")
        if rank is None:
            return None if args.on is None else [name for name in args.on.replace(",", " ").split() if name]
        workers = self._session().status().workers
        named = [one.name for one in workers if one.rank == rank and one.state in ("ready", "working")]
        if not named:
            known = ", ".join(f"{one.rank} ({one.name})" for one in workers) or "none"
            raise UsageError(f"--rank {rank}: no worker that is connected has this rank; there are: {known}")
        return named

    def _is_one(self, args: argparse.Namespace) -> bool:
        return len(self._on(args) or ()) == 1

    def _value(self, args: argparse.Namespace, found: Mapping[str, Any]) -> Any:
        """The value itself where the line chose one worker, else values by worker."""
        return next(iter(found.values())) if self._is_one(args) else dict(found)


def _program(words: Sequence[str], cell: str | None, number: int) -> tuple[str, str, Sequence[str]]:
    """The text of a program, its name, and its own arguments.

    Raises:
        UsageError: there is no cell and no file, or the file cannot be read.
    """
    if cell is not None:
        return cell, f"run {number}", words
    if not words:
        raise UsageError("%guava_run runs a file: %guava_run train.py; or, with %%guava_run as its first line, a cell")
    path = Path(words[0]).expanduser()
    try:
        return path.read_text(encoding="utf-8"), path.name, words[1:]
    except (OSError, UnicodeDecodeError) as error:
        why = f"there is no such file here ({Path.cwd()} is the folder of this notebook)"
        if not isinstance(error, FileNotFoundError):
            why = getattr(error, "strerror", None) or "it is no text file; name a Python program"
        raise UsageError(f"%guava_run {words[0]}: {why}") from None


@contextmanager
def _said(session: Any) -> Iterator[Callable[[str, Sequence[str]], None]]:
    """Give what says the lines of workers in the cell, as many as it shows; what stands under no name always."""
    folder = session.log_folder
    shown = ShownLines("%guava_log shows the newest" + (f", and {folder} has the rest" if folder else ""))

    def say_lines(worker: str, lines: Sequence[str]) -> None:
        if told := shown.of([f"{worker} | {line}" for line in lines]) if worker else lines:
            say("\n".join(told))

    try:
        yield say_lines
    finally:
        if rest := shown.rest():
            say("\n".join(rest))


def _by_worker(told: Mapping[str, str]) -> str:
    return "\n".join(f"{worker}: {sentence}." for worker, sentence in told.items())


def _names(words: Sequence[str]) -> list[str]:
    """Names with blanks or commas between them, each once."""
    return list(dict.fromkeys(name for word in words for name in word.split(",") if name)) or list(words)


def _are(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
