"""A worker leaves between two runs: what only it has is brought here before it goes."""

from __future__ import annotations

import logging
import threading

from guava_nb.cluster.cluster import Cluster
from guava_nb.errors import GuavaError
from guava_nb.sync.replica_set import ReplicaSet, fetch_between_runs

__all__ = ["take_over"]

log = logging.getLogger(__name__)


def take_over(replica_set: ReplicaSet | None, cluster: Cluster, rank: int) -> None:
    """Let a member go that leaves between two runs, with a last run's state fetched first if only workers have that.

    Returns at once: the rest happens on a thread.
    """
    if replica_set is None or rank not in replica_set.at or replica_set.master_step == replica_set.step:
        cluster.release(rank)
        return

    def work() -> None:
        try:
            fetch_between_runs(replica_set, cluster, None)
        except GuavaError as error:
            log.warning("%s left, and its state could not be fetched: %s", cluster.name(rank), error)
        finally:
            cluster.release(rank)

    threading.Thread(target=work, name="guava-handover", daemon=True).start()
