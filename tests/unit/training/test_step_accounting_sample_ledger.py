from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guava_nb.training.step_accounting import SampleLedger


def test_balance_of_a_clean_epoch_is_zero_and_zero() -> None:
    ledger = SampleLedger()
    ledger.draw(0, range(10))
    ledger.commit(0, [*range(5, 10), *range(5)])
    assert ledger.balance() == (0, 0)
    assert ledger.committed_in(0) == 10


def test_lost_and_duplicated_are_counted_apart_and_per_epoch() -> None:
    ledger = SampleLedger()
    ledger.draw(0, [1, 2, 3])
    ledger.commit(0, [1, 1, 3])
    ledger.draw(1, [2])
    assert ledger.balance() == (2, 1)  # 2 of epoch 0, 2 of epoch 1; the second 1


def test_a_sampler_may_draw_an_id_twice_on_purpose() -> None:
    ledger = SampleLedger()
    ledger.draw(0, [4, 4, 4])
    ledger.commit(0, [4, 4, 4])
    assert ledger.balance() == (0, 0)


def test_stopping_withdraws_what_was_not_reached_but_not_a_duplicate() -> None:
    ledger = SampleLedger()
    ledger.draw(0, range(10))
    ledger.commit(0, [0, 1])
    ledger.withdraw_uncommitted()
    assert ledger.balance() == (0, 0)


def test_truncate_goes_back_along_the_lineage() -> None:
    ledger = SampleLedger()
    ledger.draw(0, range(4))
    ledger.commit(0, range(4))
    ledger.draw(1, range(4))
    ledger.commit(1, [0, 1])
    ledger.truncate(0, 2)
    ledger.draw(0, [2, 3])
    ledger.commit(0, [2, 3])
    assert ledger.balance() == (0, 0) and ledger.committed_in(0) == 4 and ledger.committed_in(1) == 0


@given(st.lists(st.integers(-(2**62), 2**62)), st.lists(st.integers(-(2**62), 2**62)))
def test_balance_is_the_multiset_difference(drawn: list[int], committed: list[int]) -> None:
    from collections import Counter

    ledger = SampleLedger()
    ledger.draw(0, drawn)
    ledger.commit(0, committed)
    expected = (
        sum((Counter(drawn) - Counter(committed)).values()),
        sum((Counter(committed) - Counter(drawn)).values()),
    )
    assert ledger.balance() == expected
