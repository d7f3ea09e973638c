"""Loads large libraries without collecting garbage meanwhile. Imports nothing large itself."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["loading_without_collections"]


@contextlib.contextmanager
def loading_without_collections() -> Iterator[None]:
    """Collect no garbage in the block: while modules load there is none, and looking for it doubles the time of torch._dynamo."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
