"""What went wrong in the user's code, as the user should see it: their own lines, without ours around them."""

from __future__ import annotations

import traceback
from pathlib import Path

__all__ = ["user_traceback"]

_OURS = str(Path(__file__).resolve().parents[2])


def user_traceback(error: BaseException) -> str:
    """Format an exception with its causes; where a shared cell takes part, without this package's frames."""
    formatted = traceback.TracebackException.from_exception(error)
    links = [formatted]
    while (link := links[-1].__cause__ or links[-1].__context__) is not None:
        links.append(link)
    if any(frame.filename.startswith("<cell ") for link in links for frame in link.stack):
        for link in links:
            link.stack = traceback.StackSummary.from_list(f for f in link.stack if not f.filename.startswith(_OURS))
    return "".join(formatted.format())
