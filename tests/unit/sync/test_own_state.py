"""What only one worker has: what a person is told when it is lost, and who reads which part from a disk."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.protocol.messages import RoundSpec
from guava_nb.sync.own_state import OwnParts, deal_parts, tell_own_state_lost
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


OWN = OwnParts.new(3, 3, {})
A, B, C = OWN.numbers


@pytest.mark.parametrize(
    ("found", "dealt"),
    [
        ({0: (A,), 1: (B,), 2: (C,)}, 3),
        ({0: (A, B, C), 1: (A,), 2: (A, B)}, 3),  # the first one gives way twice
        ({0: (B,), 1: (A, C), 2: (A, C)}, 3),
        ({0: (), 1: (A,), 2: (A,)}, 1),
        ({0: (A + 7,), 1: (B,)}, 1),  # a number that is none of these
        ({}, 0),
    ],
)
def test_as_many_workers_as_can_get_a_part_each(found: dict[int, tuple[int, ...]], dealt: int) -> None:
    for ranks in permutations(found):
        parts = deal_parts(OWN.numbers, {rank: found[rank] for rank in ranks})
        assert len(parts) == len(set(parts.values())) == dealt
        assert all(number in found[rank] for rank, number in parts.items())


def test_numbers_of_one_checkpoint_share_all_but_their_last_digits() -> None:
    other = OwnParts.new(3, 3, {})
    assert {f"{number:x}"[:-3] for number in OWN.numbers} == {f"{A:x}"[:-3]} != {f"{other.number:x}"[:-3]}
