"""Versions are compared by their release."""

from __future__ import annotations

from guava_nb.doctor.check import release


def test_release() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("7.0.0rc1") == (7, 0, 0)
    assert release("unknown") == ()
    assert release("2.9") < release("2.13")
