"""When sums of gradients may leave during backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.parallel.replicas.data_axis import DataAxis


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("own", "goes_early"),
    [({}, True), ({"sharded": object()}, False), ({"norms": [object()]}, False), ({"gathers": True}, False)],
    ids=["nothing", "sharded", "norms", "gathers"],
)
def test_sums_wait_where_backward_has_collectives_of_its_own(own: dict[str, Any], goes_early: bool, last: bool) -> None:
    """A replica that uses fewer parameters would send its sums at another place among those collectives."""
    begun: list[bool] = []
    DataAxis(summing=SimpleNamespace(begin=begun.append), **own).begin(last)  # type: ignore[arg-type]
    assert begun == [last and goes_early]
