"""What a person is told when a worker is gone that had a state of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.protocol.messages import RoundSpec
from guava_nb.sync.own_state import tell_own_state_lost
from tests.support.training import spec


@pytest.mark.parametrize(
    ("rounds", "owed", "said"),
    [
        (None, None, None),
        (RoundSpec(), None, "w1 left, and what only it had in this run (sync='local') is lost: the state of its own optimizer."),
        (RoundSpec(), 2.345, "left out so far, 2.3 times the length of its last pseudo-gradient"),
        (RoundSpec(sync_delay=2), None, "the state of its own optimizer, and how far its own weights were from the common ones."),
        (RoundSpec(sync_delay=2), 1.0, "from the common ones, and what its messages had left out so far, 1 times"),
    ],
)  # fmt: skip
def test_only_rounds_lose_a_state_of_one_worker(rounds: RoundSpec | None, owed: float | None, said: str | None) -> None:
    told: list[str] = []
    member = SimpleNamespace(owed=owed)
    cluster: Any = SimpleNamespace(
        roster=SimpleNamespace(members={1: member}), notice=told.append, name=lambda rank: f"w{rank}"
    )
    tell_own_state_lost(cluster, spec(rounds=rounds), 1, "left")
    assert len(told) == (said is not None) and all(said in text for text in told if said)
