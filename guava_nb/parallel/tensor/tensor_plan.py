"""Tensor plans: which module is split how, and carrying it out. How a plan is found stands in plan_search.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.parallel.tensor.split_trial import SplitTrial, try_split
from guava_nb.parallel.tensor.tensor_attention import SplitAttention
from guava_nb.parallel.tensor.tensor_check import SplitLayers, check_on_first_batch
from guava_nb.parallel.tensor.tensor_layers import ColumnLinear, Ranges, RowLinear, VocabEmbedding
from guava_nb.parallel.tensor.tensor_ops import GroupRanks, Ranks
from guava_nb.parallel.tensor.tensor_random import SplitRandomness

__all__ = ["Plan", "Region", "Split", "apply_plan", "divided_attributes", "split_modules", "try_plan"]

#: Names of the attributes, such as a number of heads, that have a rank's values, by the module that has them.
_DIVIDED: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()

_SPLIT: dict[str, type[nn.Module]] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "head": nn.Linear,
    "vocab": nn.Embedding,
    "attention": nn.MultiheadAttention,
}


@dataclass(frozen=True, slots=True)
class Split:
    """How one module is split.

    Attributes:
        kind: "column", "row" and "head" of a Linear, "vocab" of an Embedding, "attention" of an nn.MultiheadAttention.
        ranges: of the split dim, for every rank; empty for "attention".
        joined: activations outside are whole: a column layer gathers its outputs, a row layer cuts its inputs.
    """

    kind: str
    ranges: Ranges = ()
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Region:
    """Layers between which activations are split."""

    columns: tuple[str, ...]
    row: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for a model, or for one module of it.

    Attributes:
        splits: by module name.
        attributes: by module name: attributes of the user's module, such as a number of heads, with every rank's value.
        regions: where activations are split.
        partial: names of whole parameters whose gradients must be added up over the ranks.
    """

    splits: Mapping[str, Split]
    attributes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    regions: tuple[Region, ...] = ()
    partial: tuple[str, ...] = ()

    def under(self, prefix: str) -> Plan:
        """Return the plan with every name put under a module's name."""

        def full(name: str) -> str:
            return f"{prefix}.{name}".strip(".")

        return Plan(
            {full(name): split for name, split in self.splits.items()},
            {full(name): values for name, values in self.attributes.items()},
            tuple(Region(tuple(map(full, r.columns)), full(r.row)) for r in self.regions),
            tuple(map(full, self.partial)),
        )

    def __or__(self, other: Plan) -> Plan:
        """Join plans of different modules."""
        return Plan(
            {**self.splits, **other.splits},
            {**self.attributes, **other.attributes},
            self.regions + other.regions,
            self.partial + other.partial,
        )


def split_modules(root: nn.Module, plan: Plan, ranks: Ranks) -> list[SplitLayers]:
    """Replace modules in place.

    Args:
        root: the model, or a part of it.
        plan: names of it that are not in `root` are left out.
        ranks: who shares each layer.

    Returns:
        The regions of the plan of which all layers are here.
    """
    made: dict[str, nn.Module] = {}
    shared: dict[int, nn.Parameter] = {}
    names = [name for name, _ in root.named_modules(remove_duplicate=False)]
    parts: dict[nn.Module, nn.Module] = {}
    for name in names:
        whole = root.get_submodule(name)
        if whole in parts:
            made[name] = parts[whole]
            _replace(root, name, parts[whole])
            continue
        split = plan.splits.get(name)
        # What no stage of a pipeline runs is kept there as bare parameters, and stays whole.
        if split is not None and isinstance(whole, _SPLIT[split.kind]):
            parts[whole] = made[name] = new = _part(whole, split, ranks)
            _keep_ties(whole, new, shared)
            _replace(root, name, new)
    before = {name: _set_attributes(root.get_submodule(name), plan.attributes[name], ranks.rank)
              for name in names if name in plan.attributes}  # fmt: skip
    for region in plan.regions:
        _share_randomness(region, made, ranks.rank)
    return [here for region in plan.regions if (here := _region_in(root, region, made, before))]


def _set_attributes(module: nn.Module, attributes: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, Any]:
    """Give attributes this rank's values, and return those that they had."""
    before = {name: getattr(module, name) for name in attributes if hasattr(module, name)}
    for name, values in attributes.items():
        setattr(module, name, values[rank])
    _DIVIDED[module] = frozenset(attributes)
    return before


def divided_attributes(module: nn.Module) -> frozenset[str]:
    """Return the names of the attributes to which a plan gave a rank's values: the whole module has others there."""
    return _DIVIDED.get(module, frozenset())


def _region_in(
    root: nn.Module, region: Region, made: Mapping[str, nn.Module], before: Mapping[str, Mapping[str, Any]]
) -> SplitLayers | None:
    layers = {n: m for n in (*region.columns, region.row) if isinstance(m := made.get(n), ColumnLinear | RowLinear)}
    if len(layers) <= len(region.columns):
        return None
    parent = region.row.rpartition(".")[0]
    return SplitLayers(layers, {root.get_submodule(parent): before[parent]} if before.get(parent) else {})


def _part(whole: nn.Module, split: Split, ranks: Ranks) -> nn.Module:
    new: nn.Module
    if split.kind in ("column", "head"):
        assert isinstance(whole, nn.Linear)
        new = ColumnLinear(whole, ranks, split.ranges, split.joined)
    elif split.kind == "row":
        assert isinstance(whole, nn.Linear)
        new = RowLinear(whole, ranks, split.ranges, split.joined)
    elif split.kind == "vocab":
        assert isinstance(whole, nn.Embedding)
        new = VocabEmbedding(whole, ranks, split.ranges)
    else:
        assert isinstance(whole, nn.MultiheadAttention)
        new = SplitAttention(whole, ranks)
    return new.train(whole.training)


def _keep_ties(whole: nn.Module, new: nn.Module, shared: dict[int, nn.Parameter]) -> None:
    """A weight that two modules share stays one parameter."""
    for name, parameter in whole._parameters.items():
        if parameter is not None:
            setattr(new, name, shared.setdefault(id(parameter), getattr(new, name)))


def _replace(root: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    holder = root.get_submodule(parent)
    # Sequential and ModuleList index their modules by number, so the table is changed, not an attribute.
    holder._modules[child] = new


def _share_randomness(region: Region, made: Mapping[str, nn.Module], rank: int) -> None:
    randomness = SplitRandomness(rank)
    for name in (*region.columns, region.row):
        layer = made.get(name)
        if isinstance(layer, ColumnLinear | RowLinear):
            layer.randomness = randomness


def apply_plan(model: nn.Module, plan: Plan, group: dist.ProcessGroup, late: bool = False) -> list[str]:
    """Split a model, or a stage of it, over the ranks that share each layer.

    Args:
        model: changed in place; modules of a stage have the names that they have in the whole model.
        plan: of the whole model.
        group: the ranks.
        late: heads gather their logits only if code looks at them.

    Returns:
        Full names of the whole parameters here whose gradients must be added up over the ranks.
    """
    check_on_first_batch(model, split_modules(model, plan, GroupRanks(group)), plan.partial)
    for name, module in model.named_modules():
        if isinstance(module, ColumnLinear) and plan.splits[name].kind == "head":
            module.gathers_late = late
    here = {name for name, _ in model.named_parameters()}
    return [name for name in plan.partial if name in here]


def try_plan(module: nn.Module, width: int, ranks: int, plan: Plan) -> SplitTrial:
    """Try a plan of one module, whose input's last dim is `width`; see split_trial.py."""

    def split(part: nn.Module, thread: Ranks) -> Callable[[str, Tensor], Tensor]:
        split_modules(part, plan, thread)
        layouts = {
            f"{prefix}.{name}".lstrip("."): layout
            for prefix, layer in part.named_modules()
            for name, layout in layer.__dict__.get("layouts", {}).items()
        }
        return lambda name, full: layouts[name].cut(full) if name in layouts else full

    return try_split(module, width, ranks, split)
