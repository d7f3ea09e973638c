"""From a plan to a job that is ready to start, and from a planned run to its forecast on the lines of a session."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.diary import Diary
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.cluster.line_rate import measure_lines
from guava_nb.cluster.path_probe import cuda_reach
from guava_nb.config import DistributedConfig
from guava_nb.errors import ClusterError
from guava_nb.export.facts import ExportFacts
from guava_nb.forecast.compression import squeezed_so_far
from guava_nb.forecast.forecast import Forecast
from guava_nb.forecast.planned_run import (
    Composed,
    PlannedRun,
    budget_of,
    forecast_of,
    guessed_feeds,
    unchanged_randomness,
)
from guava_nb.forecast.sync_choice import SyncChoice
from guava_nb.orchestrator.left_state import LeftState
from guava_nb.orchestrator.past_runs import PastRuns
from guava_nb.orchestrator.replica_sets import ReplicaSets
from guava_nb.orchestrator.run_builder import RunBuilder
from guava_nb.protocol.messages import Factory
from guava_nb.row_cache.policy import WorkerCaches
from guava_nb.spec.training_options import TrainingOptions
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.byte_budget import Budget, Limit, chosen_limit
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import TrainingPlan

__all__ = ["budget_for", "forecast_on", "job_for", "measured_lines", "planned_run", "record", "wait_until_back"]

#: How long a worker whose connections broke is waited for before a way to train is chosen: a break of its line and a redial.
_BACK_S = 10.0


def job_for(
    cluster: Cluster,
    replica_set: ReplicaSet,
    plan: TrainingPlan,
    sets: ReplicaSets,
    newest: Callable[[], TrainingJob | None],
) -> TrainingJob:
    """Return the job of a plan, which has the run's handle; it is not started yet.

    Args:
        cluster: whose workers do it.
        replica_set, plan: of the run.
        sets: give the trained model, for the handle.
        newest: gives the newest job; now that is the one of the run before.
    """
    plan.save_name = f"{replica_set.run_id}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    last = newest()
    if replica_set.goes_on and last is not None:
        plan.logged = last.logs.logged()
    job = TrainingJob(replica_set, plan, cluster, lambda: sets.model_of(replica_set, newest()))
    job.run.export_by(_exporter(replica_set, plan, len(cluster.roster.ready())))
    return job


def _exporter(replica_set: ReplicaSet, plan: TrainingPlan, workers: int) -> Callable[..., Path]:
    """Return what writes programs of a run; it keeps neither its model nor its data."""
    facts = ExportFacts.of(
        replica_set.run_id, replica_set.spec, replica_set.cells, workers, replica_set.from_seed, plan
    )  # fmt: skip

    def write(path: str | Path, *options: Any) -> Path:
        from guava_nb.export.write import export  # jinja2 and the rest of it only when a program is asked for

        return export(path, facts, *options)

    return write


def record(job: TrainingJob, diary: Diary, cluster: Cluster, left: LeftState, past: PastRuns) -> None:
    """Have a diary say that a job's run begins, and at its end what it cost and what is left; and `past` keep it.

    Args:
        job: of the run.
        diary: of the session.
        cluster: its workers.
        left: what the run leaves behind.
        past: the runs of this process.
    """

    def end() -> None:
        past.add(job.run.status())
        left.run_ended(job.replica_set, cluster)
        note = left.note(cluster) or "the state of its last step is here, and save_checkpoint(path) keeps it"
        diary.add(f"{job.run.ending()}. What is left: {note}")

    workers = ", ".join(map(cluster.name, cluster.roster.ready()))
    diary.add(f"{job.run.run_id} begins: mode {job.run.mode}, {job.plan.num_epochs} epochs, workers: {workers}")
    job.on_end = end
    past.follow(job.run)


def budget_for(
    limit: Limit, cluster: Cluster, replica_set: ReplicaSet, plan: TrainingPlan, composed: Composed
) -> Budget:
    """Return the budget of a run that is about to begin.

    Args:
        limit: what the user allows.
        cluster: its workers.
        replica_set, plan, composed: of the run.

    Raises:
        ConfigError: not even one step and its checkpoint have room.
    """
    planned = PlannedRun.about_to_begin(replica_set, plan, composed, cluster, limit.limit_bytes)
    with unchanged_randomness():
        return budget_of(limit, planned)


def forecast_on(
    cluster: Cluster | None, planned: PlannedRun, config: DistributedConfig, idle: bool, sync: SyncChoice | None = None
) -> Forecast:
    """Return the forecast of a run by what is known of the lines; those that are not known are measured first.

    Args:
        cluster: None before the session is open.
        planned: the run.
        config: of the session.
        idle: no run is in progress, so that the lines are free to be measured.
        sync: as for `forecast_of`.
    """
    if cluster is None:
        return forecast_of(planned, config, (None, None), sync=sync)
    measured = measured_lines(cluster) if idle else []
    squeezed = squeezed_so_far(cluster.seats.counted(), planned.composed.spec.optimizer_site == "orchestrator")
    return forecast_of(planned, config, _rates(cluster), squeezed, measured, sync)


def measured_lines(cluster: Cluster) -> list[str]:
    """Measure the lines that are not known; returns what is to be said of that."""
    try:
        return measure_lines(cluster)
    except ClusterError:  # another thread's work began meanwhile: the line is busy
        return []


def wait_until_back(cluster: Cluster) -> None:
    """Wait a moment for workers whose connections are broken: a way that is chosen now is for them, too."""
    job = Job(cluster)
    with contextlib.suppress(ClusterError, NobodyLeft), job.attached():
        job.pump(lambda: not job.suspects, _BACK_S)


def _rates(cluster: Cluster) -> tuple[float | None, float | None]:
    """Bytes a second out and in, of all lines together, as far as they were measured."""
    measured = [cluster.rates(rank) for rank in cluster.roster.alive()]
    known = [[rate for rate in way if rate is not None] for way in zip(*measured, strict=True)] or [[], []]
    return (sum(known[0]) or None, sum(known[1]) or None)


def planned_run(
    builder: RunBuilder,
    replica_sets: ReplicaSets,
    cluster: Cluster | None,
    config: DistributedConfig,
    options: TrainingOptions,
    model: Factory,
    loaders: tuple[Any, Any],
    is_real: bool = False,
) -> PlannedRun:
    """Return what a run of these options would be; built here only, and thrown away.

    Args:
        builder, replica_sets, config: of the session.
        cluster: None before the session is open; then `num_workers` of the configuration take part.
        options, model: as the user gave them.
        loaders: to train and to validate with; the second may be None.
        is_real: ask workers with GPUs whether they reach each other, as a run does that begins.
    """
    workers = (0 if cluster is None else len(cluster.roster.ready())) or config.num_workers
    reach = cuda_reach(cluster) if cluster is not None and is_real else lambda: False
    composed = builder.compose(options, model, loaders, workers, reach)
    plan = TrainingPlan.of(options, config, guessed_feeds(loaders, options.batch), *composed.validating)
    limit = chosen_limit(config, options.budget_bytes, options.save_path, options.checkpoint_dir)
    replica_set, trained = replica_sets.guess(composed, plan, options)
    caches = WorkerCaches() if cluster is None else cluster.caches
    return PlannedRun(replica_set, plan, composed, workers, trained, limit.limit_bytes if limit else 0, caches)
