"""The orchestrator as its user holds it: opens the session, shares source, trains, validates, saves.

Thin: its collaborators and `guava_nb` do the work. No display code except one tqdm bar for scripts.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.host import SessionHost
from guava_nb.cluster.path_probe import cuda_reach
from guava_nb.config import MODE_DEFAULTS, DistributedConfig, check_plan, mode_settings
from guava_nb.config.folder_risks import folder_notice
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ClusterError, ConfigError
from guava_nb.evaluation.between_runs import ask
from guava_nb.evaluation.metric_specs import Metrics, merges_for, metric_specs
from guava_nb.evaluation.passes import Progress
from guava_nb.evaluation.predict import Deadlines, predict
from guava_nb.evaluation.predictions import Predictions, wanted_of
from guava_nb.evaluation.validation import Validation
from guava_nb.forecast.forecast import Forecast
from guava_nb.forecast.planned_run import PlannedRun, unchanged_randomness
from guava_nb.orchestrator.generating import Generating
from guava_nb.orchestrator.launch import budget_for, forecast_on, job_for, planned_run, record
from guava_nb.orchestrator.model_registry import ModelRegistry
from guava_nb.orchestrator.past_runs import PastRuns
from guava_nb.orchestrator.pipeline_advice import PipelineAdvice
from guava_nb.orchestrator.replica_sets import ReplicaSets
from guava_nb.orchestrator.run_builder import NO_WORKER, RunBuilder
from guava_nb.orchestrator.run_check import RunCheck
from guava_nb.processes.interrupts import interrupts_remembered
from guava_nb.replica.model.wrappers import is_compiled, unwrapped
from guava_nb.replica.names import named_function
from guava_nb.spec.training_options import Reference, TrainingOptions, takes_options
from guava_nb.status import Status
from guava_nb.sync.handover import take_over
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.training.byte_budget import chosen_limit
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.progress_bar import reporting, watch
from guava_nb.training.run import Run
from guava_nb.training.status_survey import survey
from guava_nb.training.worker_data_facts import ask_data, feeds

__all__ = ["Orchestrator"]


def _sentences_on(config: DistributedConfig) -> Iterator[str]:
    """What a person should know of the settings when a session begins."""
    if ignored := config.without_effect():
        told = ", ".join(f"{name} ({other} takes its place)" if other else name for name, other in ignored.items())
        yield f"accepted, without effect here: {told}; see help(DistributedConfig)"
    if told := folder_notice(config):
        yield told


def _check_place(overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that belongs to a run or to a mode, with the call that takes it."""
    fields = {field.name for field in dataclasses.fields(DistributedConfig)}
    for name in overrides:
        for method in (Orchestrator.set_mode, Orchestrator.start_training):
            if name not in fields and name in inspect.signature(method).parameters:
                raise ConfigError(f"{name!r} is no setting of a session; give it to {method.__name__}({name}=...)")


class Orchestrator(RunCheck, Generating, SessionHost):
    """One training session on the side that has the data. A context manager.

    Args:
        config: settings; `overrides` replace single fields of it.

    Attributes:
        run: the newest run, None before the first.
        past_runs: how the runs that have ended did.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, config: DistributedConfig | None = None, **overrides: Any) -> None:
        """Check the settings; nothing is started before `open`."""
        _check_place(overrides)
        super().__init__(config, **overrides)
        self._given, self._set_by_mode = self.config, set[str]()  # what a mode falls back to; what one set
        for sentence in _sentences_on(self.config):
            self._notices.add(sentence)
        self.run: Run | None = None
        self.past_runs = PastRuns(lambda: self.run_path)
        self._models, self._tensor_plan = ModelRegistry(self._notices.add), dict[str, str]()
        self._replica_sets = ReplicaSets(
            self._models, self._notices, self._open_cluster, lambda: self._patience_s, lambda: self.run_path, self.past_runs
        )  # fmt: skip
        self._advice = PipelineAdvice(self._replica_sets, self._notices, self._planned)
        self._job: TrainingJob | None = None

    def _new_cluster(self) -> Cluster:
        cluster = super()._new_cluster()
        cluster.on_idle_leave = _hands_over(weakref.ref(self), cluster)
        return cluster

    def close(self) -> None:
        """Stop the run, bring what only workers hold here, say goodbye to them all, free the port. Safe to call twice.

        An interrupt gives the state up that is waited for; what is lost so is told. Then it waits for the end of the rest.
        """
        is_idle, left = not self._is_copy and (self.run is None or self.run.done), self._replica_sets.left
        if self._cluster is not None and is_idle and (lost := left.bring_home(self._cluster, self._patience_s)):
            self._notices.add(lost)
            warnings.warn(lost, stacklevel=2)
        super().close()

    def _close(self) -> None:
        if self._job is not None and not self._job.run.done:
            self._job.interrupt()
            self._job.interrupt()
            if not self._job.is_current():
                self._job.run.wait(10.0)
        self._replica_sets.left.wait_no_more()
        super()._close()
        self._replica_sets.forget()

    # ------------------------------------------------------------------------------------------------- source and status

    def share(self, text: str, name: str | None = None) -> str:
        """Share source text with the workers: sent at the start of the next run; returns its name.

        A cell with the same name replaces the older one.

        Raises:
            SourceError: it is no Python that another machine can run.
        """
        return self._models.share(text, name)

    def unshare(self, name: str) -> None:
        """Share a cell no longer, from the next run on; unknown names are fine."""
        self._models.unshare(name)

    def status(self) -> Status:
        """Return a snapshot of the session for display."""
        cells = self._models.cell_names
        found = survey(self._cluster, self._where(), self.config, self.run, cells, self._notices.numbered(10))
        note = self._replica_sets.left.note(self._cluster) if self.run is not None and self.run.done else ""
        return dataclasses.replace(found, state_note=note, diary=str(self.diary.path or ""))

    # ---------------------------------------------------------------------------------------------------------- model

    def register_model(self, model: Reference | torch.nn.Module | None, args: Mapping[str, Any] | None = None) -> None:
        """Say what to train.

        Args:
            model: a class or function (shared, importable, or its name), called with `args` on every machine; or an
                instance, whose class must be shared or importable, and whose weights and requires_grad are where training
                starts, all else being as its class builds it; or "@model", the one that lives in the worker's own process
                (`GPUTrainer`) and starts from what it holds; or None, no model any more.
            args: plain data.

        Raises:
            SourceError: it exists only here.
            ConfigError: an argument cannot travel.
        """
        if isinstance(model, torch.nn.Module) and is_compiled(model):
            self._notices.add(
                f"workers build {type(unwrapped(model)).__name__} without torch.compile; to have it compiled there, register a "
                "shared function that returns torch.compile(...) of it"
            )
        if self._models.register(model, args):
            self._replica_sets.let_go()

    # ------------------------------------------------------------------------------------------------------- training

    @takes_options()
    def start_training(
        self,
        train_loader: Any,
        val_loader: Any = None,
        num_epochs: int | None = None,
        val_interval: int | None = None,
        detach: bool = False,
        **options: Any,
    ) -> Run:
        """Train the registered model; blocks until the end unless `detach`.

        A second call goes on from where the weights are as long as the model has the same parameters; with the same
        optimizer, from its state too. Else it is refused until a file has what was trained, or `fresh` gives that up.

        Args:
            train_loader: the user's DataLoader (its batch is the global batch), or an iterable of batches; or a `WorkerData`
                where every worker has the data: then only ids of samples travel.
            val_loader: for validation after each epoch, or every `val_interval` optimizer steps.
            {options}

        Raises:
            TypeError: there is no option of this name; the near one is named.
            GuavaError: something is wrong, found before any work starts; or the run failed.
        """
        given = {"num_epochs": num_epochs, "val_interval": val_interval, "detach": detach, **options}
        chosen = TrainingOptions.of("start_training", val_loader is not None, **given).settled(self.config)
        cluster, loaders = self._idle_cluster(), (train_loader, val_loader)
        model = self._models.needed(self._replica_sets.loaded)
        chosen, choice = self._advice.resolve(chosen, model, loaders, cluster, self.config)
        limit = chosen_limit(self.config, chosen.budget_bytes, chosen.save_path, chosen.checkpoint_dir)
        with interrupts_remembered() as interrupts:
            seats = cluster.roster.ready()
            composed = self._builder().compose(chosen, model, loaders, len(seats), cuda_reach(cluster))
            if composed.own:
                data = ask_data(cluster, self._models.cells, composed.own, interrupts.check)
                composed.spec = replace(composed.spec, data=data)
            plan = TrainingPlan.of(
                chosen, self.config, feeds(loaders, composed.spec.data, chosen.batch), *composed.validating
            )
            plan.seats = seats if chosen.shares is not None else ()
            replica_set = self._replica_sets.begin(composed, plan, chosen)
            if limit is not None:
                plan.budget = budget_for(limit, cluster, replica_set, plan, composed)
            self._advice.tell(choice, replica_set, plan, composed, cluster)
            interrupts.check()
            job = job_for(cluster, replica_set, plan, self._replica_sets, lambda: self._job)
            record(job, self.diary, cluster, self._replica_sets.left, self.past_runs)
            self.run, self._job = job.run, job
            self._replica_sets.launched(replica_set)
            if chosen.detach:
                job.start()
                return job.run
            watch(job.run, job.start, chosen.progress)
            return job.run.result()

    def _builder(self) -> RunBuilder:
        return RunBuilder(self.config, self._models, self._tensor_plan, self._cluster, self._advice.chosen)

    # ------------------------------------------------------------------------------------------------------- forecast

    @takes_options()
    def forecast(
        self,
        train_loader: Any,
        val_loader: Any = None,
        num_epochs: int | None = None,
        val_interval: int | None = None,
        *,
        model: Reference | None = None,
        model_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Forecast:
        """Compute what a run would send and receive, without starting it; nothing is changed, random state included.

        Some first batches are loaded to look at them; an iterator is left alone.

        Args:
            model, model_args: as for `register_model`; None takes the model that is registered.
            train_loader, val_loader: as for `start_training`.
            {options}

        Returns:
            Bytes per step, epoch and run, by kind and direction; with the time they take, and what would make them less. With
            the workers that are here, or `num_workers` of the configuration before any is. Lines over which nothing long went
            yet are measured first, which costs up to 2.7 MB and a few seconds each, all at once.

        Raises:
            TypeError: there is no option of this name; the near one is named.
            GuavaError: what `start_training` would refuse before any work starts.
        """
        if train_loader is None:
            raise ConfigError(
                "forecast() needs the loader of the training: without data there is nothing to compute it from"
            )
        given = {"num_epochs": num_epochs, "val_interval": val_interval, **options}
        chosen = TrainingOptions.of("forecast", val_loader is not None, **given).settled(self.config)
        with unchanged_randomness():
            if model is None:
                factory = self._models.needed(self._replica_sets.loaded)
            else:
                factory = self._models.factory_of(model, model_args)
            idle, loaders = self._cluster if self.run is None or self.run.done else None, (train_loader, val_loader)
            chosen, choice = self._advice.resolve(chosen, factory, loaders, idle, self.config)
            planned = self._planned(chosen, factory, loaders)
            choice = choice or self._advice.sync.known(planned, self._cluster)
            return self._advice.noted(forecast_on(self._cluster, planned, self.config, idle is not None, choice))

    def _planned(self, *args: Any, **words: Any) -> PlannedRun:
        """As for `planned_run`."""
        return planned_run(self._builder(), self._replica_sets, self._cluster, self.config, *args, **words)

    def _idle_cluster(self) -> Cluster:
        """The cluster, if a run can begin there."""
        cluster = self._open_cluster()
        self._check_idle()
        if not cluster.roster.ready():
            raise ClusterError(NO_WORKER)
        return cluster

    def _check_idle(self) -> None:
        if self._job is not None and not self._job.run.done and self._job.is_current():
            raise ClusterError(
                f"a callback of run {self._job.run.run_id} cannot validate, predict or train: give start_training a val_loader, "
                "metrics and val_interval, and look at the record in on_validation; run.model() is a copy to compute with here"
            )
        if self.run is not None and not self.run.done:
            raise ClusterError(
                f"run {self.run.run_id} is in progress: wait for it, or stop it with run.stop() or %guava_stop"
            )

    def set_mode(self, mode: str, *, tensor_plan: Mapping[str, str] | None = None, **settings: Any) -> None:
        """Choose how the next runs are spread over the workers.

        Args:
            mode: "data", "pipeline", "tensor", "zero" or "hybrid".
            tensor_plan: pattern of module names to "colwise", "rowwise", "vocab", "replicate" or "partial"; None finds one.
            settings: `dp`, `pp`, `tp`, `zero_stage` as in `guava_nb.config.mode_settings`, and fields of the configuration
                such as `micro_batches`, `pipeline_schedule`, `checkpoint_activations`, `sync_batchnorm`, `path`.

        Raises:
            ConfigError: something does not fit; nothing was changed.
        """
        check_plan(tensor_plan or {})
        # What an earlier choice set does not linger; what the configuration was made with does.
        given = {name: getattr(self._given, name) for name in (*MODE_DEFAULTS, *self._set_by_mode)}
        self.config = self.config.replace(**mode_settings(mode, **{**given, **settings}))
        self._set_by_mode |= settings.keys() - {"dp", "pp", "tp", "zero_stage"}
        self._tensor_plan = dict(tensor_plan or {})

    def stop(self) -> None:
        """Stop the run in progress after its current step; does nothing when there is none."""
        if self.run is not None and not self.run.done:
            self.run.stop()

    # ------------------------------------------------------------------------------------------------- state and score

    def validate(
        self,
        loader: Any,
        criterion: Reference | None = None,
        metrics: Metrics | None = None,
        preprocess: Reference | None = None,
        *,
        batch: str | None = None,
        progress: bool | Progress = True,
    ) -> dict[str, Any]:
        """Evaluate the current weights; returns loss, accuracy (None where it has no meaning), samples and the metrics.

        Each sample counts once, with any number of workers, also when some are lost meanwhile.

        Args:
            loader: a DataLoader, or an iterable of batches (inputs, targets).
            criterion, preprocess: None takes those of the last run, or CrossEntropyLoss and none.
            metrics: a mapping of names to metrics, or a list of them: shared functions `metric(outputs, targets)` that
                return the mean over the rows or (sum, count); torchmetrics metrics, or (class, {arguments}); or shared
                functions that make one.
            batch: how batches are read, as for `start_training`, in modes that share a batch out; None takes that of the last
                run, and its split_fn.
            progress: show a bar in a terminal; or a function of (samples done, samples in all or None).

        Raises:
            ClusterError: a run is in progress, or no worker is here.
            ConfigError: a metric cannot be made on the workers.
            RemoteError: the model, the loss or a metric raised on a worker.
        """
        plan = None if self._job is None else self._job.plan
        cluster, shared = self._open_cluster(), self._models.shared()
        feed = LoaderFeed(loader, batch=plan.batch if batch is None and plan is not None else batch)
        split_fn = None if batch or plan is None else plan.split_fn
        specs = metric_specs(metrics, shared)
        question = Validation(specs, merges_for(specs, shared))
        replica_set = self._for_question(criterion, preprocess)
        with reporting("validating", progress) as report:
            ask(
                cluster, replica_set, feed, question, grace_s=self.config.interrupt_grace_s, progress=report, split_fn=split_fn
            )  # fmt: skip
        return question.result().record()

    def predict(
        self,
        loader: Any,
        top_k: int = 1,
        confidence_threshold: float | None = None,
        return_full_probabilities: bool = False,
        raw: bool = False,
        path: str | Path | None = None,
        resume: bool = False,
        preprocess: Reference | None = None,
        *,
        predict_step: Reference | None = None,
        batch: str | None = None,
        progress: bool | Progress = True,
    ) -> Predictions:
        """Return what the current weights make of every sample, in the order of the data set.

        The model is called with the inputs: with the batch where it is a tensor, with its first part where it is
        (inputs, targets) or a list of one. Only what is asked for comes back over the wire.

        Args:
            loader: a DataLoader, or an iterable of batches. Shuffled or not, results stand in the order of the sample
                ids, see `guava_nb.evaluation.predictions`.
            top_k: the best classes of each sample.
            confidence_threshold: samples whose best class is less probable get class -1 and confidence NaN.
            return_full_probabilities: the probabilities of all classes too: the outputs where their rows sum to 1 or the
                loss is BCELoss, their sigmoid with BCEWithLogitsLoss or MultiLabelSoftMarginLoss, else their softmax.
            raw: the outputs as they are, for models that give no [rows, classes].
            path: a folder for memory maps, for results that are larger than memory; needs a loader without shuffling.
            resume: go on with what an interrupted call left in `path`, without predicting it again.
            preprocess: None takes that of the last run.
            predict_step: a shared function of (model, batch) that returns the outputs, for batches of other forms.
            batch: how batches are read, as for `start_training`, in modes that share a batch out.
            progress: as for `validate`.

        Raises:
            ClusterError: a run is in progress, or no worker is here.
            ConfigError: an option does not fit the outputs, the results cannot fit, or `path` holds something else.
            RemoteError: the model raised on a worker; with the worker's name, the batch and its sample ids.
        """
        cluster, wanted = self._open_cluster(), wanted_of(top_k, confidence_threshold, return_full_probabilities, raw)
        if predict_step is not None:
            step = named_function("predict_step", predict_step, self._models.shared())
            wanted = replace(wanted, step=step)
        replica_set = self._for_question(None, preprocess)
        with reporting("predicting", progress) as report:
            return predict(
                cluster, replica_set, LoaderFeed(loader, batch=batch), wanted,
                path=None if path is None else Path(path), resume=resume,
                deadlines=Deadlines(self._patience_s, self.config.interrupt_grace_s), progress=report,
            )  # fmt: skip

    def _for_question(self, criterion: Reference | None, preprocess: Reference | None) -> ReplicaSet:
        self._check_idle()
        return self._replica_sets.for_question(self._builder(), criterion, preprocess)

    @property
    def _patience_s(self) -> float:
        return self.config.grace_s + self.config.silence_s

    def save_checkpoint(self, path: str | Path) -> Path:
        """Save the state of the last committed step; plain PyTorch reads it with `weights_only=True`.

        During a run it is saved at the next boundary between steps; in a callback at once, with the state of the step, or the
        validation, that the callback was called for.

        Raises:
            CheckpointError: nothing was trained yet, or the file cannot be written.
            WorkerLost: the workers that hold the state are gone.
        """
        target = Path(path)
        self._replica_sets.save(target, self._job)
        return target

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint and go on from it at the next start_training; returns step and epoch.

        Whether it fits is seen there. Where no model was registered, the one that the checkpoint names is taken, if a shared
        cell defines it.

        Raises:
            CheckpointError: it cannot be read.
        """
        content = self._replica_sets.load(Path(path))
        return {"step": int(content["step"]) + 1, "epoch": content["position"]["epoch"]}


def _hands_over(session: weakref.ref[Orchestrator], cluster: Cluster) -> Callable[[int], None]:
    """What a member does that leaves between two runs; the cluster's thread, which keeps this, shall not keep the session."""

    def on_idle_leave(rank: int) -> None:
        here = session()
        take_over(None if here is None else here._replica_sets.held_by_workers, cluster, rank)

    return on_idle_leave
