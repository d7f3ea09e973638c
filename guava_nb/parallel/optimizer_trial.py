"""Whether an optimizer does to parts of the parameters what it does to whole ones: tried on small stand-ins before the run.

No list of names knows a user's optimizer and its hooks. One that acts on each element alone gives the same numbers on any
part; one that looks at whole parameters (LAMB, gradient centralisation), or at several at once (clipping by a hook), does not.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from guava_nb.errors import ConfigError
from guava_nb.nested import leaves
from guava_nb.parallel.blocks import repeated_blocks
from guava_nb.parallel.loss_interface import MakeOptimizer
from guava_nb.parallel.module_state import unheard
from guava_nb.parallel.replicas.zero1 import keep_owned, owners
from guava_nb.parallel.state.full_state import local_part
from guava_nb.parallel.state.shard_layout import chunk_bounds, even_bounds
from guava_nb.parallel.tensor.tensor_plan import Plan
from guava_nb.parallel.tensor.without_randomness import WithoutRandomness
from guava_nb.parallel.unloaded import take_step
from guava_nb.protocol.messages import ParallelSpec

__all__ = ["check_optimizer", "check_sharded_optimizer"]

#: Sizes of the gradients of one step after the other: what clips does so at some of them, and what looks ahead by 5 steps does.
_SIZES = (0.01, 1.0, 30.0, 1.0, 0.1, 10.0)
_MOST_ELEMENTS = 1 << 18
_FOR_PAIRS = (
    "{0} of torch takes complex numbers for pairs of real ones, and that fails for {1!r}, which does not go evenly among the "
    "workers: tried on small stand-ins, {2}. Use zero_stage 1, or a first dim that the number of workers divides"
)
#: Relative to the update. Double precision rounds far below; an optimizer may compute in single precision by itself.
_ROUNDING = 1e-4

#: Gives of a named tensor what a worker holds; None: nothing of it.
_Cut = Callable[[str, Tensor], Tensor | None]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one worker holds.

    Attributes:
        cut: of a parameter.
        what: the parameters that a worker has, in words.
        way: what to use instead.
        owned: the optimizer steps on these only; None: on all that it is given.
        is_cut: parameters lie in parts.
    """

    cut: _Cut
    what: str
    way: str
    owned: Collection[str] | None = None
    is_cut: bool = False


def check_optimizer(model: nn.Module, spec: ParallelSpec, plan: Plan, make_optimizer: MakeOptimizer) -> None:
    """Try the optimizer on parts of parameters as the stages, the tensor axis and ZeRO 1 make them; no rank asks another.

    Args:
        model: whole; it is not changed.
        spec: how it will be spread.
        plan: of the tensor axis.
        make_optimizer: makes the optimizer of stand-ins.

    Raises:
        ConfigError: it gives other numbers there than on whole parameters.
    """
    _compare(model, make_optimizer, list(_parts(model, spec, plan)), _SIZES, 2)


def check_sharded_optimizer(model: nn.Module, mesh: DeviceMesh, stage: int, make_optimizer: MakeOptimizer) -> None:
    """Try the optimizer on parameters of which each replica holds some rows (ZeRO 2 and 3); all ranks of the mesh do so together.

    Raises:
        ConfigError: it cannot step there, or gives other numbers.
    """
    what = f"parameters of which each worker holds some rows, as zero_stage {stage} has them"
    part = _Part(partial(_rows, mesh), what, "zero_stage 1, or another optimizer such as AdamW", is_cut=True)
    _compare(model, make_optimizer, [part], _SIZES[:3], mesh.size())


def _parts(model: nn.Module, spec: ParallelSpec, plan: Plan) -> Iterator[_Part]:
    names = [name for name, _ in model.named_parameters()]
    for half in (0, 1):
        if spec.tp > 1 and (dims := _split_dims(model, plan)):
            what = "parameters of which each worker holds some rows or columns, as tensor mode has them"
            way = "data mode, zero_stage=1 (--zero 1), or an element-wise optimizer such as AdamW"
            yield _Part(partial(_half, dims, half), what, way, is_cut=True)
        if spec.pp > 1 and 0 < (middle := _middle(model, names)) < len(names):
            here = set(names[middle:] if half else names[:middle])
            what = "the parameters of some layers only, as each stage of a pipeline has them"
            yield _Part(partial(_if_in, here), what, "data mode, or an element-wise optimizer such as AdamW")
        if spec.dp > 1 and spec.zero_stage == 1:
            owned = {name for name, rank in owners(dict(model.named_parameters()), 2).items() if rank == half}
            what = "some of the parameters only, as zero_stage 1 gives them to each worker"
            yield _Part(lambda _, value: value, what, "data mode, or an element-wise optimizer such as AdamW", owned)


def _half(dims: Mapping[str, int], half: int, name: str, value: Tensor) -> Tensor:
    """Return one half of a stand-in along the dim that the plan cuts, a view; the whole where it cuts none.

    Args:
        dims: the dim that is cut, by parameter.
        half: 0 or 1.
        name: of the parameter.
        value: its stand-in, of any shape.
    """
    dim = dims.get(name)
    if dim is None or value.shape[dim] < 2:
        return value
    start, end = even_bounds(value.shape[dim], 2, half)
    return value.narrow(dim, start, end - start)


def _if_in(here: Collection[str], name: str, value: Tensor) -> Tensor | None:
    """Return a stand-in of any shape where its parameter is among those that are here, else None."""
    return value if name in here else None


def _rows(mesh: DeviceMesh, name: str, value: Tensor) -> Tensor:
    """Return a stand-in as ZeRO 2 and 3 would hold it on this mesh: a DTensor cut by its first dim; scalars stay whole."""
    if value.ndim == 0 or value.numel() == 0:
        return value
    start, end = chunk_bounds(len(value), mesh.size(), mesh.get_local_rank())
    own = value[start:end].contiguous()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())


def _split_dims(model: nn.Module, plan: Plan) -> dict[str, int]:
    """Return along which dim a plan cuts which parameter: of "row" layers the columns, of all others the rows."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for layer, split in plan.splits.items():
        for name, parameter in model.get_submodule(layer).named_parameters():
            by_columns = split.kind == "row" or name == "out_proj.weight"
            if not (by_columns and parameter.ndim < 2):  # the bias of a row layer is whole
                found[names[id(parameter)]] = int(by_columns)
    return found


def _middle(model: nn.Module, names: Sequence[str]) -> int:
    """Return where a cut between two layers halves a list of parameters; blocks stay whole."""
    blocks = tuple(repeated_blocks(model))
    layers = [next((b for b in blocks if name.startswith(f"{b}.")), name.rpartition(".")[0]) for name in names]
    edges = [n for n in range(1, len(names)) if layers[n] != layers[n - 1]]
    return min(edges, key=lambda edge: abs(edge - len(names) / 2), default=0)


# -------------------------------------------------------------------------------------------------------------- playing


@dataclass(slots=True)
class _Played:
    """What some steps came to.

    Attributes:
        name: of the optimizer.
        values: of what is here of each parameter, after every step.
        state: shapes of the tensors kept for each parameter.
        beside: state that could not be put together from parts, "" for none.
        problem: what a step raised.
    """

    name: str = ""
    values: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, list[torch.Size]] = field(default_factory=dict)
    beside: str = ""
    problem: Exception | None = None


def _compare(
    model: nn.Module, make: MakeOptimizer, parts: Sequence[_Part], sizes: Sequence[float], holders: int
) -> None:
    if not parts or not any(parameter.requires_grad for parameter in model.parameters()):
        return
    first = _stand_ins(model, torch.Generator().manual_seed(0), holders)
    gradients = [_stand_ins(model, torch.Generator().manual_seed(1 + n), holders, size) for n, size in enumerate(sizes)]
    play = partial(_play, make, {n: p.requires_grad for n, p in model.named_parameters()}, [first, *gradients])
    with torch.random.fork_rng(devices=[]), WithoutRandomness(), unheard():
        whole = play(_Part(lambda _, value: value, "", ""))
        for part in parts:
            if whole.problem is not None:  # on whole parameters it fails as well, which the run will say
                return
            found = play(part)
            sentence = _difference(first, whole, found, part)
            # What gives other numbers each time (numbers not drawn by torch) cannot be compared.
            if sentence and not _furthest(first, whole, play(_Part(lambda _, value: value, "", "")), part):
                raise ConfigError(sentence) from found.problem


def _stand_ins(model: nn.Module, draw: torch.Generator, holders: int = 1, size: float = 0.5) -> dict[str, Tensor]:
    """Return random tensors in double precision for a model's parameters: as they are if small, else cut down along each dim.

    A length that is cut down leaves what it left when it is shared by so many `holders`: what torch does to uneven parts is
    seen only in uneven ones.
    """
    named = dict(model.named_parameters())

    def shape(parameter: Tensor, longest: int) -> list[int]:
        return [n if n <= longest else longest - (longest - n) % holders for n in parameter.shape]

    longest, least = 1024, 8 * holders
    while longest > least and sum(math.prod(shape(p, longest)) for p in named.values()) > _MOST_ELEMENTS:
        longest //= 2
    return {
        name: (size * torch.randn(shape(p, longest), generator=draw, dtype=_double(p.dtype))).to(p.device)
        for name, p in named.items()
    }


def _double(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _play(
    make: MakeOptimizer, trained: Mapping[str, bool], numbers: Sequence[Mapping[str, Tensor]], part: _Part
) -> _Played:
    """Make an optimizer of a worker's part of the first numbers, and take a step with each of the others as gradients."""
    played = _Played()
    with torch.no_grad():
        held = [{n: one for n, v in each.items() if (one := part.cut(n, v)) is not None} for each in numbers]
    named = {n: nn.Parameter(value.clone(), trained[n]) for n, value in held[0].items()}
    try:
        optimizer = make(named)
    except Exception as problem:  # an optimizer of the user's may raise anything
        played.problem = problem
        return played
    played.name = _label(optimizer)
    try:
        if part.owned is not None:
            keep_owned(optimizer, {id(named[name]) for name in part.owned})
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), float | int) and not group["lr"]:
                group["lr"] = 0.01  # a schedule may begin at 0, and nothing would move
        for gradients in held[1:]:
            for name, parameter in named.items():
                parameter.grad = gradients[name].clone() if trained[name] else None
            take_step(optimizer)
            played.values.append({name: local_part(named[name]).clone() for name in _stepped(part, named)})
    except Exception as problem:  # an optimizer of the user's may raise anything
        played.problem = problem
        return played
    _note_state(played, optimizer, {id(parameter): name for name, parameter in named.items()}, part)
    return played


def _note_state(played: _Played, optimizer: Optimizer, names: Mapping[int, str], part: _Part) -> None:
    for key, state in optimizer.state.items():
        if name := names.get(id(key), ""):
            tensors = [value for value in state.values() if isinstance(value, Tensor)]
            played.state[name] = [t.shape for t in tensors if t.numel() > 1 and t.shape != key.shape]
            inside = [k for k, one in state.items() if not isinstance(one, Tensor) and list(leaves(one))]
            if inside and part.is_cut:
                played.beside = (
                    f"tensors inside a {type(state[inside[0]]).__name__} (self.state[parameter][{inside[0]!r}])"
                )
        else:
            played.beside = f"state that belongs to no parameter (self.state[{key!r}])"
    for group in optimizer.param_groups:
        for word, value in group.items():
            if word != "params" and any(tensor.numel() > 1 for tensor in leaves(value)):
                played.beside = f"tensors in its groups of parameters (group[{word!r}])"
    for word, other in vars(optimizer).items():
        if isinstance(other, Optimizer) and any(key not in optimizer.state for key in other.state):
            played.beside = f"state in another optimizer (self.{word})"
    if len(optimizer.state_dict()["param_groups"]) != len(optimizer.param_groups):
        played.beside = "groups of parameters that its state_dict() does not have under 'param_groups'"


def _stepped(part: _Part, named: Mapping[str, Tensor]) -> Collection[str]:
    """Return the names among `named`, of any shapes, on which this part's optimizer steps."""
    return named if part.owned is None else part.owned


def _label(optimizer: Optimizer) -> str:
    tables = (getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))
    return f"{type(optimizer).__name__}{' with its hooks' if any(tables) else ''}"


# ------------------------------------------------------------------------------------------------------------ comparing


def _difference(first: Mapping[str, Tensor], whole: _Played, found: _Played, part: _Part) -> str:
    """Return why an optimizer cannot be used on a part, "" where it can; `first` has the values before, of full shapes."""
    if found.problem is not None:
        if "empty parameter list" in str(found.problem):
            return (
                f"the optimizer steps on none of the parameters of some worker when it gets {part.what} ({found.problem}), and "
                "torch makes no optimizer without parameters. Use data mode, or give the optimizer by its name "
                "(optimizer='AdamW'), which gets all parameters and leaves frozen ones as they are"
            )
        lines = str(found.problem).splitlines() or [type(found.problem).__name__]
        why = textwrap.shorten(lines[0], 160, placeholder=" ...")
        return f"{whole.name} cannot step on {part.what} ({why}); use {part.way}"
    if found.beside:
        return (
            f"{found.name} keeps {found.beside}, and a checkpoint could not be put together from {part.what}: keep numbers in "
            "self.param_groups, and tensors as they are in self.state[parameter], or use data mode"
        )
    of_other_shape = next((name for name, shapes in found.state.items() if part.is_cut and shapes), "")
    name = of_other_shape or _furthest(first, whole, found, part)
    if not name:
        return ""
    how = (
        f"it keeps state of another shape than {name!r}, which cannot be put together from {part.what}"
        if of_other_shape
        else f"it gave {name!r} other numbers when it got {part.what}"
    )
    goes_by_one = hasattr(torch.optim, found.name)  # as all of torch's do, whatever chose their groups
    if goes_by_one and not part.is_cut and part.owned is None:
        return (
            f"the function that makes {found.name} goes by the place of a parameter among the others, or by their number (a "
            f"learning rate for each layer, say): tried on small stand-ins, {how}. Let it go by the names, or use data mode"
        )
    if goes_by_one and part.is_cut and first[name].is_complex():
        return _FOR_PAIRS.format(found.name, name, how)
    clip = "; to clip, max_grad_norm= (--clip) counts all gradients in every mode" if "hooks" in whole.name else ""
    return (
        f"{found.name} looks at whole parameters, or at several at once: tried on small stand-ins, {how}. "
        f"Use {part.way}{clip}"
    )


def _furthest(first: Mapping[str, Tensor], whole: _Played, found: _Played, part: _Part) -> str:
    """Return the first parameter that is updated otherwise than in `whole`, ""; `first` has the values before, of full shapes."""
    for after, here in zip(whole.values, found.values, strict=False):
        for name, value in here.items():
            wanted, before = part.cut(name, after[name]), part.cut(name, first[name])
            if wanted is None or before is None or not wanted.numel() or not value.numel():
                continue
            wanted, before = local_part(wanted), local_part(before)
            if wanted.shape != value.shape:  # of two runs of whole parameters the same part is compared
                own = part.cut(name, value)
                value = value if own is None else local_part(own)
            update, gap = float((wanted - before).abs().max()), float((wanted - value).abs().max())
            if not gap <= _ROUNDING * update + 1e-13 and math.isfinite(update):
                return name
    return ""
