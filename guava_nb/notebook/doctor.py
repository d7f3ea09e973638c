"""%guava_doctor: what its line asks, as a view."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from IPython.core.error import UsageError

from guava_nb.doctor import check_join, check_launcher, run_checks
from guava_nb.render import View, checks_view

__all__ = ["doctor_report"]


def doctor_report(args: argparse.Namespace, ask: Callable[[], str]) -> View:
    """Check this machine, and the way to a session where a code is given.

    Args:
        args: `code`, in words as it was pasted, `join`: ask for one, and `on`: what would start workers.
        ask: gives a code by hidden prompt.
    """
    text = " ".join(args.code) or os.environ.get("GUAVA_JOIN_CODE", "")
    if args.join and not text:
        try:
            text = ask()
        except UsageError:
            raise UsageError(
                "no join code was given: %guava_doctor --join asks for the one that %guava_up shows"
            ) from None
    there = [check_launcher(args.on)] if args.on else []
    return checks_view([*run_checks(), *there], check_join(text) if text.strip() else [])
