"""Every interleaving of small runs keeps the invariants, and a fault that is planted in a machine breaks one of them.

The whole, with its figures: `python -m tests.support.explorer`.
"""

from __future__ import annotations

from unittest import mock

import pytest

from tests.support.explorer.configurations import COVERING, Case
from tests.support.explorer.invariants import AHEAD, ONCE
from tests.support.explorer.models import GatedStep, Round
from tests.support.explorer.planted import PLANTED, Planted
from tests.support.explorer.search import explore
from tests.support.explorer.world import walk


@pytest.mark.parametrize("case", COVERING, ids=lambda case: case.name)
def test_no_interleaving_breaks_an_invariant(case: Case) -> None:
    report = walk(case.configuration, case.limit_s, case.runs)
    assert report.found is None, str(report.found)
    assert report.ends >= case.runs and (case.runs or report.complete)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted) -> None:
    with mock.patch.object(planted.owner, planted.method, planted.instead):
        report = walk(planted.configuration, runs=planted.runs, seed=planted.seed)
    assert report.found is not None and report.found.violation.invariant == planted.caught_by, str(report.found)


@pytest.mark.parametrize("model", [GatedStep, Round])
def test_a_commit_after_the_device_has_stepped_keeps_the_invariants(model: type[GatedStep | Round]) -> None:
    report = explore(model)
    assert report.complete and report.found is None, str(report.found)


@pytest.mark.parametrize("model", [GatedStep, Round])
@pytest.mark.parametrize(
    ("fault", "caught_by"), [("aborts", AHEAD), ("trusts_own", AHEAD), ("tells_early", ONCE)], ids=str
)
def test_a_fault_in_the_order_of_such_a_commit_is_found(
    model: type[GatedStep | Round], fault: str, caught_by: str
) -> None:
    report = explore(lambda: model(**{fault: True}))
    assert report.found is not None and report.found.violation.invariant == caught_by
