"""From parts on many ranks to one plain full state, and back. Pure: no collectives, nothing is unpickled.

Every rank hands over its pieces, and the side that has all of them puts them together. The result is what plain PyTorch's
`state_dict()` of the whole model and its optimizer gives, so a checkpoint of one mode loads in any other and without
guava_nb. Two copies of an element never come: `Layout.counted` names the rank that speaks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import CheckpointError
from guava_nb.parallel.state.shard_layout import Layout
from guava_nb.parallel.unloaded import is_dtensor

__all__ = [
    "FullOrder",
    "StatePiece",
    "assemble",
    "assemble_optimizer",
    "load_optimizer",
    "load_tensor",
    "local_part",
    "optimizer_pieces",
    "pieces_of",
]


@dataclass(frozen=True, slots=True)
class StatePiece:
    """A box of one full tensor.

    Attributes:
        name: its key in the full state.
        tensor: the box, on the CPU.
        shape: sizes of the full tensor.
        offsets: where the box begins in it.
        index: place of the key in the full state dict.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class FullOrder:
    """Orders of the whole model, taken before it was spread.

    Attributes:
        keys: keys of `model.state_dict()`.
        groups: full parameter names of each group of the optimizer that the whole model gets.
    """

    keys: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> FullOrder:
        """Read it off a whole model and an optimizer of its parameters."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
        return cls(tuple(key for key, value in model.state_dict().items() if isinstance(value, Tensor)), groups)

    def numbers(self) -> dict[str, int]:
        """Return torch's number of each parameter in an optimizer's state dict."""
        names = [name for group in self.groups for name in group]
        return {name: number for number, name in enumerate(names)}


def local_part(tensor: Tensor) -> Tensor:
    """Return what of a tensor lies on this rank, without its graph: of a DTensor its shard `[n, ...]`, sharing its memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():  # then it gives what it holds; to detach a DTensor takes forty times as long
        return tensor.to_local().detach()


def pieces_of(name: str, tensor: Tensor, layout: Layout, index: int = 0) -> list[StatePiece]:
    """Cut this rank's part of a tensor into pieces on the CPU, copies of their own.

    Args:
        name: its key in the full state.
        tensor: of the layout's local shape, or a DTensor with such a part.
        layout: where the part lies in the full tensor.
        index: place of the key in the full state dict.
    """
    local = local_part(tensor)
    return [
        StatePiece(name, box.of_local(local).to("cpu", copy=True).contiguous(), layout.full, box.full, index)
        for box in layout.boxes
    ]


# ------------------------------------------------------------------------------------------------------------ together


def assemble(ranks: Iterable[Sequence[StatePiece]]) -> dict[str, Tensor]:
    """Put the pieces of all ranks together.

    Args:
        ranks: the pieces of each rank.

    Returns:
        The full tensors on the CPU, in the order of the full state dict.

    Raises:
        CheckpointError: pieces are missing, overlap in number, or disagree about a tensor's shape.
    """
    by_name: dict[str, list[StatePiece]] = {}
    for piece in (piece for pieces in ranks for piece in pieces):
        by_name.setdefault(piece.name, []).append(piece)
    ordered = sorted(by_name.values(), key=lambda pieces: pieces[0].index)
    return {pieces[0].name: _join(pieces) for pieces in ordered}


def _join(pieces: Sequence[StatePiece]) -> Tensor:
    """Return the full tensor of its pieces, `[*piece.shape]`; a single piece is it. Errors as of `assemble`."""
    first = pieces[0]
    here, wanted = sum(piece.tensor.numel() for piece in pieces), math.prod(first.shape)
    if any(piece.shape != first.shape for piece in pieces):
        shapes = sorted({piece.shape for piece in pieces})
        raise CheckpointError(f"{first.name!r} has shape {shapes[0]} on one worker and {shapes[1]} on another")
    if here != wanted:
        raise CheckpointError(
            f"{first.name!r} of shape {first.shape} has {wanted} elements, its {len(pieces)} pieces hold {here}; "
            "every worker must send its pieces of the same step exactly once"
        )
    if len(pieces) == 1:
        return first.tensor
    full = torch.empty(first.shape, dtype=first.tensor.dtype)
    for piece in pieces:
        view = full
        for dim, (start, length) in enumerate(zip(piece.offsets, piece.tensor.shape, strict=True)):
            view = view.narrow(dim, start, length)
        view.copy_(piece.tensor)
    return full


def assemble_optimizer(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put what `optimizer_pieces` gave on every rank into torch's format for the whole model's optimizer.

    Raises:
        CheckpointError: pieces are missing, or no rank holds a parameter of some group.
    """
    order = ranks[0]["order"]
    numbers = {name: number for number, name in enumerate(name for group in order for name in group)}
    state: dict[int, dict[str, Any]] = {}
    pieces: dict[str, list[StatePiece]] = {}
    for name, values in ((name, values) for rank in ranks for name, values in rank["state"].items()):
        entry = state.setdefault(numbers[name], {})
        for key, value in values.items():
            if isinstance(value, list) and all(
                isinstance(one, StatePiece) for one in value
            ):  # none, where a rank holds nothing
                pieces.setdefault(f"{name}/{key}", []).extend(value)
                value = f"{name}/{key}"
            entry.setdefault(key, value)
    full = assemble(list(pieces.values()))
    for entry in state.values():
        found = {key: value for key, value in entry.items() if isinstance(value, str) and value in pieces}
        entry.update(
            {key: full.get(value, []) for key, value in found.items()}
        )  # the user's own list may be empty, too
    groups = [_group_options(names, ranks, numbers) for names in order]
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _group_options(
    names: Sequence[str], ranks: Sequence[Mapping[str, Any]], numbers: Mapping[str, int]
) -> dict[str, Any]:
    wanted = set(names)
    for group in (group for rank in ranks for group in rank["groups"]):
        if wanted & set(group["names"]) or not wanted:
            options = {key: value for key, value in group.items() if key != "names"}
            return {**options, "params": [numbers[name] for name in names]}
    raise CheckpointError(f"no worker sent the optimizer's settings for {names[0]!r} and {len(names) - 1} more")


def optimizer_pieces(
    optimizer: Optimizer,
    names: Mapping[int, str],
    members: Sequence[Sequence[str]],
    layouts: Mapping[str, Layout],
    order: FullOrder,
    counts: Any,
) -> dict[str, Any]:
    """Return this rank's share of the optimizer's state, as plain data and pieces.

    Args:
        optimizer: the local one.
        names: full name of each local parameter, by its `id`.
        members: full names of the parameters in each of its groups.
        layouts: what is here of each parameter.
        order: orders of the whole model.
        counts: tells of a full name whether this rank speaks for its part.
    """
    groups = [
        {**{key: _plain(value) for key, value in group.items() if key != "params"}, "names": list(member)}
        for group, member in zip(optimizer.state_dict()["param_groups"], members, strict=True)
    ]
    state = {}
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        if counts(name):
            layout = layouts[name]
            entries = ((key, _entry(name, key, value, layout, parameter)) for key, value in values.items())
            state[name] = dict(entries)
    return {"order": [list(group) for group in order.groups], "groups": groups, "state": state}


def _entry(name: str, key: str, value: Any, layout: Layout, parameter: Tensor) -> Any:
    """Return one value of a parameter's optimizer state: pieces where it has the parameter's shape, else a copy on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if tuple(value.shape) == tuple(parameter.shape) and value.ndim:
        return pieces_of(f"{name}/{key}", value, layout)
    return local_part(value).to("cpu", copy=True)


def _plain(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


# ------------------------------------------------------------------------------------------------------------ and back


@torch.no_grad()
def load_tensor(name: str, into: Tensor, full: Tensor, layout: Layout) -> None:
    """Copy this rank's part of a full tensor into a local one.

    Args:
        name: for the error.
        into: of the layout's local shape, or a DTensor with such a part; written in place.
        full: of the layout's full shape.
        layout: where the part lies.

    Raises:
        CheckpointError: the full tensor has another shape than the model's.
    """
    if tuple(full.shape) != layout.full:
        raise CheckpointError(
            f"{name!r} has shape {tuple(full.shape)} in the state, and {layout.full} in the model: it is the state of another "
            "model"
        )
    local = local_part(into)
    for box in layout.boxes:
        box.of_local(local).copy_(box.of_full(full))


def load_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    members: Sequence[Sequence[str]],
    layouts: Mapping[str, Layout],
    order: FullOrder,
    full: Mapping[str, Any],
) -> None:
    """Load this rank's part of a whole optimizer's state; arguments as for `optimizer_pieces`.

    Raises:
        CheckpointError: the state belongs to other parameter groups.
    """
    saved = [len(group["params"]) for group in full["param_groups"]]
    mine = [len(group) for group in order.groups]
    if saved != mine:
        raise CheckpointError(
            f"the optimizer's state has groups of {saved} parameters, and this run's optimizer has {mine}: it is the state of "
            "another optimizer or model"
        )
    numbers = order.numbers()
    state, groups, at = {}, [], 0
    for group, member in zip(optimizer.param_groups, members, strict=True):
        for number, parameter in enumerate(group["params"], start=at):
            name = names[id(parameter)]
            values = full["state"].get(numbers[name], {})
            state[number] = {k: _local_entry(v, parameter, layouts[name]) for k, v in values.items()}
        options = _options_for(member, order, full)
        count = len(group["params"])
        groups.append({**options, "params": list(range(at, at + count))})
        at += count
    optimizer.load_state_dict({"state": {k: v for k, v in state.items() if v}, "param_groups": groups})


def _options_for(member: Sequence[str], order: FullOrder, full: Mapping[str, Any]) -> dict[str, Any]:
    wanted = set(member)
    for names, group in zip(order.groups, full["param_groups"], strict=True):
        if wanted & set(names) or (not wanted and not names):
            return {key: value for key, value in group.items() if key != "params"}
    return {key: value for key, value in full["param_groups"][0].items() if key != "params"}


def _local_entry(value: Any, parameter: Tensor, layout: Layout) -> Any:
    """Return this rank's part of one value of an optimizer's state: cut where it has the parameter's full shape, else a copy."""
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0 or tuple(value.shape) != layout.full:
        return value.clone()  # torch's optimizers count steps in place, and the state is the caller's
    local = layout.cut(value).to(parameter.device)
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor  # loaded with the parameter

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
