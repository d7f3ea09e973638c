"""The state of the last run, between two runs: fetched when it is asked for, or when a worker that has it leaves."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.errors import GuavaError, WorkerLost
from guava_nb.sync.own_state import tell_sums_lost
from guava_nb.sync.replica_set import ReplicaSet

__all__ = ["fetch_between_runs", "fetch_of_ended_process", "keep_own_between_runs", "take_over"]

log = logging.getLogger(__name__)


class _Fetching(Job):
    def on_leaving(self, rank: int) -> None:
        """Keep it: it may have the state that is fetched; the end of this job releases it."""


def fetch_between_runs(replica_set: ReplicaSet, cluster: Cluster, timeout_s: float | None) -> dict[str, Any]:
    """Return the state of the last committed step, from a worker when it is not here; no run may be in progress.

    Args:
        replica_set: whose state it is.
        cluster: of its workers.
        timeout_s: for the answer; None waits as long as they live.

    Raises:
        WorkerLost: the workers that hold it are gone.
        ClusterError: a run is in progress.
    """
    if replica_set.master_step == replica_set.step:
        return replica_set.master.state()
    if replica_set.predecessor is not None:  # the run that was to take it over did not come so far
        state = fetch_between_runs(replica_set.predecessor, cluster, timeout_s)
        replica_set.master.load_state(state)
        replica_set.master_step = replica_set.step
        return state
    if replica_set.gone_on_in:
        raise WorkerLost(
            f"the state after {replica_set.nth(replica_set.step)} of {replica_set.run_id} is gone: {replica_set.gone_on_in} "
            f"trained it further before it was copied here. Ask for the model of {replica_set.gone_on_in}"
        )
    job = _Fetching(cluster)
    replica_set.attach(job)
    try:
        with job.attached():
            return replica_set.fetch(job, timeout_s=timeout_s)
    except NobodyLeft as error:
        raise WorkerLost(
            f"the workers that hold the state of {replica_set.nth(replica_set.step)} are gone; {replica_set.rest()}. "
            f"{replica_set.ways_on()}"
        ) from error


def fetch_of_ended_process(
    replica_set: ReplicaSet, last_step: int, cluster: Cluster, timeout_s: float | None
) -> dict[str, Any]:
    """Return the newest state that workers hold of a run whose process is gone.

    Args:
        replica_set: of the same model and the same run id; it is at that state then.
        last_step: the last one that was issued there.
        cluster: of the workers.
        timeout_s: for their answers; None waits as long as they live.

    Raises:
        WorkerLost: no worker that is here holds a state of it.
        ClusterError: a run is in progress.
    """
    job = _Fetching(cluster)
    replica_set.attach(job)
    with job.attached():
        if not replica_set.find(job, last_step, timeout_s):
            names = ", ".join(map(cluster.name, sorted(job.ready))) or "none"
            way = replica_set.ways_on()
            raise WorkerLost(
                f"no worker that is here holds a state of {replica_set.run_id} (here: {names}). Wait for those that trained it, "
                f"or {way[0].lower()}{way[1:]}"
            )
        state = replica_set.fetch(job, timeout_s=timeout_s)
        replica_set.keep_own(job)
        tell_sums_lost(cluster, replica_set.spec, replica_set.master.layout, replica_set.own)
        return state


def keep_own_between_runs(replica_set: ReplicaSet, cluster: Cluster) -> None:
    """Have workers keep what only they have for a checkpoint of the last committed step, as `keep_own`."""
    if replica_set.unit != "round" or len(replica_set.holders(cluster)) < 2:
        return
    job = _Fetching(cluster)
    replica_set.attach(job)
    with contextlib.suppress(NobodyLeft), job.attached():
        replica_set.keep_own(job)


def take_over(replica_set: ReplicaSet | None, cluster: Cluster, rank: int) -> None:
    """Let a member leave between two runs; where only workers have the last run's state, fetch it first.

    Returns at once: the rest happens on a thread.

    Args:
        replica_set: of the last run; None where there was none.
        cluster: of the session.
        rank: that leaves; it is released at the end.
    """
    if replica_set is not None and replica_set.predecessor is not None:
        replica_set = replica_set.predecessor
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
