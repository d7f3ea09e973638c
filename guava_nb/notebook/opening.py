"""%guava_up: from its line to the orchestrator's settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError

from guava_nb.errors import ConfigError

__all__ = ["FLAGS", "code_to_dial", "orchestrator_settings"]

#: Settings of the orchestrator by the option that gives them.
FLAGS = {
    "master_ip": "--host", "master_port": "--port", "num_workers": "--workers", "tls": "--no-tls",
    "compression": "--compression", "prefetch_bytes": "--prefetch-mb",
}  # fmt: skip


def orchestrator_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was given on the line; defaults, environment and files are the configuration's business."""
    local = args.local or 0
    expected = args.workers if args.workers is not None else (local or None)
    if args.workers is not None and local > args.workers:
        raise ConfigError(
            f"--local {local} starts more workers than --workers {args.workers} expects: give --workers {local}, or leave it out"
        )
    given = {"master_ip": args.host, "master_port": args.port, "num_workers": expected, "compression": args.compression}
    if args.prefetch_mb is not None:
        given["prefetch_bytes"] = args.prefetch_mb << 20
    settings = {name: value for name, value in given.items() if value is not None}
    if args.no_tls:
        settings["tls"] = False
    return settings


def code_to_dial(words: Sequence[str]) -> str:
    """The join code of --connect, else of GUAVA_JOIN_CODE.

    Raises:
        UsageError: there is none.
    """
    text = " ".join(words) or os.environ.get("GUAVA_JOIN_CODE", "")
    if not text.strip():
        raise UsageError(
            "--connect needs the join code that the listening worker shows: %guava_up --connect guava1:..."
        )
    return text
