"""How one model is spread, in torch's own terms: blocks for fully_shard, styles for parallelize_module, cuts for stages.

Builds the model once, on the CPU, as every worker does. What torch has no call for is refused, or stays whole and is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from guava_nb.errors import ConfigError
from guava_nb.export.source_text import literal
from guava_nb.parallel.blocks import matching, repeated_blocks
from guava_nb.parallel.tensor.plan_search import make_plan
from guava_nb.parallel.tensor.tensor_plan import Plan, Split
from guava_nb.protocol.messages import ParallelSpec

__all__ = ["Layout", "layout_of"]

_STYLES = {
    ("column", False): "ColwiseParallel()",
    ("column", True): "ColwiseParallel(output_layouts=Replicate())",
    ("row", False): "RowwiseParallel()",
    ("row", True): "RowwiseParallel(input_layouts=Replicate())",
    ("head", False): "ColwiseParallel(output_layouts=Replicate())",
    ("head", True): "ColwiseParallel(output_layouts=Replicate())",
    ("vocab", False): "RowwiseParallel(input_layouts=Replicate())",
    ("vocab", True): "RowwiseParallel(input_layouts=Replicate())",
}


@dataclass
class Layout:
    """What a program says of it.

    Attributes:
        blocks: the loop over the blocks that FSDP gathers one by one: an iterable's text; "" without.
        styles: pattern of module names to a style's text.
        heads: modules to attributes of which each process has its part, such as a number of heads.
        whole: what guava_nb splits and torch leaves whole here, in words.
        cuts: for an nn.Sequential: places at which stages begin; else empty.
        begins: names of the modules that begin the second and later stages.
        stages: how many in all.
        again: modules whose activations are computed again.
    """

    blocks: str = ""
    styles: dict[str, str] = field(default_factory=dict)
    heads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    cuts: tuple[int, ...] = ()
    begins: tuple[str, ...] = ()
    stages: int = 1
    again: tuple[str, ...] = ()

    @property
    def again_line(self) -> str:
        """Names of the modules whose activations are computed again, as text."""
        return literal(self.again)

    @property
    def head_lines(self) -> list[tuple[str, tuple[str, ...]]]:
        """Modules that have the same attributes to divide, and these."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, attributes in self.heads.items():
            groups.setdefault(attributes, []).append(name)
        return [(literal(tuple(names)), attributes) for attributes, names in groups.items()]


def layout_of(model: nn.Module, spec: ParallelSpec) -> Layout:
    """Return the layout of a model; it is taken apart where it is cut into stages.

    Raises:
        ConfigError: torch has no call that does it.
    """
    found = Layout(stages=spec.pp * spec.stages_per_rank if spec.pp > 1 else 1)
    found.again = tuple(matching(model, spec.checkpoint_activations, "checkpoint_activations"))
    if spec.zero_stage >= 2 and spec.dp > 1:
        found.blocks = _loop(
            model, [name for name, block in repeated_blocks(model).items() if not _is_tied(model, block)]
        )
    if spec.tp > 1:
        _take_plan(found, model, make_plan(model, spec.tensor_plan, spec.tp), spec.tp)
    if spec.pp > 1:
        _cut(found, model, spec)
    return found


def _loop(model: nn.Module, names: Sequence[str]) -> str:
    """Return an iterable of these modules, as a reader would write it."""
    parents = {name.rpartition(".")[0] for name in names}
    if not names:
        return ""
    if len(parents) == 1 and all(name.rpartition(".")[2].isdigit() for name in names):
        first, last = (int(name.rpartition(".")[2]) for name in (names[0], names[-1]))
        parent = parents.pop()
        if list(dict(model.get_submodule(parent).named_children())) == [name.rpartition(".")[2] for name in names]:
            return _path(parent)  # all of them, also those that a reader will add
        return f"{_path(parent)}[{first}:{last + 1}]" if last - first + 1 == len(names) else ""
    return f"map(model.get_submodule, {tuple(names)!r})".replace("'", '"')


def _path(name: str) -> str:
    steps = [f"[{part}]" if part.isdigit() else f".{part}" for part in name.split(".") if part]
    return "model" + "".join(steps)


def _is_tied(model: nn.Module, block: nn.Module) -> bool:
    inside = {id(parameter) for parameter in block.parameters()}
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in inside]
    return len(names) > len({n for n, _ in block.named_parameters(remove_duplicate=False)})


# ------------------------------------------------------------------------------------------------------ tensor parallel


def _take_plan(found: Layout, model: nn.Module, plan: Plan, ranks: int) -> None:
    regions = [region for region in plan.regions if _goes_along(model, region.columns, region.row, plan, ranks)]
    along = {name for region in regions for name in (*region.columns, region.row)}
    styles: dict[str, str] = {}
    for name, split in plan.splits.items():
        module = model.get_submodule(name)
        if split.kind == "attention" or _is_tied(model, module):
            found.whole.append(name)
        else:
            styles[name] = _STYLES[split.kind, name not in along]
    if not styles:
        raise ConfigError(
            f"torch's parallelize_module can split none of the layers that this run splits ({', '.join(plan.splits)}): an "
            "nn.MultiheadAttention and tied weights have no style there"
        )
    found.styles = _with_patterns(model, styles)
    parents = {region.row.rpartition(".")[0] for region in regions}
    for name, values in plan.attributes.items():
        if name in parents and values:
            found.heads[name] = tuple(values)


def _goes_along(model: nn.Module, columns: Sequence[str], row: str, plan: Plan, ranks: int) -> bool:
    """Whether activations between these layers can stay split in torch's way: in one equal piece for each process."""
    parent = row.rpartition(".")[0]
    if any(not parent or name.startswith(f"{parent}.") for name in plan.partial):
        return False  # a whole parameter between them would need its gradients summed
    if not all(_is_even(model.get_submodule(name), plan.splits[name], ranks) for name in (*columns, row)):
        return False
    attributes = plan.attributes.get(parent, {})
    return all(
        len(set(values)) == 1 and getattr(model.get_submodule(parent), name, 0) == values[0] * ranks
        for name, values in attributes.items()
    )


def _is_even(layer: nn.Module, split: Split, ranks: int) -> bool:
    assert isinstance(layer, nn.Linear)
    size = layer.in_features if split.kind == "row" else layer.out_features
    each = size // ranks
    wanted = [((rank * each, (rank + 1) * each),) for rank in range(ranks)]
    return size % ranks == 0 and [tuple(map(tuple, pieces)) for pieces in split.ranges] == wanted


def _with_patterns(model: nn.Module, styles: dict[str, str]) -> dict[str, str]:
    """Write the names of layers that repeat as one pattern, where all that match it have the same style."""
    names, made = [name for name, _ in model.named_modules()], dict[str, str]()
    for name, style in styles.items():
        pattern = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name)
        matched = [n for n in names if re.fullmatch(pattern.replace(".", r"\.").replace("*", "[^.]+"), n)]
        made[pattern if all(styles.get(n) == style for n in matched) else name] = style
    return made


# ------------------------------------------------------------------------------------------------------------- stages


def _cut(found: Layout, model: nn.Module, spec: ParallelSpec) -> None:
    # Only now: torch's pipelining is slow to import, and the other modes never need it.
    from guava_nb.parallel.pipeline.stages import split_model
    from guava_nb.parallel.pipeline.tracing import is_plain_sequential

    _refuse_tied(model)
    children = [name for name, _ in model.named_children()]
    is_sequential = is_plain_sequential(model)
    if spec.balance == "time":
        raise ConfigError(
            "its stages are balanced by the time that the workers measured, and where they begin is not known here: name the "
            "cuts with pipeline_split (--split)"
        )
    found.begins = split_model(model, found.stages, spec.split).begins[1:]
    if is_sequential and all(name in children for name in found.begins):
        found.cuts = (0, *(children.index(name) for name in found.begins))
    elif spec.stages_per_rank > 1:
        raise ConfigError(
            "torch's tracing of a model that is no nn.Sequential gives each process one stage, and this run has "
            f"{spec.stages_per_rank} on each: make the model an nn.Sequential of its blocks, or use schedule 1f1b"
        )


def _refuse_tied(model: nn.Module) -> None:
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            raise ConfigError(
                f"{first!r} and {name!r} are one parameter, and torch.distributed.pipelining does not sum the gradients of one "
                "that stands in several stages: untie them, or train in another mode"
            )


def classes_are_last(model: nn.Module, inputs: torch.Tensor, targets: Sequence[int]) -> bool:
    """Whether the model has its classes on the last of several axes, by one forward of a row of zeros.

    Args:
        model: as workers build it.
        inputs: a row of zeros, `[1, ...]`.
        targets: shape of a batch's targets.

    Raises:
        ConfigError: the model does not run so.
    """
    try:
        with torch.no_grad():
            outputs = model.eval()(inputs)
        shape = tuple(outputs.shape)
    except Exception as error:
        raise ConfigError(
            f"on which axis the model has its classes could not be seen ({type(error).__name__}: {error}): share a loss function "
            "that flattens outputs and targets, and train with it"
        ) from error
    return len(shape) > 2 and shape[1:-1] == tuple(targets[1:])
