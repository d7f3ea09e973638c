"""What a program that was written still lacks. Imports no torch: a notebook asks."""

from __future__ import annotations

from pathlib import Path

__all__ = ["to_be_filled_in"]


def to_be_filled_in(path: Path) -> str:
    """Return a sentence on what a program that was written lacks, with a space before it; "" where it lacks nothing."""
    if "TO BE FILLED IN" not in path.read_text(encoding="utf-8"):
        return ""
    return " Its data was only in this notebook: fill in build_data() there first, or write it with --save-data."
