"""Takes join codes out of any text that may be stored: cell output, logs, error messages."""

from __future__ import annotations

import re

__all__ = ["redact"]

# Codes are one line by design; who echoes what a person pasted in pieces must not echo it at all.
_JOIN_CODE = re.compile(r"guava(\d+):[A-Za-z0-9_\-+/=]{6,}")


def redact(text: str) -> str:
    """Replace every join code in `text` by a mark that it stood there."""
    return _JOIN_CODE.sub(r"guava\1:<hidden>", text)
