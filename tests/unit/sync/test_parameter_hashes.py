from __future__ import annotations

import pytest

from guava_nb.errors import TrainingError
from guava_nb.protocol.messages import ParameterChange, StateLoaded
from guava_nb.sync.parameter_hashes import OwnChanges, ParameterHashes, check_equal


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


CLAMPED, OTHER = ParameterChange("w", "a1", 2.0, 1e-15), ParameterChange("w", "b2", 2.1, 1e-15)


def test_changes_of_a_step_must_be_those_of_the_first_worker_of_the_kind() -> None:
    changes = OwnChanges()
    assert changes.other_than(0, "cpu", CLAMPED) is None and changes.other_than(1, "cpu", CLAMPED) is None
    assert changes.other_than(0, "cpu", CLAMPED) is None  # a second shard of the step
    for change in (OTHER, None):
        other = changes.other_than(2, "cpu", change)
        assert other is not None and (other.rank, other.change) == (0, CLAMPED)
    assert changes.other_than(2, "cpu", ParameterChange("w", "d4", 2.0 + 4e-16, 1e-15)) is None  # normalised once more
    assert changes.other_than(2, "cpu", ParameterChange("w", "d4", 2.0 + 1e-6, 1e-15)) is not None
    changes = OwnChanges()
    assert changes.other_than(0, "cpu", None) is None
    assert changes.other_than(1, "cpu", OTHER) is not None


def test_other_devices_may_round_and_other_parts_of_a_model_change_other_parameters() -> None:
    changes = OwnChanges()
    assert changes.other_than(0, "cpu, stage 1, part 1", CLAMPED) is None
    assert changes.other_than(1, "cpu, stage 2, part 1", None) is None
    rounded = ParameterChange("w", "c3", 2.0 + 1e-6, 1e-15)
    assert changes.other_than(2, "cuda, stage 1, part 1", rounded) is None
    other = changes.other_than(3, "mps, stage 1, part 1", OTHER)
    assert other is not None and other.rank == 0
    assert OwnChanges().other_than(0, "cpu", OTHER) is None
