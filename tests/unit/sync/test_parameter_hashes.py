from __future__ import annotations

import pytest

from guava_nb.errors import TrainingError
from guava_nb.protocol.messages import StateLoaded
from guava_nb.sync.parameter_hashes import ParameterHashes, check_equal


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


def test_workers_that_took_the_same_state_hold_the_same_parameters() -> None:
    first, other = (StateLoaded("run-1", 4, parameter_hash, "cpu") for parameter_hash in ("aaaa", "bbbb"))
    check_equal([("w0", first), ("w1", first), ("w2", StateLoaded("run-1", 4, "cccc", "cuda"))])
    with pytest.raises(
        TrainingError, match="w1 and w0 hold different parameters .* state of step 4 .*check the memory of w1"
    ):
        check_equal([("w0", first), ("w1", other)])
