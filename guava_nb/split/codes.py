"""How the two sides agree on who dials: the side that has a join code does; the side without one listens and shows its own."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable
from typing import Any

from guava_nb.protocol.joincode import JoinCode
from guava_nb.worker.network_worker import join_code_from

__all__ = ["Codes", "ShowCode", "given_codes", "show_code", "show_notice", "token_prompt"]

Codes = JoinCode | str | list[JoinCode | str]
#: Gets the join code of this side, which listens, and the other side's call up to it.
ShowCode = Callable[[JoinCode, str], None]


def show_code(code: JoinCode, call: str) -> None:
    """Print a join code behind the call that takes it on the other side; like a password, it is for that side only."""
    sys.stdout.write(f'Listening on {code.address}. On the other side: {call}join_code="{code.encode()}")\n')
    sys.stdout.flush()


def show_notice(sentence: str) -> None:
    """Print what happened to the tunnel."""
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


def token_prompt() -> Callable[[], str] | None:
    """A hidden prompt for an authtoken; None where no person can be asked."""
    ipython: Any = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    return _ask_for_token if at_terminal or getattr(kernel, "_allow_stdin", False) else None


def _ask_for_token() -> str:
    try:
        return getpass.getpass("Authtoken of ngrok (it is shown and kept nowhere): ")
    except Exception:  # each front end that cannot ask says so in its own way
        return ""


def given_codes(join_code: Codes | None) -> list[JoinCode]:
    """Return the codes of the call, else the one in GUAVA_JOIN_CODE, else none.

    Raises:
        JoinCodeError: a text is damaged.
    """
    if isinstance(join_code, list | tuple):
        return [join_code_from(code) for code in join_code]
    if join_code is None and not os.environ.get("GUAVA_JOIN_CODE"):
        return []
    return [join_code_from(join_code)]
