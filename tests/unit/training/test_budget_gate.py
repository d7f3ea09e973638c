"""What a training job asks its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from guava_nb.cluster.group_path import Route
from guava_nb.errors import CheckpointError
from guava_nb.training.budget_gate import BudgetGate
from guava_nb.training.byte_budget import Budget, BudgetSpent, Costs, Limit, slack_bytes

COSTS = Costs(start=1000, state=5000, step=300, batch_times=1, validation=2000, workers=2)
RESERVE = 5000 * 1.05 + slack_bytes(2)


class Workers:
    """Whom a gate names, tells and lets go."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.gone: list[int] = []
        self.notice = self.told.append

    def name(self, rank: int) -> str:
        return f"w{rank}"

    def let_go(self, rank: int, reason: str) -> None:
        self.gone.append(rank)


@dataclass
class Replicas:
    at: dict[int, int]
    step: int = 3
    master_step: int = -1
    least: int = 1
    route: Route = Route("relay", "star", "asked for")


class Members:
    """As much of a run's members as is asked; `used` is what their run has used."""

    def __init__(self, used: float, limit: float = 100_000) -> None:
        self.budget = Budget(Limit(int(limit), None), COSTS, lambda: int(used))
        self.budget.begin("relay")
        self.out: list[int] = []
        self.cluster = Workers()
        self.replica_set = Replicas({0: 3, 1: 2})
        self.ready, self.drained = {0, 1}, 0

    def current(self) -> list[int]:
        return [0, 1]

    def leave_out(self, ranks: Sequence[int]) -> None:
        self.out += ranks

    def drain(self) -> None:
        self.drained += 1
        self.replica_set.at |= {0: 9, 1: 9}

    @property
    def budget_gate(self) -> BudgetGate:
        return BudgetGate(self, self.drain, self.budget)


FULL = 100_000 - RESERVE


def test_what_has_no_room_waits_for_what_is_under_way_and_then_gives_up() -> None:
    members = Members(FULL - 2 * 315 - 100)
    members.budget.issued(5, 315, 0)
    assert members.budget_gate.afford_step([]) == pytest.approx(315) and members.drained == 1
    with pytest.raises(BudgetSpent):
        Members(FULL - 400).budget_gate.afford_step([])


def test_steps_that_all_have_applied_are_paid_for() -> None:
    members = Members(FULL - 2 * 315 * 2 - 50)
    for step in (1, 2, 3):
        members.budget.issued(step, 315, 0)
    assert members.budget_gate.afford_step([]) == pytest.approx(315) and not members.drained


def test_the_state_in_between_comes_only_where_the_last_one_keeps_its_room() -> None:
    assert Members(0).budget_gate.affords_state("snapshot")
    members = Members(FULL - 5000)
    budget_gate = members.budget_gate
    assert (
        not budget_gate.affords_state("save")
        and not budget_gate.affords_state("save")
        and len(members.cluster.told) == 1
    )
    with pytest.raises(CheckpointError, match=r"takes 5\.0 kB, and of the 43\.0 kB"):
        budget_gate.refuse_save()
    members.replica_set.master_step = members.replica_set.step
    budget_gate.refuse_save()


def test_newcomers_and_a_new_start_need_room_for_the_state() -> None:
    assert Members(0).budget_gate.affords_newcomers([2])
    members = Members(FULL - 6000)
    assert (
        not members.budget_gate.affords_newcomers([2])
        and members.out == [2]
        and "w2 can take no part in this run" in members.cluster.told[0]
    )
    Members(0).budget_gate.afford_start_over()
    with pytest.raises(BudgetSpent):
        Members(FULL - 3000).budget_gate.afford_start_over()


def test_a_validation_needs_room_and_teaches_what_it_takes() -> None:
    with pytest.raises(BudgetSpent), Members(FULL - 3000).budget_gate.validation():
        pass
    used = [0]
    members = Members(0)
    members.budget.used = lambda: used[0]
    with members.budget_gate.validation():
        used[0] = 70_000
    assert members.budget.validation_cost == 70_000


def test_who_breaks_is_let_go_only_where_nothing_can_be_sent_again() -> None:
    for used, gone in ((0, []), (FULL + 10, [1])):
        members = Members(used)
        members.budget_gate.on_broken(1)
        assert members.cluster.gone == gone


def test_without_a_budget_everything_is_allowed() -> None:
    members = Members(10**9)
    budget_gate = BudgetGate(members, members.drain, None)
    assert (
        budget_gate.afford_step([]) == 0.0 and budget_gate.affords_state("save") and budget_gate.affords_newcomers([2])
    )
    budget_gate.begin()
    budget_gate.issued(0, 1)
    budget_gate.afford_start_over()
    budget_gate.refuse_save()
    budget_gate.on_broken(0)
    with budget_gate.validation(), budget_gate.aside():
        pass
    assert not members.cluster.told and not members.cluster.gone
