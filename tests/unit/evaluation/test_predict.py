"""What must be the same for rows of two predictions to belong together."""

from __future__ import annotations

from typing import Any

import pytest

from guava_nb.evaluation.predict import _asked
from guava_nb.protocol.messages import Factory, Wanted
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from tests.support.training import replica, spec


def asked(preprocess: Factory | None = None, step: Factory | None = None) -> dict[str, Any]:
    replica_set = WholeReplicaSet("run-1", spec(preprocess=preprocess), (), replica(spec()))
    return _asked(replica_set, [], None, Wanted(step=step))


@pytest.mark.parametrize("one", [None, Factory("twice"), Factory("scaled", {"by": 2})])
@pytest.mark.parametrize("other", [None, Factory("minus"), Factory("scaled", {"by": 3})])
def test_rows_of_two_functions_do_not_belong_together(one: Factory | None, other: Factory | None) -> None:
    """Neither of two preprocesses nor of two steps, nor of one with other arguments."""
    assert (asked(one) == asked(other)) == (asked(step=one) == asked(step=other)) == (one == other)
    assert asked(one) == asked(one)
