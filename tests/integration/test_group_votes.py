"""Replicas that reach each other decide on a step by themselves: as the orchestrator would, without the way there and back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.group_path import Findings
from guava_nb.errors import NotFinite, RemoteError
from guava_nb.protocol.messages import CommitStep
from guava_nb.training.run import Run
from tests.support.processes import CELL, PlainTraining, Session, difference, loader

#: A layer that is frozen after some steps: the ranks no longer have the gradients that they had before.
FREEZES = (
    CELL
    + """

class Freezing(Net):
    def forward(self, x):
        if self.training and not checking() and _calls == 2:
            self.first.requires_grad_(False)
        return super().forward(x)
"""
)


@pytest.fixture
def session(three: Session) -> Iterator[Session]:
    """Three workers on this host, in data mode on the direct path."""
    before = three.orch.config
    assert three.orch._cluster is not None
    three.orch._cluster.findings = Findings()
    three.orch.set_mode("data", path="direct")
    yield three
    three.orch.config = before


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that workers were told to apply."""
    told: list[int] = []
    send_all = Cluster.send_all

    def noting(self: Cluster, ranks: Any, message: Any, *rest: Any) -> None:
        ranks = list(ranks)
        if isinstance(message, CommitStep) and ranks:
            told.append(message.step)
        send_all(self, ranks, message, *rest)

    monkeypatch.setattr(Cluster, "send_all", noting)
    return told


class Watching:
    """A callback that looks at each step: with one the orchestrator decides."""

    def on_step(self, run: Run, record: dict[str, Any]) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.5, "scheduler": "StepLR", "scheduler_args": {"step_size": 2}, "scheduler_interval": "step"},
    ],
    ids=["plain", "clipped"],
)
def test_a_vote_decides_as_the_orchestrator_does(session: Session, commits: list[int], options: dict[str, Any]) -> None:
    batches = loader(rows=65)  # the last batch has one row, so two of three ranks have none
    run = session.train(batches, **options)
    assert commits == []
    watched = session.train(loader(rows=65), callbacks=[Watching()], **options)
    assert commits == [0, 1, 2, 3, 4, 5]
    ours, theirs = run.model().state_dict(), watched.model().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for key in ("loss", "learning_rate", "grad_norm", "samples"):
        assert [one.get(key) for one in run.history] == [one.get(key) for one in watched.history], key
    if not options:
        session.assert_undisturbed(run, PlainTraining(session.folder, loader(rows=65)).epochs(2))


def test_what_only_the_orchestrator_can_judge_is_left_to_it(session: Session, commits: list[int]) -> None:
    run = session.train(loader(), cell=FREEZES.format(folder=str(session.folder)), model="Freezing")
    assert run.wait(60)
    run.result()
    assert commits == [2], "the step in which ranks stop training a layer, and no other"


def test_a_value_that_is_not_finite_is_applied_nowhere_and_told_with_its_worker(session: Session) -> None:
    workers = session.ensure(3)
    workers[1].trap("loss", 3, "inf")
    with pytest.raises(NotFinite, match=rf"{workers[1].name} at step 3 .*was not applied anywhere"):
        session.train(loader(), epochs=1)
    workers[1].release()
    assert session.orch.run is not None
    plain = PlainTraining(session.folder, loader()).epochs(1, limit=2)
    assert difference(session.orch.run.model(), plain.model) <= 1e-12


def test_an_error_of_user_code_on_one_rank_costs_no_step_before_it(session: Session) -> None:
    workers = session.ensure(3)
    workers[2].trap("forward", 4, "raise")
    with pytest.raises(RemoteError, match=r"this batch is cursed"):
        session.train(loader(), epochs=1)
    workers[2].release()
    assert session.orch.run is not None
    assert len(session.orch.run.history) == 3
    plain = PlainTraining(session.folder, loader()).epochs(1, limit=3)
    assert difference(session.orch.run.model(), plain.model) <= 1e-12
    again = session.train(loader(), epochs=1)
    session.assert_undisturbed(again, PlainTraining(session.folder, loader()).epochs(1))


def test_a_worker_killed_after_a_vote_costs_no_sample(session: Session) -> None:
    victim = session.ensure(3)[0]
    victim.trap("forward", 3)
    run = session.train(loader(), detach=True)
    victim.wait_trapped()
    os.kill(victim.pid, signal.SIGKILL)
    session.assert_undisturbed(run, PlainTraining(session.folder, loader()).epochs(2))
    assert run.generations == 2 and run.losses == []
