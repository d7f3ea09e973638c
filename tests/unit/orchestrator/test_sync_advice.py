"""What sync="auto" asks workers before it chooses, where their lines break. Without a network."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

import pytest

from guava_nb.cluster.job import Job
from guava_nb.orchestrator import Orchestrator
from guava_nb.sync.replica_set import ReplicaSet
from tests.support.direct import DirectWorker
from tests.support.session import direct_session
from tests.support.training import loader

CELL = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(10, 4)
"""


@contextlib.contextmanager
def one_away_for_a_moment() -> Iterator[Orchestrator]:
    """A session with a model and two workers, one of which is away and comes back after a third of a second."""
    with direct_session(1) as session:
        assert session._cluster is not None
        away = DirectWorker(session._cluster, "away").start()
        session._cluster.wait_for(2, 10)
        session.share(CELL, "net")
        session.register_model("Net")
        away.go_away()
        threading.Timer(0.3, away.come_back).start()
        yield session


def test_a_worker_that_is_away_for_a_moment_is_waited_for_and_counts() -> None:
    with one_away_for_a_moment() as session:
        made = session.forecast(
            loader(), None, 1, criterion="CrossEntropyLoss", optimizer="SGD", precision="fp64", sync="auto"
        )
    assert made.sync is not None and made.workers == 2
    assert "only one worker" not in made.sync.sentence
    assert "how fast its line is at w0 is not known; how fast its line is at away is not known" in made.sync.sentence


def test_rounds_begin_with_a_worker_that_is_away_for_a_moment() -> None:
    """It would be a newcomer else, and get the state over its line when the others have gone on."""
    with one_away_for_a_moment() as session:
        run = session.start_training(
            loader(), None, 1, criterion="CrossEntropyLoss", optimizer="SGD", optimizer_args={"lr": 0.1}, precision="fp64",
            sync="local", sync_every=4, progress=False,
        )  # fmt: skip
        assert len(run.history) == 1
        assert session._cluster is not None
        assert all(member.samples for member in session._cluster.members())


def test_rounds_wait_for_a_worker_whose_line_breaks_while_the_run_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    require = ReplicaSet.require
    with direct_session(1) as session:
        assert session._cluster is not None
        away = DirectWorker(session._cluster, "away").start()
        session._cluster.wait_for(2, 10)
        session.share(CELL, "net")
        session.register_model("Net")

        def breaking(self: ReplicaSet, job: Job, ranks: Iterable[int]) -> None:
            away.go_away()
            threading.Timer(0.3, away.come_back).start()
            require(self, job, ranks)

        monkeypatch.setattr(ReplicaSet, "require", breaking)
        session.start_training(
            loader(), None, 1, criterion="CrossEntropyLoss", optimizer="SGD", optimizer_args={"lr": 0.1}, precision="fp64",
            sync="local", sync_every=4, progress=False,
        )  # fmt: skip
        assert all(member.samples for member in session._cluster.members())
