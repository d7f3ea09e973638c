"""From a plan to a job that is ready to start, and from a planned run to its forecast on the lines of a session."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.diary import Diary
from guava_nb.cluster.line_rate import measure_lines
from guava_nb.config import DistributedConfig
from guava_nb.errors import ClusterError
from guava_nb.forecast.compression import squeezed_so_far
from guava_nb.forecast.forecast import Forecast
from guava_nb.forecast.planned_run import Composed, PlannedRun, budget_of, forecast_of, unchanged_randomness
from guava_nb.orchestrator.left_state import LeftState
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.byte_budget import Budget, Limit
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import TrainingPlan

__all__ = ["budget_for", "forecast_on", "job_for", "record"]


def job_for(
    cluster: Cluster, replica_set: ReplicaSet, plan: TrainingPlan, model: Callable[[], torch.nn.Module]
) -> TrainingJob:
    """Return the job of a plan, which has the run's handle; it is not started yet.

    Args:
        model: gives the trained model, for the handle.
    """
    plan.save_name = f"{replica_set.run_id}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return TrainingJob(replica_set, plan, cluster, model)


def record(job: TrainingJob, diary: Diary, cluster: Cluster, left: LeftState) -> None:
    """Have a diary say that a job's run begins, and at its end what it cost and what is left."""

    def end() -> None:
        left.run_ended(job.replica_set, cluster)
        note = left.note(cluster) or "the state of its last step is here, and save_checkpoint(path) keeps it"
        diary.add(f"{job.run.ending()}. What is left: {note}")

    workers = ", ".join(map(cluster.name, cluster.roster.ready()))
    diary.add(f"{job.run.run_id} begins: mode {job.run.mode}, {job.plan.num_epochs} epochs, workers: {workers}")
    job.on_end = end


def budget_for(
    limit: Limit, cluster: Cluster, replica_set: ReplicaSet, plan: TrainingPlan, composed: Composed
) -> Budget:
    """Return the budget of a run that is about to begin.

    Raises:
        ConfigError: not even one step and its checkpoint have room.
    """
    workers = len(replica_set.pick(set(cluster.roster.ready())))
    trained = replica_set.step >= 0 or bool(replica_set.master.optimizer.state)
    planned = PlannedRun(replica_set, plan, composed, workers, trained, limit.limit_bytes, cluster.caches)
    with unchanged_randomness():
        return budget_of(limit, planned)


def forecast_on(cluster: Cluster | None, planned: PlannedRun, config: DistributedConfig, idle: bool) -> Forecast:
    """Return the forecast of a run by what is known of the lines; those that are not known are measured first.

    Args:
        cluster: None before the session is open.
        idle: no run is in progress, so that the lines are free to be measured.
    """
    if cluster is None:
        return forecast_of(planned, config, (None, None))
    measured = _measured(cluster) if idle else []
    squeezed = squeezed_so_far(cluster.all_sessions(), planned.composed.spec.optimizer_site == "orchestrator")
    return forecast_of(planned, config, _rates(cluster), squeezed, measured)


def _measured(cluster: Cluster) -> list[str]:
    """Measure the lines that are not known; returns what is to be said of that."""
    try:
        return measure_lines(cluster)
    except ClusterError:  # another thread's work began meanwhile: the line is busy
        return []


def _rates(cluster: Cluster) -> tuple[float | None, float | None]:
    """Bytes a second out and in, of all lines together, as far as they were measured."""
    measured = [cluster.rates(rank) for rank in cluster.roster.alive()]
    known = [[rate for rate in way if rate is not None] for way in zip(*measured, strict=True)] or [[], []]
    return (sum(known[0]) or None, sum(known[1]) or None)
