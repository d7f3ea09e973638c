from __future__ import annotations

from guava_nb.sync.parameter_hashes import ParameterHashes


def test_workers_of_one_kind_are_compared_step_by_step() -> None:
    hashes = ParameterHashes()
    assert not hashes.differs(3, "cpu", "a", 0)
    assert not hashes.differs(3, "cuda", "b", 1)  # another kind rounds differently
    assert not hashes.differs(4, "cpu", "c", 0)
    assert not hashes.differs(3, "cpu", "a", 2)
    assert hashes.differs(3, "cpu", "x", 2)


def test_what_is_old_or_of_a_lineage_that_was_left_is_not_compared() -> None:
    hashes = ParameterHashes()
    hashes.differs(3, "cpu", "a", 0)
    hashes.differs(8, "cpu", "a", 0)
    assert not hashes.differs(3, "cpu", "b", 1)
    hashes.clear()
    assert not hashes.differs(8, "cpu", "b", 1)
