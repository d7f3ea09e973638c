"""The orchestrator as its user holds it: opens the session, shares source, trains, validates, saves.

Thin: the work is done by `guava_nb`. No display code except one tqdm bar for scripts.
"""

# over budget: start_training names every argument and says what it does, in one place.

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.host import SessionHost
from guava_nb.cluster.line_rate import measure_lines
from guava_nb.cluster.path_probe import cuda_reach
from guava_nb.config import MODE_DEFAULTS, DistributedConfig, check_plan, mode_settings
from guava_nb.data.loader_feed import Feed
from guava_nb.data.worker_data import WorkerData
from guava_nb.errors import CheckpointError, ClusterError, ConfigError, SourceError
from guava_nb.evaluation.between_runs import ask
from guava_nb.evaluation.metric_specs import Metrics, merges_for, metric_specs
from guava_nb.evaluation.passes import Progress
from guava_nb.evaluation.predict import predict
from guava_nb.evaluation.predictions import Predictions, wanted_of
from guava_nb.evaluation.validation import Validation
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
from guava_nb.processes.interrupts import interrupts_remembered
from guava_nb.protocol.messages import Cell, DataSpec, Factory, RunSpec
from guava_nb.row_cache.policy import WorkerCaches
from guava_nb.spec import cells as source
from guava_nb.spec.run_spec import (
    Reference,
    build_spec,
    cache_spec,
    factory_name,
    parallel_spec,
    plain_arguments,
)
from guava_nb.status import Status
from guava_nb.sync.handover import take_over
from guava_nb.sync.replica_set import ReplicaSet, fetch_between_runs
from guava_nb.sync.resident_replica_set import ResidentReplicaSet, adopt, is_own
from guava_nb.training import checkpoint
from guava_nb.training.byte_budget import Budget, Limit, chosen_limit
from guava_nb.training.initial_state import build_ensemble, from_checkpoint, from_last_run, goes_on
from guava_nb.training.job import TrainingJob
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.progress_bar import reporting, watch
from guava_nb.training.run import Run
from guava_nb.training.status_survey import survey
from guava_nb.training.worker_data_facts import ask_data, data_spec, feeds, refuse_group, refuse_place, refuse_static

__all__ = ["Orchestrator"]


class Orchestrator(SessionHost):
    """One training session on the side that has the data. A context manager.

    Args:
        config: settings; `overrides` replace single fields of it.

    Attributes:
        run: the newest run, None before the first.

    Raises:
        ConfigError: a setting is wrong.
    """

    def __init__(self, config: DistributedConfig | None = None, **overrides: Any) -> None:
        """Check the settings; nothing is started before `open`."""
        super().__init__(config, **overrides)
        self._given = self.config  # what a mode falls back to
        self.run: Run | None = None
        self._ledger = source.SourceLedger()
        self._module: tuple[str, ModuleType] | None = None
        self._factory: Factory | None = None
        self._instance: torch.nn.Module | None = None
        self._replica_set: ReplicaSet | None = None
        # Replicas that are asked and not trained, and what they were made of.
        self._asked: tuple[ReplicaSet, object] | None = None
        self._asked_numbers = itertools.count(1)
        self._job: TrainingJob | None = None
        self._resume: tuple[Path, dict[str, Any]] | None = None
        self._runs = 0
        self._tensor_plan: dict[str, str] = {}

    def _new_cluster(self) -> Cluster:
        cluster = super()._new_cluster()
        cluster.on_idle_leave = lambda rank: take_over(self._replica_set, cluster, rank)
        return cluster

    def _close(self) -> None:
        if self._job is not None and not self._job.run.done:
            self._job.interrupt()
            self._job.interrupt()
            if not self._job.is_current():
                self._job.run.wait(10.0)
        super()._close()
        self._replica_set = self._asked = None

    # ------------------------------------------------------------------------------------------------- source and status

    def share(self, text: str, name: str | None = None) -> str:
        """Share source text with the workers: sent at the start of the next run; returns its name.

        A cell with the same name replaces the older one.

        Raises:
            SourceError: it is no Python that another machine can run.
        """
        chosen = name or f"cell-{len(self._ledger.cells()) + 1}"
        self._ledger.add(chosen, text)
        return chosen

    def unshare(self, name: str) -> None:
        """Share a cell no longer, from the next run on; unknown names are fine."""
        self._ledger.remove(name)

    def status(self) -> Status:
        """Return a snapshot of the session for display."""
        cells = tuple(cell.name for cell in self._ledger.cells())
        return survey(self._cluster, self._where(), self.config, self.run, cells, self._notices.numbered(10))

    # ---------------------------------------------------------------------------------------------------------- model

    def register_model(self, model: Reference | torch.nn.Module, args: Mapping[str, Any] | None = None) -> None:
        """Say what to train.

        Args:
            model: a class or function (shared, importable, or its name), called with `args` on every machine; or an
                instance, whose class must be shared or importable and whose weights are where training starts; or
                "@model", the one that lives in the worker's own process (`GPUTrainer`) and starts from what it holds.
            args: plain data.

        Raises:
            SourceError: it exists only here.
            ConfigError: an argument cannot travel.
        """
        instance = model if isinstance(model, torch.nn.Module) else None
        factory = self._named_factory(type(model) if isinstance(model, torch.nn.Module) else model, args)
        if instance is not None or factory != self._factory:
            self._factory, self._instance = factory, instance
            self._replica_set = None if instance is not None else self._replica_set

    def _named_factory(self, model: Reference, args: Mapping[str, Any] | None) -> Factory:
        return Factory(factory_name("model", model, self._shared()), plain_arguments("model", args))

    def _shared(self) -> ModuleType | None:
        """The module of the shared cells, built anew only when a cell changed: cells may take long or print."""
        cells = self._ledger.cells()
        if not cells:
            return None
        if self._module is None or self._module[0] != self._ledger.digest():
            self._ledger.check()
            self._module = (self._ledger.digest(), source.build_module(cells))
        return self._module[1]

    # ------------------------------------------------------------------------------------------------------- training

    def start_training(
        self,
        train_loader: Any,
        val_loader: Any = None,
        num_epochs: int = 1,
        val_interval: int | None = None,
        detach: bool = False,
        *,
        criterion: Reference | None = "CrossEntropyLoss",
        criterion_args: Mapping[str, Any] | None = None,
        step: Reference | None = None,
        optimizer: Reference = "AdamW",
        optimizer_args: Mapping[str, Any] | None = None,
        scheduler: Reference | None = None,
        scheduler_args: Mapping[str, Any] | None = None,
        scheduler_interval: str | None = None,
        max_grad_norm: float | None = None,
        accumulation_steps: int | None = None,
        precision: str | None = None,
        seed: int | None = None,
        shares: Sequence[float] | None = None,
        optimizer_site: str | None = None,
        callbacks: Sequence[Any] = (),
        split_fn: Callable[..., Any] | None = None,
        preprocess: Reference | None = None,
        augment: Reference | None = None,
        resume: str | Path | None = None,
        fresh: bool = False,
        threads: int | None = None,
        progress: bool = True,
        metrics: Metrics | None = None,
        cache: str | None = None,
        cache_static: bool = False,
        data: str = "orchestrator",
        count_flops: bool | None = None,
        budget_bytes: int | None = None,
        save_path: str | Path | None = None,
        tokens: Reference | None = None,
    ) -> Run:
        """Train the registered model; blocks until the end unless `detach`.

        A second call with the same model and the same shared cells goes on from where the weights are; with the same
        optimizer, from its state too. `fresh` starts anew.

        Args:
            train_loader: the user's DataLoader (its batch is the global batch), or an iterable of batches; or a `WorkerData`
                where every worker has the data: then only ids of samples travel.
            val_loader: for validation after each epoch, or every `val_interval` optimizer steps.
            num_epochs: passes over the data; with `resume`, counted from the very beginning.
            criterion: loss(outputs, targets) for batches (inputs, targets); a torch criterion's name or a shared function.
            step: step(model, batch), instead of a criterion, for batches of any form.
            optimizer: a torch.optim class, or a shared function of the named parameters.
            optimizer_args: for the optimizer; None takes learning rate and weight decay of the configuration.
            scheduler: a torch.optim.lr_scheduler class or a shared function of the optimizer.
            scheduler_interval: "step", "epoch" or "validation".
            max_grad_norm: clip to this global L2 norm.
            accumulation_steps: loader batches per optimizer step.
            precision: "fp32", "bf16", "fp16" or "fp64".
            shares: relative share of each worker, in the order they joined.
            optimizer_site: "workers", or "orchestrator" for an authoritative master copy here.
            callbacks: objects with any of on_step, on_epoch, on_validation; see `guava_nb.training.plan.Callback`.
            split_fn: splits a batch into row ranges where the usual rule does not fit; see `guava_nb.data.split`.
            preprocess: shared or importable function of a batch; runs on the worker's device for every batch of training and
                validation, so that data travels in the dtype it has (uint8 images, say) and becomes floats there.
            augment: likewise, in training only and before `preprocess`; what it draws depends on seed, step and share alone.
            resume: a checkpoint to go on from.
            threads: torch's threads in each worker; None leaves them.
            progress: show a bar while blocking.
            cache: "memory" or "disk": workers keep the samples they got, within `worker_cache_mb` of the configuration,
                and later epochs send only those that changed; "off"; None takes the configuration's `worker_cache`.
            cache_static: the samples of `train_loader` do not change between epochs: those that workers hold are not even
                loaded again. Without it every sample is loaded and compared, and sent where it changed.
            data: "worker" where `train_loader` is a `WorkerData`.
            metrics: of the validations, beside loss and accuracy; see `validate`.
            count_flops: count floating point operations, for the share of a device's peak in `run.energy_record()`; None takes
                the configuration's.
            budget_bytes: most bytes that the run may send and receive here, both together, before encryption: before it would
                pass them it stops between two steps and saves a checkpoint to go on from. None takes the configuration's,
                0 sets no limit. What workers exchange directly does not count.
            save_path: where that checkpoint goes; None makes a name in `checkpoint_dir` of the configuration.
            tokens: shared or importable function of a batch that returns its number of tokens, for joules per token in
                `run.energy_record()`. Called on the workers with each batch of training as the model gets it.

        Raises:
            GuavaError: something is wrong, found before any work starts; or the run failed.
        """
        cluster = self._idle_cluster()
        limit = chosen_limit(self.config, budget_bytes, save_path)
        with interrupts_remembered() as interrupts:
            composed = self._compose(
                (train_loader, val_loader), len(cluster.roster.ready()), cuda_reach(cluster), data, metrics=metrics, cache=cache,
                model=self._needed_factory(), criterion=None if step is not None else criterion,
                criterion_args=criterion_args, step=step, optimizer=optimizer, optimizer_args=optimizer_args,
                scheduler=scheduler, scheduler_args=scheduler_args, threads=threads, scheduler_interval=scheduler_interval,
                max_grad_norm=max_grad_norm, precision=precision, seed=seed, optimizer_site=optimizer_site,
                preprocess=preprocess, augment=augment, count_flops=count_flops, tokens=tokens,
            )  # fmt: skip
            composed.spec = self._with_data(composed.spec, composed.own, cache_static, interrupts.check)
            plan = self._plan(
                composed, feeds((train_loader, val_loader), composed.spec.data), num_epochs=num_epochs,
                val_interval=val_interval, accumulation_steps=accumulation_steps, shares=shares, callbacks=callbacks,
                split_fn=split_fn, cache_static=cache_static,
            )  # fmt: skip
            replica_set = self._place_start(composed.spec, composed.shared, plan, resume, fresh)
            if limit is not None:
                plan.budget = self._budget(limit, replica_set, plan, composed)
            interrupts.check()
            return self._launch(replica_set, plan, detach, progress)

    def _compose(
        self, loaders: tuple[Any, Any], workers: int, reach: Callable[[], bool], data: str, *, metrics: Metrics | None,
        cache: str | None, **options: Any,
    ) -> Composed:  # fmt: skip
        """The record of a run, and what it was made of."""
        shared = self._shared()
        refuse_place(data, loaders[0])
        specs = metric_specs(metrics, shared)
        own = [data_spec(loader, shared) for loader in loaders if isinstance(loader, WorkerData)]
        parallel = parallel_spec(self.config, workers, self._tensor_plan, (lambda: False) if own else reach)
        spec = build_spec(
            self.config, shared, metrics=specs, parallel=parallel, cache=cache_spec(self.config, cache), **options
        )
        return Composed(spec, shared, own, lambda: Validation(specs, merges_for(specs, shared)))

    def _plan(
        self, composed: Composed, loaded: tuple[Feed, Feed | None], accumulation_steps: int | None, **options: Any
    ) -> TrainingPlan:
        return TrainingPlan(
            *loaded,
            accumulation_steps=self.config.accumulation_steps if accumulation_steps is None else accumulation_steps,
            prefetch_steps=self.config.prefetch_steps,
            prefetch_bytes=self.config.prefetch_bytes,
            interrupt_grace_s=self.config.interrupt_grace_s,
            rejoin_timeout_s=self.config.rejoin_timeout_s,
            snapshot_every_steps=self.config.snapshot_every_steps,
            save_every_steps=self.config.save_interval,
            save_folder=Path(self.config.checkpoint_dir),
            validation=composed.validation,
            **options,
        )

    def _budget(self, limit: Limit, replica_set: ReplicaSet, plan: TrainingPlan, composed: Composed) -> Budget:
        cluster = self._open_cluster()
        workers = len(replica_set.pick(set(cluster.roster.ready())))
        trained = replica_set.step >= 0 or bool(replica_set.master.optimizer.state)
        with unchanged_randomness():
            return budget_of(
                limit, PlannedRun(replica_set, plan, composed, workers, trained, limit.limit_bytes, cluster.caches)
            )

    # ------------------------------------------------------------------------------------------------------- forecast

    def forecast(
        self,
        train_loader: Any,
        val_loader: Any = None,
        num_epochs: int = 1,
        val_interval: int | None = None,
        *,
        model: Reference | None = None,
        model_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Forecast:
        """Reckon what a run would send and receive, without starting it; nothing is changed, random state included.

        Args:
            model, model_args: as for `register_model`; None takes the model that is registered.
            train_loader, val_loader, num_epochs, val_interval, options: as for `start_training`. Some first batches are
                loaded to look at them; an iterator is left alone.

        Returns:
            Bytes per step, epoch and run, by kind and direction; with the time they take, and what would make them less. With
            the workers that are here, or `num_workers` of the configuration before any is. Lines over which nothing long went
            yet are measured first, which costs up to 2.7 MB and a few seconds each, all at once.

        Raises:
            GuavaError: what `start_training` would refuse before any work starts.
        """
        if train_loader is None:
            raise ConfigError(
                "forecast() needs the loader of the training: there is nothing to reckon with without data"
            )
        bound = inspect.signature(self.start_training).bind(
            train_loader, val_loader, num_epochs, val_interval, **options
        )
        bound.apply_defaults()
        with unchanged_randomness():
            factory = self._needed_factory() if model is None else self._named_factory(model, model_args)
            planned = self._planned(factory, bound.arguments)
            sessions = [] if self._cluster is None else self._cluster.all_sessions()
            down = planned.composed.spec.optimizer_site == "orchestrator"
            on_lines = self._measure_lines()
            return forecast_of(planned, self.config, self._rates(), squeezed_so_far(sessions, down), on_lines)

    def _planned(self, factory: Factory, given: dict[str, Any]) -> PlannedRun:
        """What a run of these arguments would be; built here only, and thrown away."""
        loaders = (given["train_loader"], given["val_loader"])
        ready = 0 if self._cluster is None else len(self._cluster.roster.ready())
        workers = ready or self.config.num_workers
        names = ("metrics", "cache", "criterion_args", "step", "optimizer", "optimizer_args", "scheduler", "scheduler_args",
                 "threads", "scheduler_interval", "max_grad_norm", "precision", "seed", "optimizer_site", "preprocess",
                 "augment", "tokens")  # fmt: skip
        composed = self._compose(
            loaders, workers, lambda: False, given["data"], model=factory,
            criterion=None if given["step"] is not None else given["criterion"], **{name: given[name] for name in names},
        )  # fmt: skip
        if given["cache_static"]:
            refuse_static(composed.spec)
        if composed.own:
            refuse_group(composed.spec)
        planned = (
            "num_epochs",
            "val_interval",
            "accumulation_steps",
            "shares",
            "callbacks",
            "split_fn",
            "cache_static",
        )
        plan = self._plan(composed, guessed_feeds(loaders), **{name: given[name] for name in planned})
        limit = chosen_limit(self.config, given["budget_bytes"], given["save_path"])
        replica_set, trained = self._guessed_start(composed, plan, given["resume"], given["fresh"])
        return PlannedRun(
            replica_set, plan, composed, workers, trained, 0 if limit is None else limit.limit_bytes,
            WorkerCaches() if self._cluster is None else self._cluster.caches,
        )  # fmt: skip

    def _guessed_start(
        self, composed: Composed, plan: TrainingPlan, resume: str | Path | None, fresh: bool
    ) -> tuple[ReplicaSet, bool]:
        """The ensemble as it would begin, as to sizes; and whether there would be an optimizer's state."""
        spec, cells = composed.spec, self._ledger.cells()
        start = None if fresh else self._resume
        if resume is not None:
            start = (Path(resume), checkpoint.read(Path(resume)))
        if is_own(spec):
            raise ConfigError(
                "a model that lives in the worker's own process is not known here before a run asks for it, so there is no "
                "forecast; a budget holds all the same"
            )
        weights = self._instance if spec.model == self._factory else None
        replica_set = build_ensemble(f"run-{self._runs + 1}", spec, cells, composed.shared, weights)
        if start is not None:
            from_checkpoint(replica_set, plan, *start, rewind=False)
            return replica_set, True
        last = None if fresh else self._replica_set
        return replica_set, last is not None and goes_on(replica_set, last)

    def _rates(self) -> tuple[float | None, float | None]:
        """Bytes a second out and in, of all lines together, as far as they were measured."""
        cluster = self._cluster
        measured = [] if cluster is None else [cluster.rates(rank) for rank in cluster.roster.alive()]
        known = [[rate for rate in way if rate is not None] for way in zip(*measured, strict=True)] or [[], []]
        return (sum(known[0]) or None, sum(known[1]) or None)

    def _measure_lines(self) -> list[str]:
        """Measure the lines that are not known, unless they are busy; returns what is to be said of that."""
        if self._cluster is None or (self.run is not None and not self.run.done):
            return []
        try:
            return measure_lines(self._cluster)
        except ClusterError:  # another thread's work began meanwhile: the line is busy
            return []

    def _idle_cluster(self) -> Cluster:
        """The cluster, if a run can begin there."""
        cluster = self._open_cluster()
        self._check_idle()
        if not cluster.roster.ready():
            raise ClusterError(
                "no worker is here: run %guava_worker with the join code elsewhere, or start some here with %guava_up --local 2 "
                "(in a script: launch_workers(2))"
            )
        return cluster

    def _check_idle(self) -> None:
        if self.run is not None and not self.run.done:
            raise ClusterError(
                f"run {self.run.run_id} is in progress: wait for it, or stop it with run.stop() or %guava_stop"
            )

    def _with_data(
        self, spec: RunSpec, own: Sequence[DataSpec], static: bool, check_interrupt: Callable[[], None]
    ) -> RunSpec:
        """The record of a run with what the workers say of the data sets that lie there."""
        if static:
            refuse_static(spec)
        if not own:
            return spec
        refuse_group(spec)
        return replace(spec, data=ask_data(self._open_cluster(), self._ledger.cells(), own, check_interrupt))

    def _place_start(
        self, spec: RunSpec, shared: ModuleType | None, plan: TrainingPlan, resume: str | Path | None, fresh: bool
    ) -> ReplicaSet:
        """Build the master and bring it to where this run begins: a checkpoint, the last run, or the very start."""
        start = None if fresh else self._resume
        if resume is not None:
            start = (Path(resume), checkpoint.read(Path(resume)))
        self._notices.forget("run")  # what an earlier run had to say
        replica_set = self._new_ensemble(spec, shared, fresh or start is not None)
        if start is not None:
            for note in from_checkpoint(replica_set, plan, *start):
                self._notices.add(note, "run")
        self._factory = self._factory or spec.model
        self._resume = None  # not before: after a refusal load_checkpoint still holds
        replica_set.look_at(plan.feed)
        return replica_set

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
        given = {name: getattr(self._given, name) for name in MODE_DEFAULTS}
        self.config = self.config.replace(**mode_settings(mode, **{**given, **settings}))
        self._tensor_plan = dict(tensor_plan or {})

    def _needed_factory(self) -> Factory:
        if (factory := self._factory or self._saved_factory()) is None:
            made = "" if self._resume is None else checkpoint.model_text(self._resume[1])
            told = f" ({self._resume[0]} was made with {made})" if self._resume is not None and made else ""
            raise ConfigError(
                f"no model is named yet{told}: name one of a shared cell on this line, --model Net (in a script: "
                "register_model(Net))"
            )
        return factory

    def _saved_factory(self) -> Factory | None:
        """The model that the loaded checkpoint names, if a shared cell defines it: a file must not choose what else is called."""
        made, shared = None if self._resume is None else checkpoint.made_with(self._resume[1]), self._shared()
        if made is None or shared is None or ":" in made.name:
            return None
        try:
            found = source.resolve(made.name, shared)
        except SourceError:
            return None
        return made if getattr(found, "__module__", "") == shared.__name__ else None

    def _new_ensemble(self, spec: RunSpec, shared: ModuleType | None, fresh: bool) -> ReplicaSet:
        run_id, last = f"run-{self._runs + 1}", self._replica_set  # counted when it is launched: a refused one is none
        if is_own(spec):  # the worker's model is where it is: it goes on from itself, whatever was last
            own = adopt(run_id, spec, self._ledger.cells(), shared, self._open_cluster())
            fetch_between_runs(own, self._open_cluster(), self._patience_s)
            return own
        replica_set = build_ensemble(run_id, spec, self._ledger.cells(), shared, self._instance)
        if not fresh and last is not None:
            self._notices.add(from_last_run(replica_set, last, self._open_cluster(), self._patience_s), "run")
        return replica_set

    @property
    def _patience_s(self) -> float:
        return self.config.grace_s + self.config.silence_s

    def _launch(self, replica_set: ReplicaSet, plan: TrainingPlan, detach: bool, progress: bool) -> Run:
        cluster = self._open_cluster()
        plan.save_path = Path(self.config.checkpoint_dir) / f"{replica_set.run_id}.pt"
        job = TrainingJob(replica_set, plan, cluster, lambda: self._model_of(replica_set))
        self.run, self._job, self._replica_set, self._asked = job.run, job, replica_set, None
        self._runs += 1
        if detach:
            job.start()
            return job.run
        watch(job.run, job.start, progress)
        return job.run.result()

    def stop(self) -> None:
        """Stop the run in progress after its current step; does nothing when there is none."""
        if self.run is not None and not self.run.done:
            self.run.stop()

    # ------------------------------------------------------------------------------------------------- state and score

    def _model_of(self, replica_set: ReplicaSet) -> torch.nn.Module:
        if replica_set.master_step != replica_set.step:  # else it is here, and also after the session was closed
            fetch_between_runs(replica_set, self._open_cluster(), self._patience_s)
        return replica_set.master.model

    def validate(
        self,
        loader: Any,
        criterion: Reference | None = None,
        metrics: Metrics | None = None,
        preprocess: Reference | None = None,
        *,
        progress: bool | Progress = True,
    ) -> dict[str, Any]:
        """Evaluate the current weights; returns loss, accuracy (None where it has no meaning), samples and the metrics.

        Each sample counts once, whatever the number of workers and whoever is lost meanwhile.

        Args:
            loader: a DataLoader, or an iterable of batches (inputs, targets).
            criterion, preprocess: None takes those of the last run, or CrossEntropyLoss and none.
            metrics: a mapping of names to metrics, or a list of them: shared functions `metric(outputs, targets)` that
                return the mean over the rows or (sum, count); torchmetrics metrics, or (class, {arguments}); or shared
                functions that make one.
            progress: show a bar in a terminal; or a function of (samples done, samples in all or None).

        Raises:
            ClusterError: a run is in progress, or no worker is here.
            ConfigError: a metric cannot be made on the workers.
            RemoteError: the model, the loss or a metric raised on a worker.
        """
        feed, cluster, shared = Feed(loader), self._open_cluster(), self._shared()
        specs = metric_specs(metrics, shared)
        question = Validation(specs, merges_for(specs, shared))
        replica_set = self._ensemble_for(criterion, preprocess)
        with reporting("validating", progress) as report:
            ask(cluster, replica_set, feed, question, grace_s=self.config.interrupt_grace_s, progress=report)
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
            return_full_probabilities: the probabilities of all classes too (softmax in float32, in float64 of float64 outputs).
            raw: the outputs as they are, for models that give no [rows, classes].
            path: a folder for memory maps, for results that are larger than memory; needs a loader without shuffling.
            resume: go on with what an interrupted call left in `path`, without predicting it again.
            preprocess: None takes that of the last run.
            predict_step: a shared function of (model, batch) that returns the outputs, for batches of other forms.
            progress: as for `validate`.

        Raises:
            ClusterError: a run is in progress, or no worker is here.
            ConfigError: an option does not fit the outputs, the results cannot fit, or `path` holds something else.
            RemoteError: the model raised on a worker; with the worker's name, the batch and its sample ids.
        """
        cluster, wanted = self._open_cluster(), wanted_of(top_k, confidence_threshold, return_full_probabilities, raw)
        if predict_step is not None:
            step = Factory(factory_name("predict_step", predict_step, self._shared()))
            wanted = msgspec.structs.replace(wanted, step=step)
        replica_set = self._ensemble_for(None, preprocess)
        with reporting("predicting", progress) as report:
            return predict(
                cluster, replica_set, loader, wanted, path=None if path is None else Path(path), resume=resume,
                patience_s=self._patience_s, grace_s=self.config.interrupt_grace_s, progress=report,
            )  # fmt: skip

    def _ensemble_for(self, criterion: Reference | None, preprocess: Reference | None) -> ReplicaSet:
        """What is asked: the last run's replicas, or others of the same weights where cells, loss or preprocessing differ.

        A model that was not trained here, or a checkpoint that was loaded and not trained on, has replicas of its own.
        """
        self._check_idle()
        trained = self._known_ensemble()
        if isinstance(trained, ResidentReplicaSet):
            return trained
        fresh, cells = self._question_spec(criterion or "CrossEntropyLoss", preprocess), self._ledger.cells()
        if is_own(fresh):
            run_id = f"asked-{next(self._asked_numbers)}"
            self._replica_set = adopt(run_id, fresh, cells, self._shared(), self._open_cluster())
            return self._replica_set
        if trained is None or trained.spec.model != fresh.model or self._resume is not None:
            return self._standing(fresh, cells, None)
        spec = trained.spec
        if criterion is not None:
            spec = replace(spec, criterion=fresh.criterion, step=None)
        if preprocess is not None:
            spec = replace(spec, preprocess=fresh.preprocess)
        same = spec == trained.spec and cells == trained.cells
        return self._hold(trained) if same else self._standing(spec, cells, trained)

    def _question_spec(self, criterion: Reference, preprocess: Reference | None) -> RunSpec:
        return build_spec(
            self.config, self._shared(), model=self._needed_factory(), criterion=criterion, criterion_args=None, step=None,
            preprocess=preprocess,
            optimizer="SGD", optimizer_args={"lr": 0.0}, scheduler=None, scheduler_args=None, threads=None,
            parallel=parallel_spec(self.config, len(self._open_cluster().roster.ready()), self._tensor_plan),
            cache=cache_spec(self.config),
        )  # fmt: skip

    def _standing(self, spec: RunSpec, cells: Sequence[Cell], trained: ReplicaSet | None) -> ReplicaSet:
        """Replicas that are only asked, with the weights of a run, of a checkpoint, or of the beginning."""
        weights = (self._instance, self._resume and self._resume[0]) if trained is None else (trained, trained.step)
        made_of = (spec, tuple(cells), weights)
        if self._asked is None or self._asked[1] != made_of:
            state = None if trained is None else fetch_between_runs(trained, self._open_cluster(), self._patience_s)
            start = self._instance if trained is None else None
            replica_set = build_ensemble(f"asked-{next(self._asked_numbers)}", spec, cells, self._shared(), start)
            if state is not None:
                replica_set.master.load_state({"model": state["model"]})
            elif self._resume is not None:
                path, content = self._resume
                checkpoint.check_model(path, content, replica_set.master.model.state_dict(), spec.model)
                replica_set.master.load_state({"model": content["model"]})
            self._asked = (replica_set, made_of)
        return self._hold(self._asked[0])

    def _hold(self, replica_set: ReplicaSet) -> ReplicaSet:
        """Workers hold one run at a time: what they hold of others is brought here, and they are known to forget it."""
        if self._replica_set is not None and self._replica_set is not replica_set and self._replica_set.at:
            fetch_between_runs(self._replica_set, self._open_cluster(), self._patience_s)
        for other in (self._replica_set, self._asked and self._asked[0]):
            if other is not None and other is not replica_set:
                for rank in list(other.at):
                    other.drop(rank)
        return replica_set

    def _known_ensemble(self) -> ReplicaSet | None:
        """The last run's replicas, unless they lived in workers' own processes that are gone: the next one has its own."""
        if isinstance(self._replica_set, ResidentReplicaSet) and self._replica_set.is_gone(self._open_cluster()):
            self._replica_set = None
        return self._replica_set

    def save_checkpoint(self, path: str | Path) -> Path:
        """Save the state of the last committed step; plain PyTorch reads it with `weights_only=True`.

        During a run it is saved at the next boundary between steps; a callback of the run returns before that.

        Raises:
            CheckpointError: nothing was trained yet, or the file cannot be written.
            WorkerLost: the workers that hold the state are gone.
        """
        target = Path(path)
        if self._replica_set is None or self._job is None:
            raise CheckpointError("there is nothing to save: no run was started in this session")
        if not self._job.run.done:
            saving = self._job.at_boundary(lambda: self._job_save(target))
            if self._job.is_current():
                saving.add_done_callback(lambda done: self._tell_failure(f"{target} was not saved", done.exception()))
            else:
                saving.result(timeout=self.config.rejoin_timeout_s)
            return target
        state = fetch_between_runs(self._replica_set, self._open_cluster(), self._patience_s)
        checkpoint.write(target, state, self._replica_set.step, self._job.where(), self._replica_set.spec)
        return target

    def _tell_failure(self, what: str, error: BaseException | None) -> None:
        if error is not None:
            self._notices.add(f"{what}: {error}")

    def _job_save(self, target: Path) -> None:
        assert self._replica_set is not None and self._job is not None
        self._job.budget_gate.refuse_save()
        self._replica_set.fetch(self._job)
        self._job.save(target)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint and go on from it at the next start_training; returns step and epoch.

        Whether it fits is seen there. Where no model was registered, the one that the checkpoint names is taken, if a shared
        cell defines it.

        Raises:
            CheckpointError: it cannot be read.
        """
        target = Path(path)
        content = checkpoint.read(target)
        self._resume = (target, content)
        return {"step": int(content["step"]) + 1, "epoch": content["position"]["epoch"]}
