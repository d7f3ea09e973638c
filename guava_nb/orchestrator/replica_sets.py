"""The replica sets of a session: the one that was trained last, and one that is only asked; and where weights come from."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.notices import Notices
from guava_nb.errors import CheckpointError, ConfigError, WorkerLost
from guava_nb.forecast.planned_run import Composed
from guava_nb.orchestrator.beginning_notes import notes_on
from guava_nb.orchestrator.left_state import LeftState
from guava_nb.orchestrator.model_registry import ModelRegistry
from guava_nb.orchestrator.past_runs import PastRuns
from guava_nb.orchestrator.run_builder import RunBuilder
from guava_nb.orchestrator.run_record import LastRun, RunRecord, note_place
from guava_nb.parallel.replicas.buffer_policy import unused_in
from guava_nb.protocol.messages import EndRun, RunSpec
from guava_nb.replica.model.build import copied_model
from guava_nb.replica.model.pretrained import load_pretrained, pinned
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.local_replica import whole_replica
from guava_nb.spec.hub_name import is_on_hub
from guava_nb.spec.training_options import OF_SESSION, Reference, TrainingOptions
from guava_nb.sync.handover import fetch_between_runs, fetch_of_ended_process, keep_own_between_runs
from guava_nb.sync.replica_set import ReplicaSet, begin_building
from guava_nb.sync.resident_replica_set import ResidentReplicaSet, adopt, is_own
from guava_nb.sync.state_at_workers import StateLate
from guava_nb.training import checkpoint
from guava_nb.training.initial_state import (
    GOES_ON,
    SCHEDULE_GOES_ON,
    begun_anew,
    build_replicas,
    check_saved,
    from_checkpoint,
    from_last_run,
    goes_on,
    unlike,
)
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.saving.frozen_base import digests_of
from guava_nb.training.saving.weights_file import fitting_weights
from guava_nb.training.schedule_check import check_schedule

__all__ = ["ReplicaSets"]


class ReplicaSets:
    """Knows which replicas hold the weights of a session, and brings those of a run or of a question about.

    Args:
        registry: the model and the shared cells.
        notices: takes sentences on what a run begins with.
        cluster: gives the open cluster.
        patience_s: gives how long a worker that holds the state is waited for.
        run_path: gives where the last run's place in the data is noted, None where it is not.
        past: names the runs.

    Attributes:
        trained: those of the newest run, None before the first.
        loaded: the checkpoint that the next run goes on from.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        notices: Notices,
        cluster: Callable[[], Cluster],
        patience_s: Callable[[], float],
        run_path: Callable[[], Path | None] = lambda: None,
        past: PastRuns | None = None,
    ) -> None:
        """Nothing was trained or loaded yet."""
        self._past = past or PastRuns(lambda: None)
        self._run_path = run_path
        self._registry, self._notices = registry, notices
        self._cluster, self._patience_s = cluster, patience_s
        self.trained: ReplicaSet | None = None
        self.left = LeftState(lambda: self.held_by_workers)
        self._replaced: ReplicaSet | None = None  # by a registered instance, while only workers hold what was trained
        self.loaded: checkpoint.Loaded | None = None
        # Replicas that are asked and not trained, and what they were made of.
        self._asked: tuple[ReplicaSet, object] | None = None
        self._asked_numbers = itertools.count(1)
        self._given = weakref.WeakKeyDictionary[ReplicaSet, tuple[int, weakref.ref[torch.nn.Module]]]()  # to users

    def forget(self) -> None:
        """The session was closed, and its workers are gone."""
        self.trained = self._replaced = self._asked = None

    def let_go(self) -> None:
        """A registered instance takes the place of what was trained: its weights are where training starts."""
        if self.trained is not None:
            self._replaced, self.trained = self.trained, None

    @property
    def held_by_workers(self) -> ReplicaSet | None:
        """The replicas whose state is not to be lost when a worker leaves; None: there are none."""
        held = self.trained or self._replaced
        return held if held is None or held.predecessor is None else held.predecessor

    def load(self, path: Path) -> dict[str, Any]:
        """Read the checkpoint that the next run goes on from; returns what is in it.

        Raises:
            CheckpointError: it cannot be read.
        """
        self.loaded, last = checkpoint.Loaded(path, checkpoint.read(path)), self.trained or self._replaced
        if last is not None and not last.is_saved:
            self._notices.add(
                f"no file has what {last.run_id} trained in {last.step + 1} steps: before the next run begins elsewhere, "
                "save_checkpoint(path) (%guava_save PATH) keeps it",
                "run",
            )
        return self.loaded.content

    def fetch(self, replica_set: ReplicaSet) -> dict[str, Any]:
        """Bring the state of the last committed step here.

        Raises:
            WorkerLost: the workers that hold it are gone; from then on the state is what is left.
        """
        cluster = self._cluster()
        try:
            return fetch_between_runs(replica_set, cluster, self._patience_s())
        except StateLate:
            raise
        except WorkerLost as error:
            if replica_set.gone_on_in or replica_set.holders(cluster):
                raise
            left = replica_set.fall_back()
            raise WorkerLost(
                f"{error}; or train on from what is left, {left}: start_training (%guava_train) begins there now"
            ) from error

    def model_of(self, replica_set: ReplicaSet, job: TrainingJob | None = None) -> torch.nn.Module:
        """Return a copy of the trained model, the user's to change; where it is here already, also after the session was closed.

        Args:
            job: of the newest run; while that trains these replicas, each call makes another copy.
        """
        if job is not None and job.replica_set is replica_set and not job.run.done:
            copies: list[torch.nn.Module] = []
            job.with_state(lambda: copies.append(copied_model(replica_set.master.model)))
            return copies[0]
        if replica_set.master_step != replica_set.step and replica_set.gone_on_in:
            self._restore(replica_set)
        if replica_set.master_step != replica_set.step:
            self.fetch(replica_set)
        step, given = self._given.get(replica_set, (None, None))
        model = given() if given is not None and step == replica_set.step else None
        if model is None:
            model = _for_the_user(replica_set.master.model)
            self._given[replica_set] = replica_set.step, weakref.ref(model)
        return model

    def _restore(self, replica_set: ReplicaSet) -> None:
        """Give replicas whose master another run took over a master of their own, of the copy of their state."""
        copy = replica_set.copy
        if copy is not None and copy.wait(self._cluster(), self._patience_s()):
            replica_set.master = _like(replica_set)
            replica_set.master.load_state(replica_set.join(copy.parts()))
            replica_set.master_step = replica_set.step

    def save(self, path: Path, job: TrainingJob | None) -> None:
        """Save the state of the last committed step; during a run at its next boundary between steps.

        Args:
            job: of the newest run; on its own thread, in a callback, the state is that of the step it was called for.

        Raises:
            CheckpointError: nothing was trained yet, or the file cannot be written.
            WorkerLost: the workers that hold the state are gone.
        """
        if (trained := self.trained or self._replaced) is None or job is None:
            raise CheckpointError("no run was started here: train, or take up the last kernel's run (--resume session)")
        if job.run.done:
            state = self.fetch(trained)
            keep_own_between_runs(trained, self._cluster())
            at, place = job.accounting.steps_after(trained.step) - 1, job.where(trained.step)
            checkpoint.write(path, state, at, place, trained.spec, job.files.extras)
            trained.note_saved(path, trained.step)
            RunRecord.note_saved(self._run_path(), trained.step)
            return
        try:
            job.with_state(lambda: job.save(path))
        except CheckpointError as error:  # a callback cannot wait, and the run is to go on
            if not job.is_current():
                raise
            self._notices.add(f"{path} was not saved: {error}")

    # ------------------------------------------------------------------------------------------------------- to train

    def begin(self, composed: Composed, plan: TrainingPlan, options: TrainingOptions) -> ReplicaSet:
        """Build the master and bring it to where the run begins: a checkpoint, the last run, or the very start.

        Raises:
            CheckpointError: the checkpoint cannot be read, or belongs to another model or optimizer.
            GuavaError: something cannot be built.
        """
        start = self._start(options, composed)
        self._notices.forget("run")  # what an earlier run had to say
        replica_set = self._new(composed, options, start is not None)
        notes = [] if start is None else from_checkpoint(replica_set, plan, *start)
        _check_buffers(replica_set)
        check_schedule(replica_set, plan, notes.append)
        for note in (*notes, *notes_on(replica_set, plan, options.precision)):
            self._notices.add(note, "run")
        if options.save_only == "trainable":
            plan.base = digests_of(replica_set.master.model)
        self._registry.keep(composed.spec.model)
        self.loaded = None  # not before: after a refusal load_checkpoint still holds
        replica_set.look_at(plan.feed)
        plan.note_place = note_place(self._run_path(), replica_set, plan, self._cluster())
        return replica_set

    def _start(self, options: TrainingOptions, composed: Composed) -> checkpoint.Loaded | None:
        if options.resume is None:
            start = None if options.fresh else self.loaded
        elif str(options.resume) == OF_SESSION:
            start = self._of_session(composed)
        else:
            start = checkpoint.Loaded(Path(options.resume), checkpoint.read(Path(options.resume)))
        if start is not None and options.weights is not None and "base" not in start.content:
            if str(options.resume) == OF_SESSION:  # the line that began the run, and was told to be given again
                self._notices.add(f"{options.weights} is not read (--weights): {start.path} has weights")
                return start
            raise ConfigError(
                f"weights (--weights) would have no effect: {start.path}, from which the run goes on, holds the whole model. "
                "Leave one of them out (a checkpoint that was loaded: fresh=True, --fresh)"
            )
        return start

    def _of_session(self, composed: Composed) -> checkpoint.Loaded:
        """Where the last run of this session stands: the state from a worker that holds it, the place from the run's record.

        Raises:
            CheckpointError: nothing is known of it.
            WorkerLost: no worker that is here holds its state.
        """
        path = self._run_path()
        last = None if path is None else LastRun.read(path)
        if last is None:
            raise CheckpointError(
                'resume="session" goes on with what the last process of this session left, in data mode with whole replicas, and '
                "there is nothing of it: go on from a checkpoint (resume=PATH, --resume PATH), or train anew"
            )
        made = self._build(composed)
        made.run_id, made.files = last.run_id, list(filter(None, [last.newest_file()]))
        state = fetch_of_ended_process(made, last.last_step, self._cluster(), self._patience_s())
        self._past.launched(last.run_id)
        self._notices.add(f"{last.run_id} goes on after {made.nth(made.step)}, which a worker kept")
        content = {**state, **last.content(made.step), **({"own": made.own.record} if made.own else {})}
        return checkpoint.Loaded(Path(f"what the workers hold of {last.run_id}"), content)

    def _new(self, composed: Composed, options: TrainingOptions, resumes: bool) -> ReplicaSet:
        spec, last = composed.spec, self.trained
        fresh = options.fresh or resumes or options.weights is not None
        if is_own(spec):  # the worker's model is where it is: it goes on from itself, whatever was last
            if options.weights is not None or options.save_only != "all":
                raise ConfigError(
                    "the model lives in the worker's own process, and is trained as it is there: load weights into it there, and "
                    "leave weights and save_only out"
                )
            if spec.compile or spec.channels_last:
                raise ConfigError(
                    "the model lives in the worker's own process, and is trained as it is there: call model.compile(), or "
                    "model.to(memory_format=torch.channels_last), there, and leave compile and channels_last out"
                )
            own = adopt(self._past.next_id, spec, self._registry.cells, composed.shared, self._cluster())
            self.fetch(own)
            own.begin_with_what_is_here()
            return own
        if not fresh and self._replaced is not None:
            check_saved(self._replaced, "another model was registered")
        going_on = None if fresh else self._going_on(composed)
        if going_on is not None:
            return going_on
        holds_nothing = self.trained is None and self._replaced is None and self._asked is None
        if is_begun := holds_nothing and options.weights is None:
            begin_building(self._cluster(), self._past.next_id, spec, self._registry.cells)
        replica_set = self._build(composed, options.weights, resumes)
        replica_set.is_begun = is_begun
        if not fresh and last is not None:
            self._notices.add(from_last_run(replica_set, last, self.fetch), "run")
            replica_set.saved_step = None if replica_set.goes_on and not last.is_saved else -1
            if anew := begun_anew(replica_set, last, options.check == "strict"):
                self._notices.add(anew, "run")
        return replica_set

    def _going_on(self, composed: Composed) -> ReplicaSet | None:
        """Return replicas that begin with what workers hold of the last run; None where something is not what it was."""
        last, spec, cluster = self.trained, composed.spec, self._cluster()
        if last is not None:  # what it began with stands in its record, and its weights are other ones by now
            spec = replace(spec, pretrained=last.spec.pretrained)
        if last is None or isinstance(last, ResidentReplicaSet) or last.predecessor is not None or last.kept:
            return None
        same = (spec, self._registry.cells) == (last.spec, last.cells) and spec.optimizer_site == "workers"
        if not same or self.loaded is not None or not last.is_kept(cluster):
            return None
        if any(cluster.roster.members[rank].hello.own for rank in cluster.roster.ready()):
            return None  # a user's program may have changed its own model since
        is_here = last.master_step == last.step
        made = last.successor(self._past.next_id, _like(last) if is_here else last.master)
        made.code, made.registered, made.checks = composed.code, self._registry.instance_for(spec), last.checks
        made.goes_on = True
        self._notices.add(GOES_ON.format("", "") + (SCHEDULE_GOES_ON if spec.scheduler is not None else ""), "run")
        return made

    def _build(self, composed: Composed, weights: str | Path | None = None, resumes: bool = False) -> ReplicaSet:
        if is_on_hub(weights):
            composed.spec = replace(composed.spec, pretrained=pinned(str(weights)))
        spec, instance = composed.spec, None if composed.spec.pretrained else self._registry.instance_for(composed.spec)
        made = build_replicas(self._past.next_id, spec, self._registry.cells, composed.shared, instance)
        made.code, made.registered = composed.code, self._registry.instance_for(spec)
        made.checks = made.checks if self.trained is None else self.trained.checks
        added = [] if weights is None else _load(made, weights)
        if added and not resumes:  # else they come from the checkpoint
            names = ", ".join(added[:3]) + (f" and {len(added) - 3} more" if len(added) > 3 else "")
            self._notices.add(
                f"{weights} has no values of this shape for {names}: these begin as the model is built", "run"
            )
        return made

    def launched(self, replica_set: ReplicaSet) -> None:
        """A run of these replicas was launched."""
        self.left.wait_no_more()
        self.trained, self._replaced, self._asked = replica_set, None, None
        self._past.launched(replica_set.run_id)  # a refused one is none

    def guess(self, composed: Composed, plan: TrainingPlan, options: TrainingOptions) -> tuple[ReplicaSet, bool]:
        """Return the replicas as a run would begin, as to sizes; and whether there would be an optimizer's state.

        Raises:
            ConfigError: the model lives in the worker's own process.
            CheckpointError: as for `begin`.
        """
        start = self._start(options, composed)
        if is_own(composed.spec):
            raise ConfigError(
                "a model that lives in the worker's own process is not known here before a run asks for it, so there is no "
                "forecast; a budget still holds"
            )
        replica_set = self._build(composed, options.weights, start is not None)
        if start is not None:
            from_checkpoint(replica_set, plan, *start, rewind=False)
        is_new = options.fresh or start is not None or options.weights is not None
        last = None if is_new else self.trained
        trained = start is not None or (last is not None and goes_on(replica_set, last))
        if start is not None or not trained:  # where the last run's schedule stands, its workers know
            check_schedule(replica_set, plan, lambda sentence: None)
        _check_buffers(replica_set)
        return replica_set, trained

    def for_trial(self, composed: Composed, spec: RunSpec, run_id: str) -> ReplicaSet:
        """Return replicas that only play a few steps from new weights; what workers hold of others is brought here."""
        made = build_replicas(run_id, spec, self._registry.cells, composed.shared, None)
        made.code = composed.code
        return self._hold(made)

    # --------------------------------------------------------------------------------------------------------- to ask

    def for_question(
        self, builder: RunBuilder, criterion: Reference | None, preprocess: Reference | None
    ) -> ReplicaSet:
        """Return what is asked: the last run's replicas, or others of the same weights where cells or functions differ.

        A model that was not trained here, or a checkpoint that was loaded and not trained on, has replicas of its own.

        Args:
            criterion, preprocess: None takes those of the last run.

        Raises:
            GuavaError: there is no model, or something cannot be built.
        """
        trained = self._known()
        if isinstance(trained, ResidentReplicaSet):
            return trained
        workers = len(self._cluster().roster.ready())
        fresh = builder.question(self._registry.needed(self.loaded), workers, criterion, preprocess)
        if is_own(fresh):
            cells, shared = self._registry.cells, self._registry.shared()
            self.trained = adopt(f"asked-{next(self._asked_numbers)}", fresh, cells, shared, self._cluster())
            return self.trained
        if trained is None or self.loaded is not None:
            return self._standing(fresh, None)
        spec = replace(trained.spec, model=fresh.model, frozen=fresh.frozen)
        if criterion is not None:
            spec = replace(spec, criterion=fresh.criterion, step=None)
        if preprocess is not None:
            spec = replace(spec, preprocess=fresh.preprocess)
        same = spec == trained.spec and self._registry.cells == trained.cells
        return self._hold(trained) if same else self._standing(spec, trained)

    def _known(self) -> ReplicaSet | None:
        """The last run's replicas, unless they lived in workers' own processes that are gone: the next one has its own."""
        if isinstance(self.trained, ResidentReplicaSet) and self.trained.is_gone(self._cluster()):
            self.trained = None
        return self.trained

    def _standing(self, spec: RunSpec, trained: ReplicaSet | None) -> ReplicaSet:
        """Replicas that are only asked, with the weights of a run, of a checkpoint, or of the beginning."""
        cells, instance = self._registry.cells, self._registry.instance_for(spec) if trained is None else None
        weights = (instance, self.loaded and self.loaded.path) if trained is None else (trained, trained.step)
        made_of = (spec, cells, weights)
        if self._asked is None or self._asked[1] != made_of:
            state = None if trained is None else self.fetch(trained)
            replica_set = build_replicas(
                f"asked-{next(self._asked_numbers)}", spec, cells, self._registry.shared(), instance
            )
            if state is not None and (problem := _foreign(replica_set, spec, trained)):
                self._notices.add(f"another model was chosen, and it was not trained yet ({problem})", "run")
            elif state is not None:
                replica_set.master.load_state({"model": state["model"], "buffers": state.get("buffers")})
            elif self.loaded is not None:
                path, content = self.loaded
                checkpoint.check_model(path, content, replica_set.master.model.state_dict(), spec.model)
                replica_set.master.load_state({"model": content["model"]})
            self._asked = (replica_set, made_of)
        return self._hold(self._asked[0])

    def _hold(self, replica_set: ReplicaSet) -> ReplicaSet:
        """Workers hold one run at a time: what they hold of others is brought here, and they are known to forget it."""
        held = self.held_by_workers
        if held is not None and held is not replica_set and held.at:
            self.fetch(held)
        for other in (held, self._asked and self._asked[0]):
            if other is not None and other is not replica_set:
                _drop_all(other)
        return replica_set

    def empty_groups(self) -> None:
        """Bring here what lies in a process group, and have its members forget it: a process is in one group at a time.

        Raises:
            WorkerLost: the workers that hold the state are gone.
        """
        held = self.held_by_workers
        for one in (held, self._asked and self._asked[0]):
            if one is not None and one.spec.parallel is not None and one.at:
                if one is held and one.master_step != one.step:
                    self.fetch(one)
                self._cluster().send_all(list(one.at), EndRun(one.run_id))
                _drop_all(one)


def _drop_all(replica_set: ReplicaSet) -> None:
    """Note that no worker holds it."""
    for rank in list(replica_set.at):
        replica_set.drop(rank)


def _load(made: ReplicaSet, weights: str | Path) -> list[str]:
    """Load weights into the master, where it was not built with them; returns what learns and is not among them."""
    model, pretrained = made.master.model, made.spec.pretrained
    if not pretrained:
        state, added = fitting_weights(Path(weights).expanduser(), model)
        made.master.load_state({"model": state})
        made.from_seed = False
        return added
    if all(one.requires_grad for one in model.parameters()):  # then all of it is there
        return []
    return load_pretrained(pretrained, model)


def _check_buffers(replica_set: ReplicaSet) -> None:
    if unused := unused_in(replica_set.spec.buffers, replica_set.master.model):
        raise ConfigError(f"buffers (--buffers) names {unused[0]!r}, and no buffer of the model is called so")


def _like(replica_set: ReplicaSet) -> Replica:
    """Make a master like that of other replicas, with an optimizer that has done nothing yet."""
    master = replica_set.master
    return whole_replica(replica_set.spec, master.resolve, master.device, copied_model(master.model))


def _for_the_user(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return copied_model(model)
    except Exception:  # the user's class holds what cannot be copied, such as a lock
        return model


def _foreign(replica_set: ReplicaSet, spec: RunSpec, trained: ReplicaSet | None) -> str:
    """What a model of another name than the trained one's has not in common with that; "" where its weights fit."""
    if trained is None or spec.model is None or trained.spec.model is None:
        return ""
    return "" if spec.model.name == trained.spec.model.name else unlike(replica_set, trained)
