"""The guava command's front: the line is parsed, a command is run, its error becomes one line and an exit status.

Exit status: 0 done, 1 it failed, 2 the line or a setting is wrong (nothing was started), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from guava_nb.cli import DEMO_THREADS
from guava_nb.errors import ConfigError, GuavaError
from guava_nb.processes.nursery import close_unused, expect_workers

__all__ = ["build_parser", "command", "main"]

#: What people look for in a terminal, or behind an exclamation mark.
_OF_NOTEBOOKS = (
    *("up", "down", "share", "mode", "train", "validate", "predict", "energy", "log", "save", "resume", "stop", "runs"),
    *("px", "push", "pull", "pip", "files", "export"),
)
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        argv: words after the program's name; default those of this process.
    """
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in _OF_NOTEBOOKS:
        magic = "_".join(("%guava", words[0]))
        print(
            f"guava: {words[0]} is a magic of notebooks: write {magic} in a cell, below %load_ext guava_nb and without "
            "an exclamation mark; guava -h has what a terminal can do",
            file=sys.stderr,
        )
        return EXIT_USAGE
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("guava: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except GuavaError as error:
        from guava_nb.render.errors import error_text

        print(f"guava: {error_text(error)}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def command() -> int:
    """Run the command of this process; returns as `main`.

    A demo's workers begin to load their libraries before anything else of the command is loaded: that takes longer than all that
    happens here meanwhile. And a demo's process ends here: all of it is closed, and to unload torch takes a second and a half.
    The other commands end as usual, since a program of the user's may have something to do at its exit.
    """
    is_demo = sys.argv[1:2] == ["demo"]
    if is_demo and not {"-h", "--help"} & set(sys.argv):
        expect_workers(DEMO_THREADS)
    if sys.argv[1:2] != ["run"]:  # a program of the user's finds its output as without us
        _take_any_text()
    try:
        status = main()
    finally:
        close_unused()
    if is_demo:
        with contextlib.suppress(OSError):  # who read its output has gone
            sys.stdout.flush()
        os._exit(status)
    return status


def _take_any_text() -> None:
    """Show "?" for what the output has no place for: files and pipes of Windows, and some C locales, are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; `args.run` is the function of the chosen subcommand."""
    from guava_nb.cli import demo, doctor, run, status, worker
    from guava_nb.config.version import installed_version

    parser = argparse.ArgumentParser(
        prog="guava", description="Notebooks and GPUs behind NAT as one PyTorch training job."
    )
    parser.add_argument("--version", action="version", version=f"guava-nb {installed_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (demo, worker, run, status, doctor):
        module.add_command(commands)
    return parser
