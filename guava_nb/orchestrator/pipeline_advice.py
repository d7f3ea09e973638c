"""Which schedule and how many micro-batches suit the lines of a session: measures them, and asks the pure choice."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.notices import Notices
from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError
from guava_nb.forecast.forecast import Forecast
from guava_nb.forecast.pipeline_choice import PipelineChoice, StageLine, StagePace, choose_pipeline
from guava_nb.forecast.planned_run import PlannedRun, unchanged_randomness
from guava_nb.forecast.stage_bytes import passed_between
from guava_nb.forecast.sync_choice import SyncChoice
from guava_nb.orchestrator.launch import measured_lines, wait_until_back
from guava_nb.orchestrator.replica_sets import ReplicaSets
from guava_nb.orchestrator.sync_advice import SyncAdvice, made_of
from guava_nb.parallel.pipeline.stages import split_model
from guava_nb.protocol.messages import Factory
from guava_nb.spec.training_options import TrainingOptions

__all__ = ["PipelineAdvice"]


class PipelineAdvice:
    """Remembers what was chosen for which run.

    Args:
        replica_sets, notices, planned: as for `SyncAdvice`.

    Attributes:
        sync: chooses how often to exchange; knows how fast workers are, and has steps played.
        chosen: for the run that was asked for last; None where nothing was to be chosen.
    """

    def __init__(self, replica_sets: ReplicaSets, notices: Notices, planned: Callable[..., PlannedRun]) -> None:
        """Nothing is chosen yet."""
        self.sync = SyncAdvice(replica_sets, notices, planned)
        self._notices, self._planned = notices, planned
        self._last: tuple[object, PipelineChoice | None] = (None, None)
        self.chosen: PipelineChoice | None = None

    def resolve(
        self,
        options: TrainingOptions,
        model: Factory,
        loaders: tuple[Any, Any],
        cluster: Cluster | None,
        config: DistributedConfig,
    ) -> tuple[TrainingOptions, SyncChoice | None]:
        """As `SyncAdvice.resolve`; where the schedule of a pipeline is "auto", choose that, too, which takes as long."""
        self.chosen = None
        options, choice = self.sync.resolve(options, model, loaders, cluster, config)
        self._choose_schedule(options, model, loaders, cluster, config)
        return options, choice

    def _choose_schedule(
        self,
        options: TrainingOptions,
        model: Factory,
        loaders: tuple[Any, Any],
        cluster: Cluster | None,
        config: DistributedConfig,
    ) -> None:
        if config.pipeline_schedule != "auto" or not config.pipeline_parallel:
            return
        if cluster is not None:
            wait_until_back(cluster)
        with unchanged_randomness():
            planned = self._planned(options, model, loaders, cluster is not None)
            shape = planned.composed.spec.parallel
            if shape is None or shape.pp < 2:
                return
            ranks = () if cluster is None else tuple(cluster.roster.ready())
            spec, rows = planned.composed.spec, planned.facts().train.batch_rows
            key = (made_of(spec, planned.replica_set.cells), spec.wire, ranks, rows)
            if self._last[0] != key or cluster is None:
                self._last = (key, self._choose(planned, cluster, config))
        self.chosen = self._last[1]

    def _choose(self, planned: PlannedRun, cluster: Cluster | None, config: DistributedConfig) -> PipelineChoice:
        run, shape = planned.facts(), planned.composed.spec.parallel
        assert shape is not None
        rows = max(1, round(run.train.batch_rows / shape.dp))
        if cluster is None:
            names = [f"worker {stage + 1}" for stage in range(shape.pp)]
            nothing = StageLine(0.0, 0.0, None, None, 0.0)
            return choose_pipeline(
                [StagePace(name, None) for name in names], [nothing] * (shape.pp - 1), rows, config.micro_batches
            )
        try:
            crossing, _ = passed_between(run, split_model(copy.deepcopy(run.model), shape.pp, shape.split).modules)
        except ConfigError as error:
            why = f"because what passes between stages is not known: {error}"
            text = f"schedule auto: 1f1b with {config.micro_batches} micro-batches, {why}"
            return PipelineChoice("1f1b", config.micro_batches, text)
        measured_lines(cluster)
        seconds = self.sync.seconds_alone(planned, cluster)
        ranks = cluster.roster.ready()[: shape.pp * shape.tp : shape.tp]
        # Stages are cut so that they cost about the same; a worker's seconds are those of the whole model.
        stages = [StagePace(cluster.name(rank), seconds.get(rank, 0.0) * rows / shape.pp) for rank in ranks]
        lines = [
            _line(cluster, pair, [sum(way) * rows for way in ways])
            for pair, ways in zip(pairwise(ranks), crossing, strict=True)
        ]
        return choose_pipeline(stages, lines, rows, config.micro_batches)

    def tell(self, choice: SyncChoice | None, *run: Any) -> None:
        """Tell what was chosen for a run that is about to begin; arguments as for `SyncAdvice.tell`."""
        self.sync.tell(choice, *run)
        if self.chosen is not None:
            self._notices.add(self.chosen.sentence, "run")

    def noted(self, forecast: Forecast) -> Forecast:
        """Return a forecast with what was chosen for it among its notes."""
        if self.chosen is None:
            return forecast
        return dataclasses.replace(forecast, notes=(*forecast.notes, self.chosen.sentence))


def _line(cluster: Cluster, pair: tuple[int, int], nbytes: list[float]) -> StageLine:
    """Return what joins two workers by way of the orchestrator; rates are those of this end."""
    (out, back), (next_out, next_back) = map(cluster.rates, pair)
    sessions = [cluster.session(rank) for rank in pair]
    round_trips_s = [(None if session is None else session.round_trip_s) or 0.0 for session in sessions]
    forward, backward = nbytes
    return StageLine(forward, backward, _least(back, next_out), _least(next_back, out), sum(round_trips_s) / 2)


def _least(one: float | None, other: float | None) -> float | None:
    return min(one, other) if one and other else None
