"""What passes between two stages: any nesting of tensors and plain values, described by a typed record.

torch's schedules want to know every tensor in advance, in one shape, and floating, because a gradient comes back for
each. So a value is taken apart into its tensors, and each becomes a flat tensor as long as the largest micro-batch
needs; what has no gradient travels as its bits. Records are msgpack with a fixed schema; nothing is pickled.

Shapes: a tensor of a record has any shape; its flat form is [L], where L is its slot's length, as large as the largest
micro-batch needs. Float tensors travel in their own dtype (complex as pairs of reals), all others as bits in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from guava_nb.errors import CollectiveError, ConfigError
from guava_nb.parallel.pipeline.boundary_wire import from_words, is_shorter, to_words, words_of
from guava_nb.wire_formats.wire_format import WireFormat

__all__ = [
    "Boundary",
    "Slot",
    "TensorSpec",
    "decode",
    "encode",
    "pack",
    "put_together",
    "slots_of",
    "take_apart",
    "unpack",
]

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_WITH_GRADIENT = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_MOST_DIMENSIONS = 64


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a boundary.

    Attributes:
        dtype: its name in torch.
        shape: sizes.
        gradient: whether a gradient comes back for it.
        from_parameters: its values depend on parameters, so a wire format may round them, and their gradient as well.
    """

    dtype: str
    shape: tuple[int, ...]
    gradient: bool
    from_parameters: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return _DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Boundary(msgspec.Struct, frozen=True, array_like=True):
    """The record of a value that leaves a stage.

    Attributes:
        tree: nested lists that begin with a kind: where the tensors stand, and all that is no tensor.
        tensors: in the order in which the tree names them.
    """

    tree: Any
    tensors: tuple[TensorSpec, ...]


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """A flat tensor that travels.

    Attributes:
        dtype: its dtype's name.
        length: elements.
        gradient: whether a gradient of the same length comes back.
    """

    dtype: str
    length: int
    gradient: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        return _DTYPES[self.dtype]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Boundary)


def encode(boundary: Boundary) -> bytes:
    """Return the record as bytes."""
    return _encoder.encode(boundary)


def decode(data: bytes) -> Boundary:
    """Read a record.

    Raises:
        CollectiveError: the bytes are none, or ask for something impossible.
    """
    try:
        boundary = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CollectiveError(f"the stage before sent {len(data)} bytes that are no description of tensors") from error
    for spec in boundary.tensors:
        if spec.dtype not in _DTYPES or len(spec.shape) > _MOST_DIMENSIONS or any(size < 0 for size in spec.shape):
            raise CollectiveError(f"the stage before announced a tensor {spec.dtype} of shape {spec.shape}")
    return boundary


# --------------------------------------------------------------------------------------------- apart and together again


def take_apart(value: Any, gradient: bool) -> tuple[Boundary, list[Tensor]]:
    """Return the record of a value and its tensors.

    Args:
        value: any nesting of tuple, list, dict, tensors and plain values.
        gradient: whether gradients come back for tensors that can have one.

    Which tensors depend on parameters is known inside `showing_dependence` only.

    Raises:
        ConfigError: something in it cannot pass between stages.
    """
    tensors: list[Tensor] = []
    tree = _tree(value, tensors)
    specs = tuple(
        TensorSpec(
            str(t.dtype).removeprefix("torch."), tuple(t.shape), gradient and t.dtype in _WITH_GRADIENT, t.requires_grad
        )
        for t in tensors
    )
    return Boundary(tree, specs), tensors


def _tree(value: Any, tensors: list[Tensor]) -> list[Any]:
    """Return the nested lists of a record, each with its kind first; tensors, of any shape, are added to `tensors`, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor"]
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    if isinstance(value, torch.Size):
        return ["size", list(value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device"]  # the receiving stage's own
    if isinstance(value, slice):
        return ["slice", [_tree(part, tensors) for part in (value.start, value.stop, value.step)]]
    if type(value) is tuple or type(value) is list:
        return [type(value).__name__, [_tree(child, tensors) for child in value]]
    if type(value) is dict and all(isinstance(key, str | int) for key in value):
        return ["dict", list(value), [_tree(child, tensors) for child in value.values()]]
    raise ConfigError(
        f"a {type(value).__name__} would pass from one pipeline stage to the next; tensors and plain values in tuple, "
        "list or dict can. Return one of these from the module before the cut, or cut elsewhere (pipeline_split=, --split)"
    )


def put_together(boundary: Boundary, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Return the value of a record; a device in it becomes this stage's.

    Args:
        boundary: the record.
        tensors: in its order, each of the shape that the record names.
        device: of this stage: the tensors are moved there.
    """
    return _value(boundary.tree, iter(tensors), device)


def _value(tree: Any, tensors: Iterator[Tensor], device: torch.device) -> Any:
    """Return the value of nested lists; takes the tensors in order, each of any shape and moved to the device."""
    match tree:
        case ["tensor"]:
            return next(tensors)
        case ["plain", plain]:
            return plain
        case ["size", [*sizes]]:
            return torch.Size(sizes)
        case ["dtype", str(name)] if name in _DTYPES:
            return _DTYPES[name]
        case ["device"]:
            return device
        case ["slice", [start, stop, step]]:
            return slice(*(_value(part, tensors, device) for part in (start, stop, step)))
        case ["tuple", [*children]]:
            return tuple(_value(child, tensors, device) for child in children)
        case ["list", [*children]]:
            return [_value(child, tensors, device) for child in children]
        case ["dict", [*keys], [*children]] if len(keys) == len(children):
            return {key: _value(child, tensors, device) for key, child in zip(keys, children, strict=True)}
    raise CollectiveError(f"the stage before sent a value of an unknown kind: {str(tree)[:80]}")


# ----------------------------------------------------------------------------------------------------------- flat tensors


def _numel(spec: TensorSpec) -> int:
    """Real numbers of a tensor."""
    return spec.numel * (2 if spec.torch_dtype.is_complex else 1)


def _is_shortened(spec: TensorSpec, wire: WireFormat) -> bool:
    return spec.from_parameters and is_shorter(wire, spec.torch_dtype.to_real())


def _slot(spec: TensorSpec, wire: WireFormat) -> Slot:
    dtype = spec.torch_dtype
    if _is_shortened(spec, wire):
        return Slot("float32", max(1, words_of(wire, _numel(spec))), spec.gradient)
    if not spec.gradient:
        return Slot("float32", max(1, -(-spec.numel * dtype.itemsize // 4)), False)
    return Slot(str(dtype.to_real()).removeprefix("torch."), max(1, _numel(spec)), True)


def slots_of(boundaries: Sequence[Boundary], wire: WireFormat) -> tuple[Slot, ...]:
    """Return the flat tensors in which any of some values fits, in a wire format: those of micro-batches of unlike sizes.

    Raises:
        ConfigError: the values differ in more than the sizes of their tensors.
    """
    first = boundaries[0]
    kinds = [(spec.dtype, spec.gradient, spec.from_parameters) for spec in first.tensors]
    for other in boundaries[1:]:
        if [(spec.dtype, spec.gradient, spec.from_parameters) for spec in other.tensors] != kinds:
            raise ConfigError(
                "a stage returns other tensors for a micro-batch of one row more; give micro_batches (--micro-batches) that "
                "divide the batch"
            )
    rows = zip(*([_slot(spec, wire) for spec in boundary.tensors] for boundary in boundaries), strict=True)
    return tuple(Slot(row[0].dtype, max(slot.length for slot in row), row[0].gradient) for row in rows)


def pack(
    tensors: Sequence[Tensor], boundary: Boundary, slots: Sequence[Slot], device: torch.device, wire: WireFormat
) -> list[Tensor]:
    """Return each tensor as a flat one of its slot's length, `[L]`; those with a gradient stay in the graph.

    Args:
        tensors, boundary: as `take_apart` gives them.
        slots: one a tensor, at least as long as it needs.
        device: where they are to lie.
        wire: how those that it shortens travel.
    """
    return [
        _flat(tensor.to(device), spec, slot, wire)
        for tensor, spec, slot in zip(tensors, boundary.tensors, slots, strict=True)
    ]


def _flat(tensor: Tensor, spec: TensorSpec, slot: Slot, wire: WireFormat) -> Tensor:
    """Return one tensor as `[L]` of the slot's dtype, zeros behind its elements; without a gradient as a copy of its bits."""
    if spec.gradient or _is_shortened(spec, wire):
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        flat = real.reshape(-1).contiguous()  # an expanded tensor flattens to one that no backend sends
        if _is_shortened(spec, wire):
            return to_words(flat, wire, slot.length)
        return functional.pad(flat, (0, slot.length - flat.numel())) if flat.numel() < slot.length else flat
    # A buffer of its own: only that is sure to be aligned for another dtype.
    bits = torch.zeros(slot.length * 4, dtype=torch.uint8, device=tensor.device)
    if spec.numel:  # copied, not viewed: a tensor of one element may have any stride and still counts as contiguous
        bits[: spec.numel * tensor.element_size()].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bits.view(torch.float32)


def unpack(flats: Sequence[Tensor], boundary: Boundary, wire: WireFormat) -> list[Tensor]:
    """Return the tensors of a record, each of its own shape, from their flat form `[L]`."""
    return [_shaped(flat, spec, wire) for flat, spec in zip(flats, boundary.tensors, strict=True)]


def _shaped(flat: Tensor, spec: TensorSpec, wire: WireFormat) -> Tensor:
    """Return one tensor of the record's shape and dtype; with a gradient in full a view of `flat`, else a copy."""
    dtype = spec.torch_dtype
    if _is_shortened(spec, wire):
        flat = from_words(flat, wire, _numel(spec), dtype.to_real())
    elif not spec.gradient:
        raw = flat.detach().view(torch.uint8)[: spec.numel * dtype.itemsize]
        return raw.clone().view(dtype).view(spec.shape)
    if dtype.is_complex:
        return torch.view_as_complex(flat[: spec.numel * 2].view(*spec.shape, 2))
    return flat.view(spec.shape) if flat.numel() == spec.numel else flat[: spec.numel].view(spec.shape)
