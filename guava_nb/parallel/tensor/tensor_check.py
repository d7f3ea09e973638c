"""Whether layers that share split activations do so rightly on real numbers: looked at on the first batch.

A plan is proven on random numbers (split_trial.py), and a forward may do something else on those that come: clip a large
norm, choose an expert. So the first forward of training, and the first of evaluation, first runs each module that
holds such layers twice: as it is, and with whole activations around each layer, which is right for any forward. Only
activations travel for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.errors import TrainingError
from guava_nb.nested import children, leaves, map_leaves
from guava_nb.parallel.tensor.tensor_layers import ColumnLinear, RowLinear
from guava_nb.parallel.tensor.without_randomness import WithoutRandomness, untouched

__all__ = ["SplitLayers", "check_on_first_batch"]

#: Relative difference of outputs that the order of sums may explain, by dtype; and for halves and under autocast.
_SLACK = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_SLACK = 0.1
_PLAIN = (Tensor, int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class SplitLayers:
    """Layers between which activations are split.

    Attributes:
        layers: by full name.
        attributes: modules whose attributes hold this rank's value, and the values that are right for whole activations.
    """

    layers: dict[str, ColumnLinear | RowLinear]
    attributes: dict[nn.Module, Mapping[str, Any]] = field(default_factory=dict)

    def join(self) -> None:
        """Let activations be whole around each layer."""
        for layer in self.layers.values():
            layer.randomness = None  # nothing between them is split, so nothing draws as if it were
            if isinstance(layer, ColumnLinear):
                layer.gathers = True
            else:
                layer.scatters = True
        for module, values in self.attributes.items():
            for name, value in values.items():
                setattr(module, name, value)


def check_on_first_batch(root: nn.Module, regions: Sequence[SplitLayers], partial: Sequence[str] = ()) -> None:
    """Watch the modules that hold split layers; the first batch raises a TrainingError where numbers differ.

    Args:
        root: the model or a stage, split already.
        regions: all layers of each are in `root`.
        partial: names of whole parameters that are used on split activations.
    """
    found: dict[nn.Module, tuple[str, SplitLayers]] = {}
    for region in regions:
        name, module = _home(root, next(iter(region.layers)))
        _, here = found.setdefault(module, (name, SplitLayers({})))
        here.layers.update(region.layers)
        here.attributes.update(region.attributes)
    for module, (name, here) in found.items():
        inside = [one for one in partial if one.startswith(f"{name}." if name else "")]
        check = _Check(name, here, inside)
        module.register_forward_pre_hook(check, with_kwargs=True)
        for layer in here.layers.values():
            layer.register_forward_pre_hook(check.on_layer)


def _home(root: nn.Module, layer: str) -> tuple[str, nn.Module]:
    """Return the innermost module around a layer that has a forward: a stage opens containers, which have none then."""
    name = layer
    while name:
        name = name.rpartition(".")[0]
        module = root.get_submodule(name)
        if getattr(type(module), "forward", None) is not nn.Module.forward:
            return name, module
    return "", root


class _Check:
    def __init__(self, name: str, here: SplitLayers, partial: Sequence[str]) -> None:
        self._name, self._here, self._partial = name, here, partial
        self._seen: set[bool] = set()
        self._is_tried = False

    def on_layer(self, layer: nn.Module, args: Any) -> None:
        """Let activations be whole where layers are called one by one, and not by the forward with which they were tried.

        Raises:
            TrainingError: parameters between them were found to need split ones.
        """
        if self._is_tried:
            return
        if self._partial:
            raise TrainingError(
                f"the layers {', '.join(self._here.layers)} are not called by the forward of {self._name!r}, with which their "
                f"split was tried, and {self._partial[0]!r} lies between them. {self._way()}"
            )
        self._here.join()
        self._is_tried = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_tried = True
        if module.training in self._seen:
            return
        self._seen.add(module.training)
        # A user's object, a cache for instance, cannot be handed over twice.
        if not _is_plain((args, kwargs)):
            return
        split, whole = self._run(module, args, kwargs, False), self._run(module, args, kwargs, True)
        difference = _difference(split, whole)
        # All ranks must come to the same end; and where two equal runs differ as much, nothing can be said.
        if self._anywhere(difference > _slack(whole)):
            again = _difference(self._run(module, args, kwargs, True), whole)
            if not self._anywhere(again > _slack(whole)):
                raise TrainingError(self._text(module, difference))

    def _run(self, module: nn.Module, args: Any, kwargs: Any, whole: bool) -> list[Tensor]:
        """Run the module's forward on copies of its arguments; `whole`: with whole activations around each layer.

        Returns:
            The floating-point tensors of its output, complex `[...]` as `[..., 2]`.
        """
        device = next(iter(self._here.layers.values())).weight.device
        with torch.no_grad(), untouched(module, device), WithoutRandomness():
            if whole:
                self._here.join()
            # A forward may change what it is given in place.
            args, kwargs = map_leaves((args, kwargs), lambda tensor: tensor.detach().clone())
            output = module.forward(*args, **kwargs)
            found = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in leaves(output)]
            return [tensor for tensor in found if tensor.is_floating_point()]

    def _anywhere(self, bad: bool) -> bool:
        layer = next(iter(self._here.layers.values()))
        flag = torch.full((1,), float(bad), device=layer.weight.device)
        return bool(layer.ranks.sum(flag).item())

    def _text(self, module: nn.Module, difference: float) -> str:
        kind = f"{self._name!r} ({type(module).__name__})" if self._name else f"the model ({type(module).__name__})"
        names = list(self._here.layers)
        ranks = next(iter(self._here.layers.values())).ranks.size
        return (
            f"{kind} computes something else on this batch when {ranks} workers share its layers {', '.join(names)} (its "
            f"outputs differ by {difference:.2g} of their size): between these layers its forward looks at whole rows, "
            f"and did not on the numbers on which the plan was tried. {self._way()}"
        )

    def _way(self) -> str:
        pattern = f"{self._name}.*" if self._name else next(iter(self._here.layers))
        return (
            f'Nothing was trained with it. Leave it out: tensor_plan={{"{pattern}": "replicate"}}, or --plan '
            f'\'{{"{pattern}": "replicate"}}\''
        )


def _is_plain(value: Any) -> bool:
    inside = children(value)
    return isinstance(value, _PLAIN) if inside is None else all(_is_plain(child) for _, child in inside)


def _difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the largest relative difference of two runs' outputs, tensor by tensor; 0 where the second has no finite size."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return float("inf")
    return max(_differences(a, b), default=0.0)


def _differences(a: Sequence[Tensor], b: Sequence[Tensor]) -> Iterator[float]:
    """Give for each pair of tensors of one shape the norm of the difference by the norm of the second one."""
    for one, other in zip(a, b, strict=True):
        size = float(torch.linalg.vector_norm(other.double()))
        apart = float(torch.linalg.vector_norm(one.double() - other.double()))
        if size < float("inf"):
            yield apart / max(size, 1e-12) if apart == apart else float("inf")


def _slack(outputs: Sequence[Tensor]) -> float:
    """Return which relative difference the order of sums may explain, by the widest slack of the outputs' dtypes."""
    if outputs and torch.is_autocast_enabled(outputs[0].device.type):
        return _HALF_SLACK
    return max((_SLACK.get(output.dtype, _HALF_SLACK) for output in outputs), default=0.0)
