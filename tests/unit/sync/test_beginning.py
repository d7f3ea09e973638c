"""The state to go back to is what it should be while that can be had, and else what is left, and says which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.sync.beginning import Beginning


class Master:
    """Holds a number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state(self) -> dict[str, Any]:
        """Return the number."""
        return {"value": self.value}

    def load_state(self, state: dict[str, Any]) -> None:
        """Become a number."""
        self.value = state["value"]


def at_workers(master: Any, copy: Any) -> Beginning:
    instead = Beginning("the state after step 3 of run-1", master)
    return Beginning.at_workers(
        "the state after step 9 of run-1", master, lambda: copy, lambda parts: parts[0], instead
    )


def test_what_the_master_holds_is_kept_before_it_changes() -> None:
    master: Any = Master(1)
    beginning = Beginning("the state that run-1 began with", master)
    assert beginning.state() == {"value": 1} and not beginning.loss
    beginning.preserve()
    master.value = 2
    assert beginning.state() == {"value": 1}


def test_nothing_is_kept_for_nobody() -> None:
    master: Any = Master(1)
    beginning = Beginning("the state that run-1 began with", master)
    beginning.drop()
    beginning.preserve()
    assert beginning._saved is None


def test_a_copy_that_comes_is_the_state_and_nothing_is_lost() -> None:
    copy = SimpleNamespace(is_whole=False, parts=lambda: [{"value": 9}])
    beginning = at_workers(Master(3), copy)
    assert beginning.loss.startswith("the state after step 9 of run-1 is lost") and beginning.state() == {"value": 3}
    copy.is_whole = True
    assert not beginning.loss and beginning.state() == {"value": 9} and beginning.name.endswith("9 of run-1")


@pytest.mark.parametrize("copy", [None, SimpleNamespace(is_whole=False)], ids=["not asked for", "under way"])
def test_where_no_copy_comes_it_is_what_is_left_for_good(copy: Any) -> None:
    master: Any = Master(3)
    beginning = at_workers(master, copy)
    beginning.preserve()
    master.value = 12
    assert beginning.loss.endswith("The run goes on from the state after step 3 of run-1")
    beginning.settle()
    assert (
        not beginning.loss and beginning.state() == {"value": 3} and beginning.name == "the state after step 3 of run-1"
    )
