from __future__ import annotations

from guava_nb.training.step_accounting import PoisonSamples

A, B = (0, tuple(range(32))), (0, tuple(range(32, 64)))


def test_the_third_worker_lost_over_the_same_samples_is_told() -> None:
    blame = PoisonSamples()
    for rank in (0, 1):
        blame.hold(rank, A)
        assert blame.lost(rank) is None
    blame.hold(2, A)
    blamed = blame.lost(2)
    assert blamed is not None and blamed.samples == A and blamed.victims == (0, 1, 2)


def test_other_samples_returns_and_success_are_no_evidence() -> None:
    blame = PoisonSamples()
    for rank in (0, 1):
        blame.hold(rank, A)
        blame.lost(rank)
    blame.hold(2, A)
    blame.back(2)
    assert blame.lost(2) is None
    blame.hold(3, B)
    assert blame.lost(3) is None
    blame.done(A)
    blame.hold(4, A)
    assert blame.lost(4) is None


def test_what_a_member_was_at_first_counts() -> None:
    blame = PoisonSamples()
    for rank in (0, 1, 2):
        blame.hold(rank, A)
        blame.hold(rank, B)  # issued again to nobody in particular meanwhile
    assert [blame.lost(rank) for rank in (0, 1)] == [None, None]
    blamed = blame.lost(2)
    assert blamed is not None and blamed.samples == A
