"""What went wrong in the user's code, as the user should see it: their own lines, without ours around them."""

from __future__ import annotations

import traceback
from pathlib import Path

__all__ = ["user_traceback"]

_OURS = str(Path(__file__).resolve().parents[2])


def user_traceback(error: BaseException) -> str:
    """Format an exception with its causes, without this package's frames unless it was raised there."""
    formatted = traceback.TracebackException.from_exception(error)
    links = [formatted]
    while (link := links[-1].__cause__ or links[-1].__context__) is not None:
        links.append(link)
    in_a_cell = any(frame.filename.startswith("<cell ") for link in links for frame in link.stack)
    # Raised by a library that we called for the user, as a torch loss does: our frames would look like a fault of ours.
    by_others = bool(formatted.stack) and not formatted.stack[-1].filename.startswith(_OURS)
    if in_a_cell or by_others:
        for link in links:
            link.stack = traceback.StackSummary.from_list(f for f in link.stack if not f.filename.startswith(_OURS))
    return "".join(formatted.format())
