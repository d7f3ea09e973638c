"""Own parts on workers' disks are dealt to as many workers as can have one."""

from __future__ import annotations

from itertools import permutations

import pytest

from guava_nb.sync.own_state import OwnParts, deal_parts

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
