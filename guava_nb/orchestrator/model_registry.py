"""What a session trains: its shared cells, and the model that was registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from guava_nb.errors import ConfigError, SourceError
from guava_nb.protocol.messages import Cell, Factory, RunSpec
from guava_nb.replica.model.wrappers import unwrapped
from guava_nb.replica.state_dict import parameter_hash
from guava_nb.spec.cells import SourceLedger, build_module, resolve
from guava_nb.spec.run_spec import factory_for
from guava_nb.spec.training_options import Reference
from guava_nb.training import checkpoint

__all__ = ["ModelRegistry"]


class ModelRegistry:
    """The shared cells of a session and its registered model.

    Args:
        notice: takes a sentence for the user.
    """

    def __init__(self, notice: Callable[[str], None] = lambda sentence: None) -> None:
        """Nothing is shared or registered yet."""
        self._notice = notice
        self._ledger = SourceLedger()
        self._built: tuple[str, ModuleType] | None = None
        # Digest of the ledger, cells that cannot run elsewhere and why, names that they define and why.
        self._left_out: tuple[str, dict[str, str], dict[str, str]] = ("", {}, {})
        self._factory: Factory | None = None
        self._instance: torch.nn.Module | None = None
        self._reference: Reference | type | None = None  # what was registered, or the class of it
        self._weights = ""  # hash of the instance's state when it was registered

    # ---------------------------------------------------------------------------------------------------------- cells

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The shared cells that can run elsewhere, in order of first appearance.

        Raises:
            SourceError: what uses those that cannot cannot be told.
        """
        found, digest = self._ledger.cells(), self._ledger.digest()
        if self._left_out[0] != digest:
            self._left_out = (digest, *self._ledger.left_out())
            for cell, why in self._left_out[1].items():
                self._notice(f"cell {cell!r} is not sent, and what uses it cannot train: {why}")
        return tuple(cell for cell in found if cell.name not in self._left_out[1])

    @property
    def cell_names(self) -> tuple[str, ...]:
        """Names of all shared cells."""
        return tuple(cell.name for cell in self._ledger.cells())

    def share(self, text: str, name: str | None) -> str:
        """Add a cell, or replace the one of this name; returns its name.

        Raises:
            SourceError: it is no Python that another machine can run.
        """
        chosen = name or f"cell-{len(self._ledger.cells()) + 1}"
        self._ledger.add(chosen, text)
        return chosen

    def unshare(self, name: str) -> None:
        """Take a cell away; unknown names are fine."""
        self._ledger.remove(name)

    def shared(self) -> ModuleType | None:
        """Return the module of the shared cells, built anew only when a cell changed: cells may take long or print.

        Raises:
            SourceError: a cell fails.
        """
        if not self.cells and not self._left_out[1]:
            return None
        if self._built is None or self._built[0] != self._ledger.digest():
            self._built = (self._ledger.digest(), build_module(self.cells, left_out=self._left_out[2]))
        return self._built[1]

    # ---------------------------------------------------------------------------------------------------------- model

    def register(self, model: Reference | torch.nn.Module | None, args: Mapping[str, Any] | None) -> bool:
        """Take a model, or let go of it; errors as for `Orchestrator.register_model`.

        Returns:
            Whether it is an instance, whose weights are where training starts; not for one that was registered before and
            has the same weights as then.
        """
        if model is None:
            self._factory = self._instance = self._reference = None
            return False
        if not isinstance(model, torch.nn.Module):
            named, self._reference = self.factory_of(model, args), model
            if named == self._factory and self._instance is not None:
                self._notice(
                    f"the model is {named.name} as it is built now: training does not start from the instance that was "
                    "registered before, and that one does not say which parameters are frozen. To use it, register it again"
                )
            self._factory, self._instance = named, None
            return False
        instance = unwrapped(model)
        if reason := _cannot_be_built(instance):
            raise SourceError(reason)
        tensors = [item for item in instance.state_dict().items() if isinstance(item[1], torch.Tensor)]
        factory, weights = self.factory_of(type(instance), args), parameter_hash(tensors)
        if (instance, weights, factory) == (self._instance, self._weights, self._factory):
            return False
        self._factory, self._instance, self._weights = factory, instance, weights
        self._reference = type(instance)
        return True

    def factory_of(self, model: Reference, args: Mapping[str, Any] | None) -> Factory:
        """Return the record that names a model.

        Raises:
            SourceError: it exists only here.
            ConfigError: an argument cannot travel.
        """
        return factory_for("model", model, args, self.shared())

    def reference_of(self, factory: Factory | None) -> Reference | type | None:
        """Return what the user gave for the model of this record; None where it was not registered."""
        return self._reference if factory == self._factory else None

    def keep(self, factory: Factory | None) -> None:
        """Register the model that a run takes from its checkpoint, where none was registered."""
        self._factory = self._factory or factory

    def instance_for(self, spec: RunSpec) -> torch.nn.Module | None:
        """Return the registered instance if a run trains it: its weights are where the run starts."""
        return self._instance if spec.model == self._factory else None

    def frozen_in(self, model: Factory) -> tuple[str, ...] | None:
        """Return the parameters of the registered instance that take no gradient now; None where no instance is trained."""
        if self._instance is None or model != self._factory:
            return None
        return tuple(name for name, parameter in self._instance.named_parameters() if not parameter.requires_grad)

    def needed(self, loaded: checkpoint.Loaded | None) -> Factory:
        """Return the registered model, else the one that the loaded checkpoint names.

        Raises:
            ConfigError: there is neither.
        """
        factory = self._factory or (None if loaded is None else self._saved(loaded))
        if factory is None:
            made = "" if loaded is None else checkpoint.model_text(loaded.content)
            told = f" ({loaded.path} was made with {made})" if loaded is not None and made else ""
            raise ConfigError(
                f"no model is named yet{told}: name one of a shared cell on this line, --model Net (in a script: "
                "register_model(Net))"
            )
        return factory

    def _saved(self, loaded: checkpoint.Loaded) -> Factory | None:
        """The model that a checkpoint names, if a shared cell defines it: a file must not choose what else is called."""
        made, shared = checkpoint.made_with(loaded.content), self.shared()
        if made is None or shared is None or ":" in made.name:
            return None
        try:
            found = resolve(made.name, shared)
        except SourceError:
            return None
        return made if getattr(found, "__module__", "") == shared.__name__ else None


def _cannot_be_built(instance: torch.nn.Module) -> str:
    """Why no worker can build such an instance from the name of its class, in a sentence; "" where it may."""
    name = type(instance).__name__
    if isinstance(instance, torch.jit.ScriptModule):
        return "a scripted model has no class that workers could call: register the class that torch.jit.script was called with"
    if type(instance) in (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict):
        return (
            f"the class {name} alone does not say which layers this instance has, so no worker can build it. Put a class of "
            f"your own into a %%guava_share cell: class Net(nn.{name}) whose __init__(self) calls super().__init__ with these "
            "layers. Net() then takes this instance's weights by load_state_dict, and can be registered"
        )
    return ""
