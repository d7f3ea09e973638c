"""The sentences that need care: how a join code is handed over, and what joining grants."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import Any

from IPython.display import DisplayHandle

from guava_nb.errors import ConfigError
from guava_nb.install.cell import plain_cell
from guava_nb.notebook.display import say, show_bundle
from guava_nb.notebook.host import Host, binder_rule, colab_rule, is_loopback
from guava_nb.protocol.joincode import JoinCode

__all__ = [
    "GRANT",
    "NEW_ADDRESS",
    "CodeBox",
    "cell_to_paste",
    "code_html",
    "code_text",
    "grant_text",
    "hand_over",
    "reach_note",
    "say_grant",
]

GRANT = (
    "Joining lets the orchestrator run its source code here, and install packages: in a process of its own, with your rights on "
    "this machine, until it closes or you interrupt this cell. Join only a session whose owner you trust."
)
_SECRET = (
    "The join code is a secret: anyone who has it can join. Before you share a notebook, clear this output here, and the cell "
    "with the code there (%guava_worker alone asks for it, and keeps it nowhere)."
)
_COPY = (
    "getSelection().selectAllChildren(this.parentNode.previousElementSibling);"
    "this.textContent=document.execCommand('copy')?'Copied':'Marked: copy it now'"
)
_CALL = "Run this in the notebook that has the GPU:"
#: Above the code that a session has since its address changed.
NEW_ADDRESS = (
    "The session has a new join code. Workers that are away need it: interrupt their cell and run this there, and they go on "
    "where they were. New workers need it, too. Workers that are connected need nothing."
)


def reach_note(orchestrator: Any) -> str:
    """Who can use the join code, where that is this machine only; "" elsewhere."""
    if orchestrator.status().tunnel or not is_loopback(JoinCode.decode(orchestrator.join_code.encode()).host):
        return ""
    return (
        "There is no tunnel, so this code works on this machine only. For workers elsewhere: %guava_up --tunnel cloudflared "
        "(needs no account), or --host with this machine's address in a network of your own."
    )


def cell_to_paste(orchestrator: Any) -> str:
    """What makes another notebook a worker. It brings guava_nb along, unless only this machine, which has it, is reached."""
    if reach_note(orchestrator):
        return plain_cell(orchestrator.join_code)
    try:
        return str(orchestrator.worker_cell())
    except ConfigError as problem:
        return f"# Install guava_nb here first, from the same place as there: {problem}\n{plain_cell(orchestrator.join_code)}"


def hand_over(cell: str, ui: str, call: str = _CALL) -> None:
    """Write the secret out, in the cell to paste: the one place that does."""
    if ui in ("text", "none"):
        say(code_text(cell, call), secret=True)
    else:
        show_bundle(code_text(cell, call), code_html(cell, call), secret=True)


class CodeBox:
    """The cell to paste, shown while a cell waits for workers and taken away when it does so no more.

    So a notebook that is stored later has the code only where %guava_up wrote it. A context manager.

    Args:
        cell: "" shows nothing.
    """

    def __init__(self, cell: str) -> None:
        """Nothing is shown yet."""
        self._cell = cell
        self._handle: DisplayHandle | None = None

    def show(self) -> None:
        """Show it, once. A page that cannot is no reason to stop waiting."""
        if self._cell and self._handle is None:
            self._handle = DisplayHandle()
            _draw(self._handle.display, code_text(self._cell), code_html(self._cell))

    def __enter__(self) -> CodeBox:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put nothing in its place."""
        if self._handle is not None:
            _draw(self._handle.update, "", "")


def _draw(draw: Callable[..., None], text: str, html: str) -> None:
    with contextlib.suppress(Exception):
        draw({"text/plain": text, "text/html": html}, raw=True)


def code_text(cell: str, call: str = _CALL) -> str:
    """The cell to run on the other side, as text. Holds the secret."""
    return f"{call}\n\n{textwrap.indent(cell, '    ')}\n\n{_SECRET}"


def code_html(cell: str, call: str = _CALL) -> str:
    """The same as HTML: a button copies it, and one click into the box marks all of it. Holds the secret."""
    style = (
        "user-select:all;-webkit-user-select:all;margin:4px 0;padding:6px 8px;border:1px solid rgba(128,128,128,.35)"
    )
    style += ";background:transparent;white-space:pre-wrap;overflow-wrap:anywhere;max-height:11em;overflow:auto"
    box = f'<pre style="{style}">{escape(cell)}</pre>'
    # Where a page keeps buttons from doing anything, the box is still there.
    button = f'<button onclick="{_COPY}">Copy the cell</button>'
    help_ = f'{button} <span style="opacity:.7">or one click into the box marks all of it, then copy</span>'
    parts = f'<div>{escape(call)}</div>{box}<div>{help_}</div><div style="opacity:.8">{escape(_SECRET)}</div>'
    return f'<div style="font-size:13px;line-height:1.45">{parts}</div>'


def say_grant(host: Host, joins: str, ui: str) -> None:
    """Say what to know before joining the session at this name or address from this host."""
    text = grant_text(host, joins)
    if ui in ("text", "none"):
        say(text)
    else:  # standard output breaks its lines within words
        paragraphs = "".join(f"<div>{escape(line)}</div>" for line in text.splitlines())
        show_bundle(text, f'<div style="font-size:13px;line-height:1.45;opacity:.8">{paragraphs}</div>')


def grant_text(host: Host, joins: str) -> str:
    """What to know before joining from this host.

    Args:
        joins: name or address of the session that is joined.
    """
    beyond = "" if is_loopback(joins) else binder_rule(host)
    return "\n".join(text for text in (GRANT, colab_rule(host), beyond) if text)
