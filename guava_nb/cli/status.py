"""`guava status`: what the session of this user on this machine shows, from any terminal, also while its kernel is busy.

Sessions of notebooks, and those of scripts with session_file=, are found. With --follow it is drawn anew until the run ends, or
Ctrl-C, which ends nothing but this; with --web on a page. Exit status 1 when there is none, or its process has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guava_nb.cli.live import live_lines
from guava_nb.cli.web import StatusPage, lan_address
from guava_nb.cluster.session_status import ShownStatus, session_statuses
from guava_nb.errors import ClusterError, ConfigError
from guava_nb.render.status import run_view, session_view
from guava_nb.render.text import to_text
from guava_nb.render.view import View

__all__ = ["add_command", "follow", "shown_text", "shown_view"]

_LOOK_S = 0.5
#: A status is written about once a second; one that is older is told to be old.
_OLD_S = 5.0
_OVER = frozenset({"done", "stopped", "failed"})
_NONE = (
    "no session of this user is open on this machine: %guava_up in a notebook opens one; a script's is seen where its "
    "Orchestrator has session_file=PATH, which --session names"
)


def add_command(commands: Any) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("status", help="show the session of this user on this machine", description=__doc__)
    parser.add_argument("--follow", "-f", action="store_true", help="draw it anew until the run ends, or Ctrl-C")
    parser.add_argument("--web", action="store_true", help="serve it as a live page on this machine, until Ctrl-C")
    parser.add_argument(
        "--lan", action="store_true", help="with --web: for others in this network too, such as a phone"
    )
    parser.add_argument("--port", type=int, default=0, metavar="P", help="with --web: port (default: any free one)")
    parser.add_argument("--session", type=Path, metavar="FILE", help="the session_file of a script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show it once, or until its end."""
    if (args.lan or args.port) and not args.web:
        raise ConfigError("--lan and --port are of the page that --web serves: give --web too")
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: a port is between 0 and 65535")
    found = session_statuses(args.session)
    if not found:
        raise ClusterError(_NONE)
    (path, shown), *others = found
    for other in [str(one) for one, status in others if status.lives]:
        print(
            f"Another session of this user is open here: guava status --session {shlex.quote(other)} shows it.\n",
            flush=True,
        )
    if args.web:
        return _serve(path, args.lan, args.port)
    if not args.follow:
        print(shown_text(shown, time.time(), shown.lives))
        return 0 if shown.lives else 1
    live = live_lines(sys.stdout)
    draw = (lambda text: print(text, flush=True)) if live is None else live.draw
    return follow(lambda: ShownStatus.read(path), draw, pause=time.sleep)


def _serve(path: Path, lan: bool, port: int) -> int:
    """Serve the page until Ctrl-C; a session that is closed and opened again meanwhile is shown again."""
    page = StatusPage(
        lambda: ShownStatus.read(path),
        lambda shown: shown_view(shown, time.time(), shown.lives),
        "0.0.0.0" if lan else "127.0.0.1",
        port,
    )
    print(f"The session is shown at {page.address(lan_address() if lan else '127.0.0.1')}", flush=True)
    if lan:
        print(
            "Anyone who has this address sees the session, but not the join code, and can change nothing.", flush=True
        )
    print("Ctrl-C ends the page, and nothing else.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        page.serve()
    return 0


def follow(read: Callable[[], ShownStatus | None], draw: Callable[[str], None], pause: Callable[[float], None]) -> int:
    """Draw what is read until the run ends, the session is closed or its process ends; returns the exit status.

    A run that ended before is shown, and the next one is waited for.
    """
    last, last_run, text = None, "", ""
    while (shown := read()) is not None:
        lives, of_run = shown.lives, shown.status.run
        if (new := shown_text(shown, time.time(), lives)) != text:
            draw(text := new)
        if not lives:
            return 1
        if of_run is not None and of_run.state in _OVER and last_run == of_run.run_id:
            return 0
        if of_run is not None and of_run.state not in _OVER:
            last_run = of_run.run_id
        last = shown
        pause(_LOOK_S)
    if last is not None:
        draw(f"{text}\n\nThe session was closed.")
    return 0


def shown_text(shown: ShownStatus, now: float, lives: bool) -> str:
    """Return the panel's text, or the session's where no run goes on, and below it how old it is where that matters."""
    view, note = shown_view(shown, now, lives)
    return f"{to_text(view)}\n\n{note}" if note else to_text(view)


def shown_view(shown: ShownStatus, now: float, lives: bool) -> tuple[View, str]:
    """Return the view of a run that goes on, else of the session; and a sentence where it is old, "" where it is not."""
    status, age_s = shown.status, now - shown.at
    of_run = status.run
    view = (
        session_view(status)
        if of_run is None or of_run.state in _OVER
        else run_view(of_run, status.workers, status.notes)
    )
    since = time.strftime("%H:%M:%S", time.localtime(shown.at))
    if not lives:
        return view, (
            f"The process of this session (pid {shown.pid}) has ended without closing it; this is how it stood at {since}, "
            f"{age_s:.0f} s ago. Its workers wait: open the notebook again, and %guava_up goes on with the same join code."
        )
    if age_s > _OLD_S:
        return view, (
            f"Nothing new since {since}, {age_s:.0f} s ago: the process of this session (pid {shown.pid}) is there and is "
            "stopped, or in a call that lets no other thread run."
        )
    return view, ""
