"""Where text and views leave for the page. Only the cell's own thread may call anything here.

`GUAVA_UI` chooses: "widget" (a live widget), "html" (a live output without widgets), "text", "none" (no live panel,
answers as text). No detection of front ends is reliable, so widget and html outputs always carry their plain-text
twin along.
"""

from __future__ import annotations

import getpass
import os
import re
import sys
from collections.abc import Mapping
from html import escape
from typing import Any, cast

from IPython.core.error import UsageError
from IPython.display import display

from guava_nb.notebook.line_words import near
from guava_nb.notebook.settings import UI_NAMES, settings_of
from guava_nb.render import View, redact, to_html, to_text

__all__ = [
    "UI_NAMES",
    "ask_hidden",
    "can_ask",
    "cell_number",
    "choose_ui",
    "say",
    "show",
    "show_bundle",
    "show_help",
    "show_png",
]


#: An option in a line of usage, which is not broken at its hyphens.
_BRACKETED = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]")


def choose_ui(shell: object, environ: Mapping[str, str] = os.environ, stdout: object | None = None) -> str:
    """One of `UI_NAMES`: what `%config Guava.ui` says, else GUAVA_UI, else text wherever no page is sure to be there.

    Raises:
        UsageError: GUAVA_UI has another value.
    """
    set_here = settings_of(shell).ui
    wanted = environ.get("GUAVA_UI", "auto").strip().lower() or "auto" if set_here == "auto" else set_here
    if wanted != "auto":
        if wanted not in UI_NAMES:
            raise UsageError(f"GUAVA_UI={wanted!r} is not one of auto, {', '.join(UI_NAMES)}{near(wanted, UI_NAMES)}")
        return wanted
    stream = type(sys.stdout if stdout is None else stdout).__module__
    in_kernel = getattr(shell, "kernel", None) is not None and stream.startswith("ipykernel")
    return "html" if in_kernel and not environ.get("CI") else "text"


def can_ask(shell: object) -> bool:
    """Whether a person may be there to answer."""
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return bool(getattr(kernel, "_allow_stdin", True))  # not where a program runs the notebook
    return sys.stdin is not None and sys.stdin.isatty()


def cell_number(shell: Any) -> int:
    """The number of the cell that runs, as in Out[5]: newer versions of IPython count on before a cell runs."""
    return int(shell.displayhook.prompt_count)


def ask_hidden(question: str, shell: object) -> str:
    """Ask for a secret: what is typed is kept in no cell, no history and no output. "" where there is no user to ask."""
    try:
        return getpass.getpass(question) if can_ask(shell) else ""
    except Exception:  # each front end that cannot ask says so in its own way
        return ""


def say(text: str, *, secret: bool = False, end: str = "\n") -> None:
    """Write a line, or a part of one with another `end`; join codes are taken out unless the caller shows one (`secret`)."""
    sys.stdout.write((text if secret else redact(text)) + end)
    sys.stdout.flush()


def show(view: View, ui: str) -> None:
    """Show a view once, for good."""
    if ui in ("text", "none"):
        say(to_text(view))
    else:
        show_bundle(to_text(view), to_html(view))


def show_bundle(text: str, html: str, *, secret: bool = False) -> None:
    """Show the same thing as text and HTML; the front end picks. Falls back to text when it cannot be displayed."""
    try:
        display(cast(Any, {"text/plain": text, "text/html": html}), raw=True)
    except Exception as fault:  # a broken display must not hide the answer
        say(f"{text}\n(shown as text: {type(fault).__name__}: {fault})", secret=secret)


def show_help(text: str, unbroken: str, ui: str) -> None:
    """Show a magic's help; a page breaks the lines itself, as wide as it is.

    Args:
        text: of lines that fit a terminal.
        unbroken: the same, each option and sentence on one line; what is indented far goes on with the line above it.
        ui: one of `UI_NAMES`.
    """
    if ui in ("text", "none"):
        say(text)
        return
    lines = re.sub(r"\n {8,}", "  ", unbroken).split("\n")
    show_bundle(text, f'<div style="font-size:13px;line-height:1.45">{"".join(map(_help_line, lines))}</div>')


def _help_line(line: str) -> str:
    if not line.strip():
        return '<div style="height:.6em"></div>'
    words, _, told = line.strip().partition("  ")
    if line.startswith("  "):  # an option: its name, and what it does
        shown = f"<b><code>{escape(words)}</code></b> {escape(told.strip())}"
    else:
        head, colon, rest = line.partition(": ")
        is_code = head in ("usage", "example") and colon
        whole = _BRACKETED.sub(r'<span style="white-space:nowrap">\g<0></span>', escape(rest))
        shown = f"{head}: <code>{whole}</code>" if is_code else escape(line)
    return f'<div style="padding-left:2em;text-indent:-2em;overflow-wrap:break-word">{shown}</div>'


def show_png(png: bytes, text: str) -> None:
    """Show a picture; `text` stands in for it where pictures cannot be shown."""
    try:
        display(cast(Any, {"image/png": png, "text/plain": text}), raw=True)
    except Exception:  # a picture that cannot be shown must not hide the figures beside it
        say(f"({text}: this page shows no pictures)")
