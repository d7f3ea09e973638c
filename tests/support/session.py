"""A session whose workers are loops on threads: everything that a user's call does, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from guava_nb import Orchestrator
from tests.support.direct import DirectWorker, end_workers


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
        yield orchestrator
    finally:
        cluster.close()
        end_workers(cluster)
    assert [worker.error for worker in started] == [None] * workers
