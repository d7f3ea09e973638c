"""What a worker says that it read from its disk counts where it was wanted, and is what was written."""

from __future__ import annotations

from typing import Any

import pytest

from guava_nb.protocol.messages import Prepared
from guava_nb.sync.states_on_disk import StateOnDisk, StatesOnDisk

NEWEST, KNOWN = StateOnDisk(11, 8, 1), StateOnDisk(10, 5, 1, "digest")


def answer(state: StateOnDisk, **changes: Any) -> Prepared:
    fields = {"ok": True, "saved": state.number, "step": state.step, "ticks": state.ticks, "digest": state.digest}
    return Prepared(run_id="run-1", **{**fields, **changes})


def wanting(*wanted: StateOnDisk) -> StatesOnDisk:
    states = StatesOnDisk()
    states.look_for(wanted)
    return states


def test_the_newest_is_the_best_and_only_workers_that_are_here_count() -> None:
    states = wanting(NEWEST, KNOWN)
    for rank, state in ((0, KNOWN), (1, NEWEST), (2, KNOWN)):
        states.note(rank, answer(state, digest=state.digest or "told now"))
    assert states.best([0, 1, 2]) == (NEWEST, [1])
    assert states.best([0, 2, 3]) == (KNOWN, [0, 2])
    assert states.best([3]) is None


@pytest.mark.parametrize(
    "changes",
    [{"saved": 12}, {"step": 6}, {"ticks": 0}, {"digest": "another"}, {"digest": ""}, {"ok": False}, {"saved": 0}],
)
def test_another_state_than_the_one_that_was_written_is_no_news(changes: dict[str, Any]) -> None:
    states = wanting(KNOWN)
    states.note(0, answer(KNOWN, **changes))
    assert states.best([0]) is None


def test_what_was_not_wanted_is_no_news_and_a_new_question_forgets_the_answers() -> None:
    states = StatesOnDisk()
    states.note(0, answer(KNOWN))
    assert states.best([0]) is None
    states.look_for([KNOWN])
    states.note(0, answer(KNOWN))
    assert states.best([0]) == (KNOWN, [0])
    states.note(0, answer(KNOWN, saved=0))  # it built the run anew
    assert states.best([0]) is None
    states.look_for([])
    assert states.best([0]) is None
