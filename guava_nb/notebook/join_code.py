"""The sentences that need care: how a join code is handed over, and what joining grants."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from html import escape
from importlib import metadata
from types import TracebackType

from IPython.display import DisplayHandle

from guava_nb.notebook.display import say, show_bundle
from guava_nb.notebook.host import Host, binder_rule, colab_rule, is_loopback

__all__ = [
    "GRANT",
    "NEW_ADDRESS",
    "CodeBox",
    "code_html",
    "code_text",
    "grant_text",
    "hand_over",
    "install_line",
    "say_grant",
]

GRANT = (
    "Joining lets the orchestrator run its source code here, and install packages: in a process of its own, with your rights on "
    "this machine, until it closes or you interrupt this cell. Join only a session whose owner you trust."
)
_SECRET = (
    "The join code is a secret: who has it can take part. Before you share a notebook, clear this output here, and the cell "
    "with the code there (%guava_worker alone asks for it, and keeps it nowhere)."
)
_CALL = "Run this in the notebook that has the GPU:"
#: Above the code that a session has since its address changed.
NEW_ADDRESS = (
    "The session has a new join code. Workers that are away need it: interrupt their cell and run this there, and they go on "
    "where they were; so does whoever joins from now on. Those that are connected need nothing."
)


def install_line() -> str:
    """How the other side gets the package: from where this one came, as pip noted it (PEP 610).

    Never by its name: the name is not taken in any package index, so what is there may be anybody's.
    """
    try:
        noted = json.loads(metadata.distribution("guava-nb").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        noted = {}
    url = str(noted.get("url", ""))
    if noted.get("vcs_info"):
        return f'%pip install -q "{noted["vcs_info"].get("vcs", "git")}+{url}"'
    if url and not url.startswith("file:"):
        return f'%pip install -q "{url}"'
    return "# install guava_nb first, from the same place as here: %pip install PATH-OR-URL"


def _cell(code: str) -> str:
    return f"{install_line()}\n%load_ext guava_nb\n%guava_worker {code}"


def hand_over(code: str, ui: str, call: str = _CALL) -> None:
    """Write the secret out: the one place that does."""
    if ui in ("text", "none"):
        say(code_text(code, call), secret=True)
    else:
        show_bundle(code_text(code, call), code_html(code, call), secret=True)


class CodeBox:
    """The cell to paste, shown while a cell waits for workers and taken away when it does so no more.

    So a notebook that is stored later has the code only where %guava_up wrote it. A context manager.

    Args:
        code: "" shows nothing.
    """

    def __init__(self, code: str) -> None:
        """Nothing is shown yet."""
        self._code = code
        self._handle: DisplayHandle | None = None

    def show(self) -> None:
        """Show it, once. A page that cannot is no reason to stop waiting."""
        if self._code and self._handle is None:
            self._handle = DisplayHandle()
            _draw(self._handle.display, code_text(self._code), code_html(self._code))

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


def code_text(code: str, call: str = _CALL) -> str:
    """The cell to run on the other side, as text. Holds the secret."""
    body = "\n".join(f"    {line}" for line in _cell(code).splitlines())
    return f"{call}\n\n{body}\n\n{_SECRET}"


def code_html(code: str, call: str = _CALL) -> str:
    """The same as HTML: one click into the box marks all of it. Holds the secret."""
    style = (
        "user-select:all;-webkit-user-select:all;margin:4px 0;padding:6px 8px;border:1px solid rgba(128,128,128,.35)"
    )
    style += ";background:transparent;white-space:pre-wrap;overflow-wrap:anywhere"
    box = f'<pre style="{style}">{escape(_cell(code))}</pre>'
    help_ = '<span style="opacity:.7">(one click into the box marks all of it, then copy)</span>'
    parts = f'<div>{escape(call)} {help_}</div>{box}<div style="opacity:.8">{escape(_SECRET)}</div>'
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
