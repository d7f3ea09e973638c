"""Which way to exchange suits the lines of a session: measures lines, has steps played, and asks the pure choice."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.notices import Notices
from guava_nb.config import DistributedConfig
from guava_nb.data.split import RowSplitter
from guava_nb.errors import GuavaError
from guava_nb.evaluation.step_trial import play_steps
from guava_nb.forecast.planned_run import Composed, PlannedRun, sync_work, unchanged_randomness
from guava_nb.forecast.sync_choice import ROUNDS, SyncChoice, WorkerPace, choose_sync
from guava_nb.link.hearing import Silences
from guava_nb.orchestrator.launch import measured_lines, wait_until_back
from guava_nb.orchestrator.replica_sets import ReplicaSets
from guava_nb.protocol.messages import Cell, Factory, RoundSpec, RunSpec
from guava_nb.replica.model.resident import OWN_MODEL
from guava_nb.spec.run_spec import round_spec, why_not_local
from guava_nb.spec.training_options import MEASURED, OF_SESSION, TrainingOptions
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.resident_replica_set import is_own
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.worker_data_facts import ask_data

__all__ = ["SyncAdvice", "made_of"]

#: What all exchanges of a run must come to before lines are measured for the sake of a warning, which costs 2.7 MB each; and
#: how long they must take before steps are played for it.
_WORTH_BYTES, _WORTH_S = 64 << 20, 20.0
#: So many silences of a line say that there will be others.
_OFTEN = 2
#: Optimizer steps of a run whose data has no length.
_UNKNOWN_STEPS = 1000
#: From so many optimizer steps on rounds are of partial averaging. Measured: after 150 steps its loss was 17 % above that of an
#: exchange in every step, where averaging was hardly above; after 4,000 it was 6 % above, and averaging 14 %.
_MANY_STEPS = 4000
#: How the ways of shorter runs travel. Measured: no other loss in four digits than that of float32 (guava_nb/sync/home_lines.md).
_AVERAGED_WIRE = "int4"


class SyncAdvice:
    """Knows how fast workers are at the session's model.

    Args:
        replica_sets: knows what was trained, and what workers hold.
        notices: of the session.
        planned: as `planned_run`, of this session.
    """

    def __init__(self, replica_sets: ReplicaSets, notices: Notices, planned: Callable[..., PlannedRun]) -> None:
        """Nothing was played yet."""
        self._replica_sets, self._notices, self._planned = replica_sets, notices, planned
        self._numbers = itertools.count(1)
        self._played: tuple[object, dict[int, float]] = (None, {})  # of which model; seconds per sample by rank

    def resolve(
        self,
        options: TrainingOptions,
        model: Factory,
        loaders: tuple[Any, Any],
        cluster: Cluster | None,
        config: DistributedConfig,
    ) -> tuple[TrainingOptions, SyncChoice | None]:
        """Return the options with the way to exchange that sync="auto" takes, and that choice; others as they are, and None.

        It takes about a minute at most beside building models.

        Args:
            loaders: to train and to validate with.
            cluster: None before the session is open or while it is at work; then nothing is measured.
        """
        if options.sync != "auto":
            return options, None
        step, rounds = options.synced("step", 1), options
        why = _why_no_trial(options, model)
        if why:
            choice = SyncChoice("step", 1, f"sync auto: an exchange in every step, because {why}")
        else:
            if cluster is not None:
                wait_until_back(cluster)
            with unchanged_randomness():
                run = self._planned(step, model, loaders, cluster is not None)
                refused = why_not_local(config, step, run.composed.spec.parallel)
                outer, wire = _rounds_of_auto(run)
                rounds = options.synced("local", ROUNDS[0], outer=outer, wire=wire)
                choice = self._choose(run, cluster, refused, rounds)
        of_rounds = {"outer": rounds.outer, "wire": rounds.wire, "sync_delay": choice.sync_delay}
        chosen = options.synced(choice.sync, choice.sync_every, choice.is_uneven, **of_rounds)
        return chosen, choice

    def _choose(
        self, planned: PlannedRun, cluster: Cluster | None, refused: str, rounds: TrainingOptions
    ) -> SyncChoice:
        if (
            planned.composed.spec.parallel is not None
        ):  # gradients do not cross the lines to here, which alone are known
            return SyncChoice("step", 1, f"sync auto: an exchange in every step, because {refused}")
        work = sync_work(planned, round_spec(rounds), rounds.wire)
        if cluster is None:
            refused = refused or "nothing can be measured now: no worker is here, or a run is in progress"
        if refused or cluster is None or planned.workers < 2:
            return choose_sync(work, [WorkerPace(f"worker {k + 1}") for k in range(planned.workers)], refused)
        measured_lines(cluster)
        paces = _paces(planned, cluster, self._seconds(planned, cluster))
        return choose_sync(work, paces, measured=rounds.shares in (None, MEASURED))

    def known(self, planned: PlannedRun, cluster: Cluster | None) -> SyncChoice | None:
        """Compare the ways for a run whose way the user chose, by what is known; None where that is not enough."""
        spec, workers = planned.composed.spec, planned.workers
        if cluster is None or spec.parallel is not None or workers < 2 or len(cluster.roster.ready()) != workers:
            return None
        paces = _paces(planned, cluster, self._known_seconds(planned, cluster))
        if any(pace.lacks for pace in paces):
            return None
        return _compared(planned, paces)

    def tell(
        self,
        choice: SyncChoice | None,
        replica_set: ReplicaSet,
        plan: TrainingPlan,
        composed: Composed,
        cluster: Cluster,
    ) -> None:
        """Tell what was chosen for a run that is about to begin; and, also of a user's choice, if one worker alone is faster."""
        warning = self._warning(replica_set, plan, composed, cluster) if choice is None else choice.warning
        if choice is not None:
            self._notices.add(choice.sentence, "run")
        if warning:
            self._notices.add(warning, "run")
            warnings.warn(warning, stacklevel=3)

    def _warning(self, replica_set: ReplicaSet, plan: TrainingPlan, composed: Composed, cluster: Cluster) -> str:
        """Return the sentence on a run that would take longer than one worker alone, else "".

        Nothing is measured for a run whose exchanges are small, and no step is played where they take less than 20 s.
        """
        if composed.spec.parallel is not None or is_own(composed.spec) or len(cluster.roster.ready()) < 2:
            return ""
        steps = plan.steps_left(replica_set.step)
        exchanged = replica_set.master.weights_bytes * (_UNKNOWN_STEPS if steps is None else steps) / plan.sync_every
        if exchanged < _WORTH_BYTES:
            return ""
        measured_lines(cluster)
        with unchanged_randomness():
            planned = PlannedRun.about_to_begin(replica_set, plan, composed, cluster)
            seconds = self._known_seconds(planned, cluster)
            rates = [rate for rank in cluster.roster.ready() for rate in cluster.rates(rank) if rate]
            is_long = bool(rates) and exchanged / min(rates) >= _WORTH_S
            if is_long and replica_set.predecessor is None:  # else the workers hold what the run goes on from
                seconds = self._seconds(planned, cluster)
            if not set(seconds) >= set(cluster.roster.ready()):
                return ""
            return _compared(planned, _paces(planned, cluster, seconds)).warning

    # ------------------------------------------------------------------------------------------------- how fast workers are

    def _seconds(self, planned: PlannedRun, cluster: Cluster) -> dict[int, float]:
        """Return seconds per sample by rank: of the last run of this model, else of steps that are played now."""
        known = self._known_seconds(planned, cluster)
        if set(known) >= set(cluster.roster.ready()):
            return known
        return {**self._of_trial(planned, cluster), **known}

    def _of_trial(self, planned: PlannedRun, cluster: Cluster) -> dict[int, float]:
        try:
            found = self._play(planned, cluster)
        except GuavaError as error:
            self._notices.add(f"no step was played beforehand, so it is not known how long one takes: {error}", "run")
            return {}
        self._played = (made_of(planned.composed.spec, planned.replica_set.cells), found)
        for rank, seconds in found.items():  # where the first round's measured shares begin
            cluster.roster.members[rank].sample_s = seconds
        return found

    def seconds_alone(self, planned: PlannedRun, cluster: Cluster) -> dict[int, float]:
        """Return seconds per sample of the whole model by rank, of steps that are played, unless they were."""
        is_known = self._played[0] == made_of(planned.composed.spec, planned.replica_set.cells)
        return self._played[1] if is_known else self._of_trial(planned, cluster)

    def _known_seconds(self, planned: PlannedRun, cluster: Cluster) -> dict[int, float]:
        made = made_of(planned.composed.spec, planned.replica_set.cells)
        last, found = self._replica_sets.trained, dict[int, float]()
        if self._played[0] == made:
            found |= self._played[1]
        if last is not None and made_of(last.spec, last.cells) == made:
            found |= {one.rank: one.sample_s for one in cluster.members() if one.shards and one.sample_s}
        return found

    def _play(self, planned: PlannedRun, cluster: Cluster) -> dict[int, float]:
        """Have workers play steps with the replicas of a planned run; of what is not known here nothing is played."""
        batch = planned.facts().train.first
        if batch is None:
            return {}
        composed = planned.composed
        # Of a pipeline the whole model, so that the seconds of a stage are a part of those.
        spec = replace(composed.spec, parallel=None, wire="fp32", rounds=None, cache=None, metrics=(), lockstep=False)
        if composed.own:
            spec = replace(spec, data=ask_data(cluster, planned.replica_set.cells, composed.own, lambda: None))
        made = self._replica_sets.for_trial(composed, spec, f"trial-{next(self._numbers)}")
        plan = planned.plan
        return play_steps(cluster, made, batch, RowSplitter(plan.split_fn, plan.feed.reading))


def _why_no_trial(options: TrainingOptions, model: Factory) -> str:
    """Return why steps of a run cannot be played without harm, or rounds cannot be, whatever the lines are; else ""."""
    if model.name == OWN_MODEL:
        return "the model lives in the worker's own process, where no step can be played beforehand"
    if str(options.resume) == OF_SESSION:
        return "the workers still hold the state that the run goes on from, so no step was played beforehand"
    if options.check == "strict":
        return "check='strict' compares a whole batch with its pieces, and in rounds no step is taken on a whole batch"
    return ""


def _rounds_of_auto(planned: PlannedRun) -> tuple[str, str]:
    """Return the outer method and the wire format of the rounds that sync="auto" may take for a run."""
    wire = planned.composed.spec.wire
    if wire != "fp32":
        return "average", wire
    is_long = (planned.plan.steps_left(planned.replica_set.step) or 0) >= _MANY_STEPS
    return ("partial", wire) if is_long else ("average", _AVERAGED_WIRE)


def _compared(planned: PlannedRun, paces: Sequence[WorkerPace]) -> SyncChoice:
    """Compare the way that the user chose with the others."""
    (outer, wire), plan = _rounds_of_auto(planned), planned.plan
    work = sync_work(planned, RoundSpec(outer, 1.0, 0.0), wire)
    return choose_sync(work, paces, asked=plan.sync_every, measured=plan.shares == MEASURED)


def _paces(planned: PlannedRun, cluster: Cluster, seconds: Mapping[int, float]) -> list[WorkerPace]:
    """Return what is known of each worker; the rates of lines are those of this end."""
    ranks, paces = cluster.roster.ready(), []
    for rank, share in zip(ranks, planned.plan.weights(range(len(ranks))), strict=True):
        out, back = cluster.rates(rank)
        session, sample_s = cluster.session(rank), seconds.get(rank)
        round_trip_s = (None if session is None else session.round_trip_s) or 0.0
        speed, silences = 1 / sample_s if sample_s else None, Silences() if session is None else session.silences
        breaks = silences.rate if silences.count >= _OFTEN else (0.0, 0.0)
        paces.append(WorkerPace(cluster.name(rank), speed, back, out, round_trip_s, share, *breaks))
    return paces


def made_of(spec: RunSpec, cells: tuple[Cell, ...]) -> object:
    """Return what a step's seconds depend on."""
    shape = spec.parallel and replace(spec.parallel, schedule="", micro_batches=0)
    return replace(spec, parallel=shape, wire="", rounds=None, cache=None, metrics=(), lockstep=False, data=()), cells
