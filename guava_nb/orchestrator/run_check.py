"""What can be said of a run before any worker is here: so that a slip is told at once, and not when the workers have come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from guava_nb.forecast.planned_run import guessed_feeds, unchanged_randomness
from guava_nb.replica.names import check_names
from guava_nb.spec.cells import resolve
from guava_nb.spec.factories import find
from guava_nb.spec.hub_name import is_on_hub
from guava_nb.spec.training_options import OF_SESSION, Reference, TrainingOptions
from guava_nb.training import checkpoint
from guava_nb.training.plan import TrainingPlan
from guava_nb.training.saving.weights_file import fitting_weights

if TYPE_CHECKING:
    from guava_nb.config import DistributedConfig
    from guava_nb.orchestrator.model_registry import ModelRegistry
    from guava_nb.orchestrator.run_builder import RunBuilder

__all__ = ["RunCheck"]


class RunCheck:
    """A part of `Orchestrator`."""

    config: DistributedConfig
    _models: ModelRegistry
    _builder: Callable[[], RunBuilder]

    def check_training(
        self,
        train_loader: Any,
        val_loader: Any = None,
        *,
        model: Reference,
        model_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Refuse what `start_training` would refuse of names, options and loaders; no worker need be here.

        Nothing is built, nothing is loaded, nothing is registered. What depends on the workers, and what a model or an
        optimizer raises when it is made, is told by `start_training`.

        Args:
            model, model_args: as for `register_model`.
            train_loader, val_loader, options: as for `start_training`.

        Raises:
            GuavaError: what is wrong; a name comes with the nearest that is known.
        """
        chosen = TrainingOptions.of("start_training", val_loader is not None, **options).settled(self.config)
        if chosen.sync == "auto":  # the workers' lines choose; what is named stays
            chosen = dataclasses.replace(chosen, sync="step", shares=None)
        loaders = (train_loader, val_loader)
        with unchanged_randomness():
            composed = self._builder().compose(chosen, self._models.factory_of(model, model_args), loaders, None)
            check_names(composed.spec, lambda name: resolve(name, composed.shared))
            for one in composed.own:
                find("data set", one.factory.name, {}, "", lambda name: resolve(name, composed.shared))
            TrainingPlan.of(chosen, self.config, guessed_feeds(loaders, chosen.batch), *composed.validating)
        if chosen.resume is not None and str(chosen.resume) != OF_SESSION and not Path(chosen.resume).is_file():
            checkpoint.read(Path(chosen.resume))
        if (
            chosen.weights is not None
            and not is_on_hub(chosen.weights)
            and not Path(chosen.weights).expanduser().exists()
        ):
            fitting_weights(Path(chosen.weights), nn.Module())
