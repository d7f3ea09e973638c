from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard input: the end that a test writes to."""
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: reading))
    yield writing
    for end in (reading, writing):
        os.close(end)
