"""When a pass over data may ask a group."""

from __future__ import annotations

from types import SimpleNamespace

from guava_nb.config.mesh import Mesh
from guava_nb.evaluation.passes import GroupPass


def test_a_group_is_asked_when_all_have_applied_the_last_step() -> None:
    """Batches and commits go over different connections: one that overtook would be measured with older weights."""
    walk = GroupPass.__new__(GroupPass)
    applied: list[int] = []
    walk._asked, walk._job = [], SimpleNamespace()  # type: ignore[assignment]
    walk._group = SimpleNamespace(complete=lambda job: len(applied) == 2, mesh=Mesh(2, 1, 1))  # type: ignore[assignment]
    assert not walk._has_room()
    applied += [0, 1]
    assert walk._has_room()
