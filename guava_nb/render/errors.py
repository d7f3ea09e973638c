"""An error as a person should see it: one line of ours, then at most the traceback of the user's own code."""

from __future__ import annotations

from guava_nb.errors import RemoteError
from guava_nb.render.redact import redact

__all__ = ["error_text"]


def error_text(error: BaseException) -> str:
    """Class and message in one line; a `RemoteError` adds the traceback of the worker's code below it."""
    lines = [_headline(error)]
    if isinstance(error, RemoteError) and error.remote_traceback:
        lines += ["", f"Traceback on {error.worker}:", *error.remote_traceback.rstrip().splitlines()]
    return redact("\n".join(lines))


def _headline(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
