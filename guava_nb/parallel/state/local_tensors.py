"""What one rank holds of the full model: tensors by their full names, and where each lies in its full tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import CheckpointError
from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.state.full_state import (
    FullOrder,
    StatePiece,
    load_optimizer,
    load_tensor,
    local_part,
    optimizer_pieces,
    pieces_of,
)
from guava_nb.parallel.state.shard_layout import Layout, chunk_bounds
from guava_nb.parallel.unloaded import is_dtensor

__all__ = ["LocalTensors", "full_names_of", "hold", "layouts_in", "tensors_of"]


def full_names_of(model: nn.Module) -> dict[str, str]:
    """Return the names of a whole model's tensors: each is its own full name."""
    return {name: name for name in tensors_of(model)}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, each of its local shape, by name, tied ones under each of their names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


@dataclass(slots=True)
class LocalTensors:
    """Parameters and buffers of this rank.

    Attributes:
        named: parameters by full name, in the full model's order; a tied one stands once.
        tensors: all parameters and buffers by full name, tied ones under each of their names.
        layouts: which part of the full tensor each is.
        order: orders of the full model.
        axes: this rank's place.
        replica: 0 where each replica holds the whole state and speaks for itself, else the number of this rank's.
    """

    named: dict[str, nn.Parameter]
    tensors: dict[str, Tensor]
    layouts: dict[str, Layout]
    order: FullOrder
    axes: MeshAxes
    replica: int

    def pieces(self) -> list[StatePiece]:
        """Return this rank's share of the full model's state."""
        held = ((index, key) for index, key in enumerate(self.order.keys) if key in self.tensors)
        return [
            piece
            for index, key in held
            if self.layouts[key].counted(self.replica, self.axes.tp)
            for piece in pieces_of(key, self.tensors[key], self.layouts[key], index)
        ]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a full model's state.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        for key in self.order.keys:
            if key not in self.tensors:
                continue
            if key not in state:
                raise CheckpointError(f"the state has no {key!r}, which this model needs")
            load_tensor(key, self.tensors[key], state[key], self.layouts[key])

    def optimizer_pieces(
        self, optimizer: Optimizer, members: Sequence[Sequence[str]], owned: bool = False
    ) -> dict[str, Any]:
        """Return this rank's share of the optimizer's state.

        Args:
            optimizer: the local one.
            members: full names of each of its groups.
            owned: ZeRO 1: one replica alone has a parameter's state, whichever it is.
        """
        replica = 0 if owned else self.replica

        def counts(name: str) -> bool:
            return self.layouts[name].counted(replica, self.axes.tp)

        return optimizer_pieces(optimizer, self._names(), members, self.layouts, self.order, counts)

    def load_optimizer(self, optimizer: Optimizer, members: Sequence[Sequence[str]], state: Mapping[str, Any]) -> None:
        """Take this rank's part of a full optimizer's state.

        Raises:
            CheckpointError: it belongs to other parameter groups.
        """
        load_optimizer(optimizer, self._names(), members, self.layouts, self.order, state)

    def members(self, optimizer: Optimizer) -> list[list[str]]:
        """Return the full names of each of an optimizer's groups."""
        names = self._names()
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.named.items()}


def hold(
    module: nn.Module, full_names: Mapping[str, str], order: FullOrder, axes: MeshAxes, replica: int
) -> LocalTensors:
    """Look at a module after all spreading, and before its first forward.

    Args:
        module: the local module. Layers that hold a part say so in an attribute `layouts`: own tensor name to layout.
        full_names: local to full name of every parameter and buffer, tied ones included.
        order: orders of the full model.
        axes: this rank's place.
        replica: as of `LocalTensors`.
    """
    tensors = {full_names[name]: tensor for name, tensor in tensors_of(module).items()}
    layouts = {full_names[name]: layout for name, layout in layouts_in(module, axes).items()}
    by_order = {key: number for number, key in enumerate(order.keys)}
    names = sorted(tensors, key=lambda name: by_order.get(name, len(by_order)))
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name in names:
        tensor = tensors[name]
        if isinstance(tensor, nn.Parameter) and id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor
    return LocalTensors(named, tensors, layouts, order, axes, replica)


def layouts_in(module: nn.Module, axes: MeshAxes) -> dict[str, Layout]:
    """Return which part of its full tensor each tensor of a module is, by local name."""
    found: dict[str, Layout] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        own: Mapping[str, Layout] = part.__dict__.get("layouts", {})
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}".lstrip(".")] = _layout(tensor, own.get(name), axes)
    return found


def _layout(tensor: Tensor, known: Layout | None, axes: MeshAxes) -> Layout:
    """Return where a tensor lies in the full one; of a DTensor `[N, ...]` this rank has the rows of its replica."""
    layout = known or Layout.whole(tensor.shape)
    if is_dtensor(tensor):
        start, end = chunk_bounds(tensor.shape[0], axes.sizes.data, axes.dp)
        layout = layout.rows(start, end)
    assert tuple(local_part(tensor).shape) == layout.local, (tuple(tensor.shape), layout)
    return layout
