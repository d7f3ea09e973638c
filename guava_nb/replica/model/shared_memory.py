"""Tensors of a model that overlap in memory and are not one tensor.

In one process a change of one is a change of the other. What copies, shares out or sends them one by one loses that; what
goes by objects, as torch's own tying of parameters does, keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from guava_nb.errors import ConfigError

__all__ = ["overlaps", "refuse_overlaps"]


def overlaps(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the first names of each two parameters or buffers that have memory in common which training changes.

    Tensors that lie beside each other in one storage have none in common, and a tensor under several names is one tensor.
    Tables that are only read may overlap as they like: one of the two is a parameter that takes a gradient.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        is_plain = (
            not isinstance(tensor, UninitializedBuffer | UninitializedParameter) and tensor.layout is torch.strided
        )
        if is_plain and tensor.device.type != "meta" and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for found in by_storage.values():
        for place, (name, tensor) in enumerate(found):
            for other_name, other in found[place + 1 :]:
                if (tensor.requires_grad or other.requires_grad) and _overlap(tensor, other):
                    yield name, other_name


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two strided tensors of any shapes have memory in common."""
    (begin, end), (other_begin, other_end) = _reach(a), _reach(b)
    if end <= other_begin or other_end <= begin or a.dtype != b.dtype:
        return end > other_begin and other_end > begin
    # Columns of one matrix reach past each other and have nothing in common: look at each element.
    first = min(a.storage_offset(), b.storage_offset())
    taken = torch.zeros((max(end, other_end) - min(begin, other_begin)) // a.element_size(), dtype=torch.bool)
    views = [taken.as_strided(t.size(), t.stride(), t.storage_offset() - first) for t in (a, b)]
    views[0][...] = True
    return bool(views[1].any())


def _reach(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a strided tensor's first byte, whatever its shape, and of the first one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def refuse_overlaps(model: nn.Module, place: str) -> None:
    """Refuse a model with two tensors in the same memory.

    Args:
        model: as it is built.
        place: what would keep them apart, for the sentence.

    Raises:
        ConfigError: with both names.
    """
    for first, second in overlaps(model):
        parameters = dict(model.named_parameters())
        if second in parameters and parameters[first].shape == parameters[second].shape:
            way = "one parameter under both names is trained as one: assign it (layer.weight = other.weight), not its .data"
        else:
            way = "keep one of them, and make the other one of it in the forward"
        raise ConfigError(
            f"{first!r} and {second!r} of the model are two tensors in the same memory, so that a change of one "
            f"changes the other. In {place} they would become two copies that differ: {way}. Data mode trains them as they are"
        )
