"""From the registered model, the shared cells and the options to the record of a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from guava_nb.cluster.cluster import Cluster
from guava_nb.config import DistributedConfig
from guava_nb.data.worker_data import WorkerData
from guava_nb.errors import ClusterError, ConfigError
from guava_nb.evaluation.metric_specs import merges_for, metric_specs
from guava_nb.evaluation.validation import Validation
from guava_nb.forecast.pipeline_choice import PipelineChoice
from guava_nb.forecast.planned_run import Composed
from guava_nb.orchestrator.model_registry import ModelRegistry
from guava_nb.protocol.messages import Factory, ParallelSpec, RunSpec
from guava_nb.replica.names import check_names
from guava_nb.spec.cells import resolve
from guava_nb.spec.changed_code import CodeHere
from guava_nb.spec.own_facts import ROLES, is_same_code, roots_of
from guava_nb.spec.run_spec import build_spec, parallel_spec, precision_for, uses_gather
from guava_nb.spec.training_options import MEASURED, Reference, TrainingOptions
from guava_nb.training.worker_data_facts import data_spec, refuse_group, refuse_place, refuse_static

__all__ = ["NO_WORKER", "RunBuilder"]

NO_WORKER = (
    "no worker is here: run %guava_worker with the join code elsewhere, or start some here with %guava_up --local 2 (in a "
    "script: launch_workers(2))"
)


class RunBuilder:
    """Makes the records of runs under one choice of settings.

    Args:
        config: that holds now.
        registry: knows the shared cells.
        tensor_plan: of the mode that was chosen.
        cluster: the workers that are here.
        chosen: schedule of pipelines and their micro-batches where the settings leave them to be chosen.
    """

    def __init__(
        self,
        config: DistributedConfig,
        registry: ModelRegistry,
        tensor_plan: Mapping[str, str],
        cluster: Cluster | None = None,
        chosen: PipelineChoice | None = None,
    ) -> None:
        """Nothing is built before it is asked for."""
        self._chosen = chosen
        self._config, self._registry, self._tensor_plan = config, registry, tensor_plan
        self._cluster = cluster

    def compose(
        self,
        options: TrainingOptions,
        model: Factory,
        loaders: tuple[Any, Any],
        workers: int | None,
        reach: Callable[[], bool] = lambda: False,
    ) -> Composed:
        """Return the record of a run, and what it was made of.

        Args:
            options: settled.
            model: its factory.
            loaders: to train and to validate with.
            workers: how many take part; None: that is not known yet, and the record is one of whole replicas.
            reach: as for `parallel_spec`.

        Raises:
            ConfigError, SourceError: something is wrong or exists only here.
        """
        shared = self._registry.shared()
        if workers is not None:
            _check_shares(options.shares, workers)
        refuse_place(options.data, loaders[0])
        metrics = metric_specs(options.metrics, shared)
        own = [data_spec(loader, shared) for loader in loaders if isinstance(loader, WorkerData)]
        gather = uses_gather(self._registry.cells, (model.name, options.criterion, options.step))
        at_hub = own or options.sync == "local" or options.wire != "fp32"  # rounds meet at the hub, and only it encodes
        reach = (lambda: False) if at_hub else reach
        parallel = None if workers is None else self._parallel(workers, reach, gather)
        spec = self._with_frozen(build_spec(self._config, shared, model, self._concrete(options), parallel, metrics))
        if options.cache_static:
            refuse_static(spec)
        if own:
            refuse_group(spec)
        return Composed(
            spec,
            shared,
            own,
            lambda: Validation(metrics, merges_for(metrics, shared)),
            self._code(spec, shared, options),
        )

    def _code(self, spec: RunSpec, shared: ModuleType | None, options: TrainingOptions) -> CodeHere:
        """The user's code as it is here: what was given, or what this notebook has under the names that were."""
        given = {role: getattr(options, role, None) for role in ROLES} | {
            "model": self._registry.reference_of(spec.model)
        }
        given = {role: one for role, one in given.items() if one is not None}
        roots = roots_of(spec, lambda name: resolve(name, shared))
        own = vars(sys.modules["__main__"])
        for role, found in roots.items():
            name = getattr(spec, role).name
            if shared is not None and isinstance(given.get(role, ""), str) and is_same_code(own.get(name), found):
                given[role] = own[name]
        found = roots_of(spec, lambda name: resolve(name, shared), given)
        return CodeHere(found, {role: getattr(spec, role).name for role in roots}, self._registry.cells)

    def question(
        self, model: Factory, workers: int, criterion: Reference | None, preprocess: Reference | None
    ) -> RunSpec:
        """Return the record of replicas that are asked and not trained; errors as for `compose`."""
        options = TrainingOptions(
            criterion=criterion or "CrossEntropyLoss",
            preprocess=preprocess,
            optimizer="SGD",
            optimizer_args={"lr": 0.0},
        )
        shared = self._registry.shared()
        options = self._concrete(options.settled(self._config))
        if not workers:  # a slip is told before that
            check_names(build_spec(self._config, shared, model, options), lambda name: resolve(name, shared))
            raise ClusterError(NO_WORKER)
        parallel = self._parallel(workers)
        return self._with_frozen(build_spec(self._config, shared, model, options, parallel))

    def _parallel(
        self, workers: int, reach: Callable[[], bool] = lambda: False, gather: bool = False
    ) -> ParallelSpec | None:
        made = parallel_spec(self._config, workers, self._tensor_plan, reach, gather)
        if made is None or self._chosen is None:
            return made
        return replace(made, schedule=self._chosen.schedule, micro_batches=self._chosen.micro_batches)

    def _concrete(self, options: TrainingOptions) -> TrainingOptions:
        """Choose the precision where the workers' cards shall decide."""
        assert options.precision is not None
        roster = None if self._cluster is None else self._cluster.roster
        members = () if roster is None else [roster.members[rank].hello for rank in roster.ready()]
        return dataclasses.replace(options, precision=precision_for(options.precision, members))

    def _with_frozen(self, spec: RunSpec) -> RunSpec:
        assert spec.model is not None
        return replace(spec, frozen=self._registry.frozen_in(spec.model))


def _check_shares(shares: Sequence[float] | str | None, workers: int) -> None:
    if shares is not None and shares != MEASURED and len(shares) != workers:
        raise ConfigError(
            f"shares (--shares) has {len(shares)} numbers for {workers} workers: give one number for each worker, in the order "
            "they joined (0 for one that gets no samples), or wait until all workers are here"
        )
