"""All checks together: a check that breaks, and the exit status."""

from __future__ import annotations

from guava_nb.doctor import Check, exit_status, run_checks


def test_exit_status_and_a_check_that_breaks() -> None:
    def check_broken() -> Check:
        raise OSError("driver gone")

    results = run_checks([lambda: Check("a", "warning", ""), check_broken])
    assert results[1] == Check("broken", "fail", "the check itself failed with OSError: driver gone")
    assert exit_status(results) == 1
    assert exit_status(results[:1]) == 0
