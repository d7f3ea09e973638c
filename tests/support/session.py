"""A session whose workers are loops on threads: everything that a user's call does, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from guava_nb import Orchestrator
from guava_nb.orchestrator import replica_sets
from guava_nb.replica.rng import seeded
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training import schedule_check
from guava_nb.training.initial_state import build_replicas
from tests.support.direct import RANDOM_STATE, DirectWorker, end_workers


def _build_alone(*args: Any) -> ReplicaSet:
    with RANDOM_STATE:  # of the workers, which build meanwhile
        return build_replicas(*args)


@contextmanager
def _seeded_alone(*args: Any) -> Iterator[None]:
    with RANDOM_STATE, seeded(*args):
        yield


def said(orchestrator: Orchestrator) -> str:
    """All notices, one a line."""
    return "\n".join(sentence for _, sentence in orchestrator._notices.numbered(100))


@contextmanager
def direct_session(workers: int, **settings: Any) -> Iterator[Orchestrator]:
    """Give an orchestrator with so many workers, in data mode through the hub; not opened, so it listens nowhere."""
    orchestrator = Orchestrator(path="relay", **settings)
    cluster = orchestrator._cluster = orchestrator._new_cluster()
    started = [DirectWorker(cluster, f"w{k}").start() for k in range(workers)]
    cluster.wait_for(workers, 10)
    try:
        alone = mock.patch.object(replica_sets, "build_replicas", _build_alone)
        with alone, mock.patch.object(schedule_check, "seeded", _seeded_alone):
            yield orchestrator
    finally:
        cluster.close()
        end_workers(cluster)
    assert [worker.error for worker in started] == [None] * workers
