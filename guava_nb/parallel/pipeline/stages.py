"""From a whole model to its pipeline stages.

Every rank holds the whole model when it is built, cuts it in the same way and keeps its own stages. A stage is a module
whose parameters have the names of the full model, so that plans, patterns and checkpoints need no translation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from guava_nb.errors import ConfigError
from guava_nb.parallel.module_state import evaluating
from guava_nb.parallel.pipeline.tracing import graph_of, is_plain_sequential

__all__ = ["Split", "Traced", "balanced_cuts", "parameter_costs", "split_model", "time_costs", "trace_model"]

# Cutting a row of units into stages of about equal cost. Pure arithmetic.


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return at which units the second and later stages begin, so that the costliest stage costs least.

    Every stage gets one unit at least. Of equally good cuts the one with the earliest beginnings is taken, so that all
    ranks agree.

    Args:
        costs: of each unit, in order, not negative.
        stages: into how many runs the units are cut.

    Raises:
        ConfigError: there are fewer units than stages.
    """
    units = len(costs)
    if units < stages:
        raise ConfigError(
            f"the model has {units} part{'s' if units != 1 else ''} to cut between, {stages} stages need at least "
            f"{stages}; use fewer stages, or name finer split points"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[k] is the lowest cost of the first k units in the stages so far, cuts[k] the beginnings that reach it.
    best: dict[int, tuple[float, list[int]]] = {k: (sums[k], []) for k in range(1, units + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[start][0], sums[end] - sums[start]), [*best[start][1], start])
                for start in best
                if start < end
            )
            for end in range(stage + 1, units + 1)
        }
    return best[units][1]


@dataclass(frozen=True, slots=True)
class Traced:
    """The calls of a model and where it can be cut.

    Attributes:
        graph: what runs after what.
        objects: what its names stand for.
        units: the calls of whole modules, in order; a stage begins at one of them.
    """

    graph: fx.Graph
    objects: dict[str, Any]
    units: tuple[fx.Node, ...]

    @property
    def names(self) -> list[str]:
        """Full name of the module that each unit calls."""
        return [str(unit.target) for unit in self.units]


@dataclass(frozen=True, slots=True)
class Split:
    """A model in stages.

    Attributes:
        modules: one a stage; the first takes the batch's inputs, the others the tuple that the one before returned.
        begins: full name of the module that each stage begins with.
        canonical: full name of every parameter, also under its second names, to the name `named_parameters` gives.
        holders: canonical name of every parameter to the stages that use it.
        buffers: name of every buffer of the full state to the stages that use it.
        keys: keys of the full state dict.
    """

    modules: tuple[nn.Module, ...]
    begins: tuple[str, ...]
    canonical: dict[str, str]
    holders: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]
    keys: tuple[str, ...]


# ------------------------------------------------------------------------------------------------------ where to cut


def trace_model(model: nn.Module, stages: int, split: Sequence[str]) -> Traced:
    """Follow the outer calls of a model down to where it shall be cut.

    Args:
        model: the whole model.
        stages: how many are wanted.
        split: full names of the modules that begin a stage; empty looks for lists of blocks.

    Raises:
        ConfigError: the model cannot be followed that far.
    """
    if split:
        return _traced(model, _ancestors(model, split))
    inner = _ancestors(model, _blocks(model))
    if not inner:
        return _traced(model, ())
    try:
        return _traced(model, inner)
    except ConfigError:
        outer = _traced(model, ())
        if len(outer.units) < stages:
            raise
        return outer


def _traced(model: nn.Module, enter: Iterable[str]) -> Traced:
    graph, objects = graph_of(model, sorted(enter))
    units = tuple(node for node in graph.nodes if node.op == "call_module")
    return Traced(graph, objects, units)


def _ancestors(model: nn.Module, names: Iterable[str]) -> set[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    found = set()
    for name in names:
        if name not in modules:
            near = ", ".join(repr(known) for known in list(modules)[1:9])
            raise ConfigError(
                f"pipeline_split (--split) names {name!r}, which is no module of the model; it has {near} and so on"
            )
        parts = name.split(".")
        found |= {".".join(parts[:length]) for length in range(1, len(parts))}
    return {name for name in found if not is_plain_sequential(modules[name])}


def _blocks(model: nn.Module) -> list[str]:
    """Return the members of the outermost lists of modules: what repeats in most models."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not any(name.startswith(f"{b}.") for b in found):
            found += [f"{name}.{index}" for index in range(len(module))]
    return found


def parameter_costs(traced: Traced) -> list[float]:
    """Return the number of parameters of each unit.

    A parameter that several units share counts for each of them: each stage that uses it holds it and computes with it, as the
    head of a language model does that is tied to its embeddings.
    """
    return [float(sum(p.numel() for p in traced.objects[str(unit.target)].parameters())) for unit in traced.units]


class _Clock(fx.Interpreter):
    """Runs a graph and keeps how long each call of a module took, in seconds."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.seconds: dict[str, float] = {}
        self._on_cuda = {p.device for p in module.parameters() if p.is_cuda}

    def run_node(self, n: fx.Node) -> Any:
        begin = time.perf_counter()
        result = super().run_node(n)
        for device in self._on_cuda:  # else only the launch of its kernels is timed
            torch.cuda.synchronize(device)
        self.seconds[n.name] = time.perf_counter() - begin
        return result


@torch.no_grad()
def time_costs(traced: Traced, inputs: Any, runs: int = 3) -> list[float]:
    """Return the seconds that each unit's forward takes in evaluation mode: the least of some runs after a first one.

    Args:
        traced: the model.
        inputs: of a typical micro-batch, where the model is.
        runs: how often.
    """
    module = _runner(traced.graph, traced.objects)
    with evaluating(module):
        clocks = [_Clock(module, traced.graph) for _ in range(runs + 1)]
        for clock in clocks:
            clock.run(inputs)
    return [min(clock.seconds[unit.name] for clock in clocks[1:]) for unit in traced.units]


# ---------------------------------------------------------------------------------------------------------------- cuts


def find_cuts(traced: Traced, stages: int, split: Sequence[str], costs: Callable[[Traced], list[float]]) -> list[int]:
    """Return at which units the second and later stages begin.

    Args:
        traced: the model's units, in the order in which they run.
        stages: how many there will be.
        split: names of the modules with which the second and later stages begin; empty: balanced by `costs`.
        costs: gives the weight of each unit.

    Raises:
        ConfigError: the split points are not one fewer than the stages, are not called, or leave the first stage empty.
    """
    if not split:
        return balanced_cuts(costs(traced), stages)
    if len(split) != stages - 1:
        raise ConfigError(
            f"pipeline_split (--split) names {len(split)} modules, so {len(split) + 1} stages; the mesh has {stages}, name "
            f"{stages - 1}"
        )
    cuts = sorted(_unit_at(traced, name) for name in split)
    if cuts[0] == 0 or len(set(cuts)) < len(cuts):
        raise ConfigError(
            f"split points {', '.join(map(repr, split))} leave a stage empty; each stage needs a module of its own, "
            f"and the first begins at {traced.names[0]!r} anyway"
        )
    return cuts


def _unit_at(traced: Traced, name: str) -> int:
    for index, unit in enumerate(traced.names):
        if unit == name or unit.startswith(f"{name}."):
            return index
    known = ", ".join(map(repr, traced.names[:12]))
    raise ConfigError(
        f"pipeline_split (--split) names {name!r}, which the model's forward does not call; it calls {known}"
    )


def split_model(
    model: nn.Module,
    stages: int,
    split: Sequence[str] = (),
    costs: Callable[[Traced], list[float]] = parameter_costs,
) -> Split:
    """Cut a model into stages.

    Args:
        model: the whole model; its modules go on living in the stages.
        stages: how many.
        split: full names of the modules that begin the second and later stages; empty balances by `costs`.
        costs: of the units of a traced model.

    Raises:
        ConfigError: it cannot be cut so; the text has the sizes and says what to do.
    """
    traced = trace_model(model, stages, split)
    cuts = find_cuts(traced, stages, split, costs)
    modules = [_segment(traced, begin, end) for begin, end in _ranges(traced, cuts)]
    canonical = _canonical_names(model)
    _adopt_orphans(model, modules, canonical)
    keys = tuple(key for key, value in model.state_dict().items() if isinstance(value, torch.Tensor))
    named_buffers = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in keys]
    return Split(
        modules=tuple(modules),
        begins=tuple(traced.names[cut] for cut in (0, *cuts)),
        canonical=canonical,
        holders=_holders(modules, canonical),
        buffers={
            name: tuple(i for i, module in enumerate(modules) if name in _buffer_names(module))
            for name in named_buffers
        },
        keys=keys,
    )


def _buffer_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def _canonical_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _holders(modules: Sequence[nn.Module], canonical: dict[str, str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for index, module in enumerate(modules):
        for name in dict.fromkeys(canonical[name] for name, _ in module.named_parameters(remove_duplicate=False)):
            found.setdefault(name, []).append(index)
    return {name: tuple(found[name]) for name in dict.fromkeys(canonical.values())}


def _ranges(traced: Traced, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return [begin, end) of each stage among the working nodes of the graph."""
    working = _working(traced.graph)
    begins = [0, *(working.index(traced.units[cut]) for cut in cuts)]
    return list(zip(begins, [*begins[1:], len(working)], strict=True))


def _working(graph: fx.Graph) -> list[fx.Node]:
    # A parameter that the outer forward names is fetched by each stage that uses it, it never travels.
    return [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]


def _segment(traced: Traced, begin: int, end: int) -> nn.Module:
    """Make the module of the working nodes [begin, end); what later nodes need passes through every stage between."""
    working = _working(traced.graph)
    result = next(node for node in traced.graph.nodes if node.op == "output")
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in _alive(traced.graph, begin):
        copies[node] = graph.placeholder(node.name)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.get_attr(str(node.target))
        return copies[node]

    for node in working[begin:end]:
        copies[node] = graph.node_copy(node, copy_of)
    if end == len(working):
        graph.output(fx.node.map_arg(result.args[0], copy_of))
    else:
        graph.output(tuple(copy_of(node) for node in _alive(traced.graph, end)))
    return _runner(graph, traced.objects)


def _runner(graph: fx.Graph, objects: Mapping[str, Any]) -> nn.Module:
    """Return a module whose forward is the graph, and which holds the objects that the graph uses under their full names.

    `fx.GraphModule` does so too, and fails where a module has the name of one of its own attributes (code, graph, meta).
    """
    text = graph.python_code("self")
    space = dict(text.globals)
    exec(text.src, space)  # what torch.fx wrote of the calls that it followed
    stage: nn.Module = type("Stage", (nn.Module,), {"forward": space["forward"]})()
    used = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr"))
    for name in sorted(used, key=lambda name: name.count(".")):  # a module before what is read inside it
        *outer, last = name.split(".")
        place = stage
        for part in outer:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        value = objects[name]
        if getattr(place, last, None) is value:
            continue
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            place.register_buffer(last, value)
        else:
            setattr(place, last, value)
    return stage


def _alive(graph: fx.Graph, cut: int) -> list[fx.Node]:
    """Return the values that exist before a cut and are needed after it."""
    working = _working(graph)
    later = {*working[cut:], *(node for node in graph.nodes if node.op == "output")}
    before = {*(node for node in graph.nodes if node.op == "placeholder"), *working[:cut]}
    if cut == 0:
        return [node for node in graph.nodes if node in before]
    return [node for node in graph.nodes if node in before and any(user in later for user in node.users)]


def _adopt_orphans(model: nn.Module, modules: Sequence[nn.Module], canonical: dict[str, str]) -> None:
    """Give what no stage uses to the first one: an unused parameter belongs to the checkpoint all the same."""
    held = {canonical[n] for module in modules for n, _ in module.named_parameters(remove_duplicate=False)}
    for name, parameter in model.named_parameters():
        if name not in held:
            owner, field = _home(modules[0], name)
            owner.register_parameter(field, parameter)
    held = set().union(*(_buffer_names(module) for module in modules))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in held:
            owner, field = _home(modules[0], name)
            owner.register_buffer(field, buffer)


def _home(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, field = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = getattr(module, part)
    return module, field
