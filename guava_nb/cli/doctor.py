"""`guava doctor`: checks this machine and the way to a session, and says how to mend what is amiss.

Exit status 1 when something cannot work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from guava_nb.cli.worker import VARIABLE, ask_for_code
from guava_nb.doctor import check_join, check_launcher, exit_status, run_checks
from guava_nb.errors import ConfigError
from guava_nb.render.checks import checks_view
from guava_nb.render.text import to_text

__all__ = ["add_command", "code_text"]

EPILOG = f"""\
With a join code the way to its listener is tried step by step, and the line is measured (about 10 MB on a fast one). The
code is a secret: as an argument it can be seen in this machine's process list while the command runs. Safer are the
variable {VARIABLE}, or --join, which asks for it and does not show it.
"""


def add_command(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor", help="check this machine, and the way to a session", description=__doc__, epilog=EPILOG
    )
    parser.add_argument("code", nargs="?", metavar="JOINCODE", help="the join code that %%guava_up shows (see below)")
    parser.add_argument("--join", action="store_true", help="ask for a join code, and try the way to its listener")
    parser.add_argument("--on", metavar="NAME:WHAT", help="also check what %%guava_up --on NAME:WHAT would need")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and show."""
    text = code_text(args.code, args.join, os.environ, ask_for_code)
    checks = [*run_checks(), *([check_launcher(args.on)] if args.on else [])]
    way = check_join(text) if text else []
    print(to_text(checks_view(checks, way)))
    return exit_status([*checks, *way])


def code_text(given: str | None, wanted: bool, environ: MutableMapping[str, str], ask: Callable[[], str]) -> str:
    """Take a join code from the line, the environment, or where one is wanted from the person; "" without one.

    The variable is removed from `environ`, so that no code that runs later in this process or its children finds it.

    Raises:
        ConfigError: one was wanted and none was given.
    """
    from_environment = environ.pop(VARIABLE, "")
    text = given or from_environment or (ask() if wanted else "")
    if wanted and not text.strip():
        if not sys.stdin.isatty():
            raise ConfigError(f"cannot ask for the join code here, since there is no terminal: set {VARIABLE}")
        raise ConfigError(f"no join code: give the one that the orchestrator shows, or set {VARIABLE}")
    return text
