"""What is kept of a group's state when a run ends with an error, or is stopped, and a member is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.cluster.job import NobodyLeft
from guava_nb.sync.replica_set import GroupLost
from guava_nb.training.job import TrainingJob
from guava_nb.training.recovery import Recovery


class Group:
    """Four steps are committed; the members that are left hold them, and are asked through the job's pump."""

    step, master_step = 3, -1
    spec = SimpleNamespace(optimizer_site="workers", parallel=object())

    def __init__(self, elastic: bool, left: tuple[int, ...]) -> None:
        self.elastic, self.left, self.job = elastic, left, SimpleNamespace(interrupts=1)
        self.at = dict.fromkeys(left, self.step)
        self.back: list[bool] = []
        self.membership: Any = SimpleNamespace(formed=True, replica_set=self, available=lambda: list(left))
        self.recovery = Recovery(self.job, self.membership, *[SimpleNamespace()] * 6)  # type: ignore[arg-type]
        self.recovery.go_back = lambda tell=True: self.back.append(tell)  # type: ignore[method-assign]
        self.membership.cluster = SimpleNamespace(notice=lambda text: None)
        self.recovery.run = self.recovery.accounting = SimpleNamespace(  # type: ignore[assignment]
            approximate="", snapshot=SimpleNamespace(step=-1)
        )
        self.unit, self.nth = "step", str

    def in_step(self, job: Any) -> list[int]:
        return []  # only together they are the model, and one is gone

    def connected(self, available: Any) -> bool:
        return False

    def rescue(self, job: Any) -> bool:
        """As `GroupReplicaSet.rescue`: each look at the job's events asks whether the group can go on."""
        if self.membership.formed:
            raise GroupLost("w1 was lost")
        if not self.left:
            raise NobodyLeft
        self.master_step = self.step
        return True


@pytest.mark.parametrize("elastic", [True, False])
def test_after_an_error_that_cost_a_member_the_state_of_the_others_is_taken(elastic: bool) -> None:
    """A process that lost its device raises, and ends; each other replica of the group has all of the model."""
    group = Group(elastic, left=(0, 2))
    group.recovery.keep_whole_state()
    assert group.master_step == 3 and not group.back


def test_where_no_replica_is_left_the_run_goes_back_to_its_snapshot() -> None:
    group = Group(True, left=())
    group.recovery.keep_whole_state()
    assert group.back == [False]


def test_a_stop_takes_the_state_of_the_others_where_a_member_is_lost_meanwhile() -> None:
    group = Group(True, left=(0, 2))

    def fetch() -> None:
        raise GroupLost("w1 was lost")

    calls = SimpleNamespace(answer=lambda: None)
    job: Any = SimpleNamespace(
        _fetch_in_time=fetch, replica_set=group, ready={0, 2}, suspects=set(), _recovery=group.recovery,
        _boundary=SimpleNamespace(calls=calls),
    )  # fmt: skip
    TrainingJob._settle(job)
    assert group.master_step == 3 and not group.back


def test_a_spent_budget_takes_the_state_of_the_others_where_a_member_is_lost_meanwhile() -> None:
    group = Group(True, left=(0, 2))
    assert group.recovery.rescued() and group.master_step == 3
    nobody = Group(True, left=())
    assert not nobody.recovery.rescued()
