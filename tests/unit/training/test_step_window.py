"""When the next step may be issued: how long a round of local steps waits for members that are away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.sync.whole_replica_set import BACK_S
from guava_nb.training import step_window
from guava_nb.training.step_window import StepWindow


class Rounds:
    """A window of rounds over ten members, at a time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: float | None = None) -> None:
        self.now, self.suspects = 0.0, set[int]()
        monkeypatch.setattr(step_window.time, "monotonic", lambda: self.now)
        replica_set = SimpleNamespace(
            spec=SimpleNamespace(rounds=object(), parallel=None), master=SimpleNamespace(weights_bytes=1000)
        )
        members = {rank: SimpleNamespace(sample_s=None, share=None) for rank in range(10)}
        cluster = SimpleNamespace(rates=lambda rank: (rate, None), roster=SimpleNamespace(members=members))
        membership: Any = SimpleNamespace(replica_set=replica_set, cluster=cluster, current=lambda: list(range(10)))
        job: Any = SimpleNamespace(suspects=self.suspects, slow={})
        flight = SimpleNamespace(machine=SimpleNamespace(step=7))
        exchange: Any = SimpleNamespace(deals=False, issue=lambda *_: flight)
        credit: Any = SimpleNamespace()
        plan: Any = SimpleNamespace(
            split_fn=None, feed=SimpleNamespace(reading=None), shares=None, weights=lambda team: [1.0] * len(team)
        )
        self.window = StepWindow(job, membership, plan, exchange, credit)

    def waits(self, now: float, *suspects: int) -> bool:
        self.now = now
        self.suspects.clear()
        self.suspects.update(suspects)
        return self.window._waits_for_away()

    def issue(self) -> None:
        assert self.window.issue(0, [], (8, 9)) == 7


def test_a_round_waits_for_a_member_that_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch)
    assert not rounds.waits(0) and rounds.waits(1, 3) and rounds.waits(BACK_S, 3)
    assert not rounds.waits(1 + BACK_S, 3)
    rounds.issue()
    assert not rounds.waits(2 + BACK_S, 3), "the next round does not wait for it again"
    assert rounds.waits(3 + BACK_S, 3, 4), "for another one it does"


def test_members_that_go_away_one_after_the_other_hold_up_no_round_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a second, each away for BACK_S and more: 1,000 simulated workers came to no round at all."""
    rounds, issued = Rounds(monkeypatch), 0
    for second in range(40):
        if not rounds.waits(float(second), *{(second - ago) % 10 for ago in range(8)}):
            rounds.issue()
            issued += 1
    assert 40 // (BACK_S + 1) <= issued <= 40 // BACK_S


def test_a_state_that_takes_long_is_worth_a_longer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(monkeypatch, rate=100.0)
    assert rounds.waits(0, 3) and rounds.waits(29, 3) and not rounds.waits(30, 3)
