"""Each collective as what goes out, what comes in, and what to do at the end.

Knows torch's tensors and which bytes belong to which rank; knows nothing of sequences or connections. Every function
returns an operation that a `GroupMember` can start, the tensors it writes, and the bytes that stand for them.

In all of them:
    place: of this rank.
    tensor, output: of any shape and any dtype of `guava_nb.hub.typed_reduce`; the caller's memory, in use until it ends.
    inputs, outputs: one tensor for each rank, or one tensor with an equal part for each, in the order of ranks.
    result: what the work's future resolves to.
    reduction: a name of `guava_nb.hub.typed_reduce`, such as "sum".
    root, target: a rank of the group; `who` is its name in messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from guava_nb.backend.operation import Bytes, Operation, Part, Slot
from guava_nb.backend.staging import Staged
from guava_nb.errors import CollectiveError
from guava_nb.hub.typed_reduce import dtype_name
from guava_nb.protocol.messages import CallSpec

__all__ = ["Place", "Prepared", "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "receive"]
__all__ += ["reduce", "reduce_scatter", "scatter", "send", "single_slices"]

SUM_OF_HUB = -1
EVERYONE = -1


@dataclass(frozen=True)
class Place:
    """Where this rank stands, and how patient it is.

    Attributes:
        rank, size: in the group, and of it.
        timeout_s: of each operation.
    """

    rank: int
    size: int
    timeout_s: float


@dataclass
class Prepared:
    """A collective ready to start.

    Attributes:
        operation: for `GroupMember.start`.
        outputs: what the work's future resolves to.
        reads: bytes that go out.
        writes: bytes that land in a tensor at the end.
    """

    operation: Operation
    outputs: list[Any]
    reads: list[Staged] = field(default_factory=list)
    writes: list[Staged] = field(default_factory=list)

    def finish_with(self, own: Sequence[tuple[Bytes, Bytes]] = ()) -> Prepared:
        """At the end: copy what stays on this rank (to, from), then let everything land."""

        def finish() -> None:
            for to, origin in own:
                np.copyto(to, origin)
            for staged in self.writes:
                staged.land()

        if own or self.writes:
            self.operation.finish = finish
        return self


def _same_dtype(what: str, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise CollectiveError(f"{what}: tensors of one call must have one type, not {sorted(map(str, dtypes))}")
    return dtypes.pop()


def _slot(staged: Staged | Bytes, dtype: torch.dtype) -> Slot:
    data = staged.data if isinstance(staged, Staged) else staged
    return Slot(data, dtype_name(dtype), dtype.itemsize)


def _fits(what: str, sizes: Sequence[int], wanted: int, meaning: str) -> None:
    if any(size != wanted for size in sizes):
        raise CollectiveError(f"{what}: {list(sizes)[:8]} elements where {wanted} were expected: {meaning}")


def _check_root(what: str, place: Place, root: int) -> None:
    if not 0 <= root < place.size:
        raise CollectiveError(f"{what}: root {root} is no rank of this group, whose ranks are 0 to {place.size - 1}")


def barrier(place: Place, what: str = "barrier") -> Prepared:
    """Wait for each other."""
    operation = Operation(what, CallSpec(what), place.timeout_s, reduce="sum")
    nothing = np.empty(0, np.uint8)
    operation.parts = [Part(EVERYONE, nothing, 1)]
    operation.add_slot(SUM_OF_HUB, Slot(nothing, "uint8", 1))
    return Prepared(operation, [])


def all_reduce(place: Place, tensor: torch.Tensor, reduction: str) -> Prepared:
    """Reduce in place, everywhere. What comes back shows that the hub has what went out: nothing is copied for that."""
    staged = Staged(tensor, read=True, write=True)
    spec = CallSpec("all_reduce", reduction, dtype_name(tensor.dtype), (tensor.numel(),))
    operation = Operation("all_reduce", spec, place.timeout_s, reduce=reduction)
    operation.parts = [Part(EVERYONE, staged.data, tensor.dtype.itemsize)]
    operation.add_slot(SUM_OF_HUB, _slot(staged, tensor.dtype))
    return Prepared(operation, [tensor], [staged], [staged]).finish_with()


def reduce(place: Place, tensor: torch.Tensor, reduction: str, root: int) -> Prepared:
    """Reduce in place on the root; the others keep what they have."""
    _check_root("reduce", place, root)
    here = place.rank == root
    staged = Staged(tensor, read=True, write=here)
    spec = CallSpec("reduce", reduction, dtype_name(tensor.dtype), (tensor.numel(),), root)
    operation = Operation("reduce", spec, place.timeout_s, reduce=reduction)
    operation.parts = [Part(root, staged.data, tensor.dtype.itemsize)]
    if here:
        operation.add_slot(SUM_OF_HUB, _slot(staged, tensor.dtype))
        return Prepared(operation, [tensor], [staged], [staged]).finish_with()
    return _outgoing(operation, [tensor], [staged])


def _outgoing(operation: Operation, outputs: list[Any], reads: list[Staged]) -> Prepared:
    """The caller's memory goes out and nothing that comes back proves that it is out: copy it or have it confirmed."""
    shared = [staged.snapshot() for staged in reads]
    for part, staged in zip(operation.parts, reads, strict=False):
        part.data = staged.data
    if any(shared):
        operation.await_confirmation()
    return Prepared(operation, outputs, reads)


def broadcast(place: Place, tensor: torch.Tensor, root: int) -> Prepared:
    """The root's content, everywhere."""
    _check_root("broadcast", place, root)
    spec = CallSpec("broadcast", "", dtype_name(tensor.dtype), (tensor.numel(),), root)
    operation = Operation("broadcast", spec, place.timeout_s)
    if place.rank == root:
        staged = Staged(tensor, read=True, write=False)
        operation.parts = [Part(EVERYONE, staged.data, tensor.dtype.itemsize)]
        return _outgoing(operation, [tensor], [staged])
    staged = Staged(tensor, read=False, write=True)
    operation.add_slot(root, _slot(staged, tensor.dtype))
    return Prepared(operation, [tensor], [], [staged]).finish_with()


def single_slices(what: str, data: Bytes, size: int) -> list[Bytes]:
    """Cut one flat tensor's bytes into as many equal parts as there are ranks."""
    if data.nbytes % size:
        raise CollectiveError(f"{what}: {data.nbytes} bytes do not divide into {size} equal parts, one per rank")
    step = data.nbytes // size
    return [data[index * step : (index + 1) * step] for index in range(size)]


def all_gather(
    place: Place, outputs: Sequence[torch.Tensor] | torch.Tensor, tensor: torch.Tensor, result: list[Any]
) -> Prepared:
    """Everyone's tensor, everywhere: into a list, or into one tensor's equal parts."""
    what, dtype = "all_gather", tensor.dtype
    source = Staged(tensor, read=True, write=False)
    if isinstance(outputs, torch.Tensor):
        _same_dtype(what, [outputs, tensor])
        _fits(what, [outputs.numel()], tensor.numel() * place.size, "the output holds every rank's input")
        writes = [Staged(outputs, read=False, write=True)]
        places = single_slices(what, writes[0].data, place.size)
    else:
        _fits(what, [len(outputs)], place.size, "one output per rank")
        _same_dtype(what, [*outputs, tensor])
        writes = [Staged(output, read=False, write=True) for output in outputs]
        places = [staged.data for staged in writes]
    _fits(what, [places[place.rank].nbytes], source.data.nbytes, "bytes of this rank's own output and input")
    counts = tuple(data.nbytes // dtype.itemsize for data in places)
    operation = Operation(what, CallSpec(what, "", dtype_name(dtype), _short(counts)), place.timeout_s)
    operation.parts = [Part(EVERYONE, source.data, dtype.itemsize)]
    _outgoing(operation, result, [source])
    for rank, data in enumerate(places):
        if rank != place.rank:
            operation.add_slot(rank, _slot(data, dtype))
    return Prepared(operation, result, [source], writes).finish_with([(places[place.rank], source.data)])


def _short(counts: tuple[int, ...]) -> tuple[int, ...]:
    return counts[:1] if len(set(counts)) == 1 else counts


def gather(place: Place, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Prepared:
    """Everyone's tensor, on the root."""
    _check_root("gather", place, root)
    what, dtype = "gather", tensor.dtype
    source = Staged(tensor, read=True, write=False)
    operation = Operation(what, CallSpec(what, "", dtype_name(dtype), (tensor.numel(),), root), place.timeout_s)
    if place.rank != root:
        operation.parts = [Part(root, source.data, dtype.itemsize)]
        return _outgoing(operation, [], [source])
    _fits(what, [len(outputs)], place.size, "one output per rank")
    _same_dtype(what, [*outputs, tensor])
    _fits(what, [output.numel() for output in outputs], tensor.numel(), "outputs are as large as the input")
    writes = [Staged(output, read=False, write=True) for output in outputs]
    for rank, staged in enumerate(writes):
        if rank != root:
            operation.add_slot(rank, _slot(staged, dtype))
    return Prepared(operation, list(outputs), [source], writes).finish_with([(writes[root].data, source.data)])


def scatter(place: Place, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Prepared:
    """One tensor of the root's list for each rank."""
    _check_root("scatter", place, root)
    what, dtype = "scatter", output.dtype
    target = Staged(output, read=False, write=True)
    operation = Operation(what, CallSpec(what, "", dtype_name(dtype), (output.numel(),), root), place.timeout_s)
    if place.rank != root:
        operation.add_slot(root, _slot(target, dtype))
        return Prepared(operation, [output], [], [target]).finish_with()
    _fits(what, [len(inputs)], place.size, "one input per rank")
    _same_dtype(what, [*inputs, output])
    _fits(what, [one.numel() for one in inputs], output.numel(), "inputs are as large as the output")
    reads = [Staged(one, read=True, write=False) for one in inputs]
    return _send_to_each(place, operation, [staged.data for staged in reads], reads, target.data, target, [output])


def _send_to_each(
    place: Place,
    operation: Operation,
    outgoing: Sequence[Bytes],
    reads: list[Staged],
    own: Bytes,
    target: Staged | Sequence[Staged],
    outputs: list[Any],
) -> Prepared:
    """A part of its own for each rank; this rank's is copied. Large memory of the caller's is confirmed, small copied."""
    item = outputs[0].dtype.itemsize if outputs else 1
    small = sum(data.nbytes for data in outgoing) <= _SNAPSHOT_ALL_BYTES
    shared = any(staged.shared for staged in reads)
    parts = [data.copy() if small and shared else data for data in outgoing]
    operation.parts = [Part(rank, data, item) for rank, data in enumerate(parts) if rank != place.rank]
    if shared and not small and operation.parts:
        operation.await_confirmation()
    writes = [target] if isinstance(target, Staged) else list(target)
    return Prepared(operation, outputs, reads, writes).finish_with([(own, parts[place.rank])])


_SNAPSHOT_ALL_BYTES = 256 << 10


def reduce_scatter(
    place: Place,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor] | torch.Tensor,
    reduction: str,
) -> Prepared:
    """Reduce a list, or one tensor's equal parts, and give each rank one of the results."""
    what, dtype = "reduce_scatter", output.dtype
    if isinstance(inputs, torch.Tensor):
        _same_dtype(what, [output, inputs])
        _fits(what, [inputs.numel()], output.numel() * place.size, "the input holds one output per rank")
        reads = [Staged(inputs, read=True, write=False)]
        outgoing = single_slices(what, reads[0].data, place.size)
    else:
        _fits(what, [len(inputs)], place.size, "one input per rank")
        _same_dtype(what, [*inputs, output])
        reads = [Staged(one, read=True, write=False) for one in inputs]
        outgoing = [staged.data for staged in reads]
    counts = tuple(data.nbytes // dtype.itemsize for data in outgoing)
    _fits(what, [counts[place.rank]], output.numel(), "this rank's input is as large as its output")
    spec = CallSpec(what, reduction, dtype_name(dtype), _short(counts))
    operation = Operation(what, spec, place.timeout_s, reduce=reduction)
    target = Staged(output, read=False, write=True)
    small = sum(data.nbytes for data in outgoing) <= _SNAPSHOT_ALL_BYTES
    shared = any(staged.shared for staged in reads)
    parts = [data.copy() if small and shared else data for data in outgoing]
    operation.parts = [Part(rank, data, dtype.itemsize) for rank, data in enumerate(parts)]
    operation.add_slot(SUM_OF_HUB, _slot(target, dtype))
    if shared and not small:
        operation.await_confirmation()
    return Prepared(operation, [output], reads, [target]).finish_with()


def all_to_all(
    place: Place,
    outputs: Sequence[torch.Tensor] | tuple[torch.Tensor, Sequence[int]],
    inputs: Sequence[torch.Tensor] | tuple[torch.Tensor, Sequence[int]],
    result: list[Any],
    dtype: torch.dtype,
) -> Prepared:
    """A tensor from each to each: lists, or single tensors with the rows for each rank."""
    what = "all_to_all"
    reads, outgoing = _cut(what, inputs, place.size, read=True)
    writes, places = _cut(what, outputs, place.size, read=False)
    _fits(what, [places[place.rank].nbytes], outgoing[place.rank].nbytes, "bytes of this rank's part for itself")
    operation = Operation(what, CallSpec(what, "", dtype_name(dtype)), place.timeout_s)
    prepared = _send_to_each(place, operation, outgoing, reads, places[place.rank], writes, [writes[0].tensor])
    for rank, data in enumerate(places):
        if rank != place.rank:
            operation.add_slot(rank, _slot(data, dtype))
    prepared.outputs = result
    return prepared


def _cut(what: str, tensors: Any, size: int, *, read: bool) -> tuple[list[Staged], list[Bytes]]:
    """Bytes per rank of a list of tensors, or of one tensor cut along its first axis."""
    if not isinstance(tensors, tuple):
        _fits(what, [len(tensors)], size, "one tensor per rank")
        _same_dtype(what, tensors)
        many = [Staged(one, read=read, write=not read) for one in tensors]
        return many, [staged.data for staged in many]
    tensor, rows = tensors
    staged = Staged(tensor, read=read, write=not read)
    if not rows:
        return [staged], single_slices(what, staged.data, size)
    _fits(what, [len(rows)], size, "one split size per rank")
    total = tensor.size(0) if tensor.dim() else 0
    _fits(what, [sum(rows)], total, "split sizes add up to the first axis")
    row_bytes = staged.data.nbytes // total if total else 0
    edges = np.cumsum([0, *rows]) * row_bytes
    return [staged], [staged.data[edges[rank] : edges[rank + 1]] for rank in range(size)]


def send(place: Place, tensor: torch.Tensor, target: int, who: str) -> Prepared:
    """To one rank; done when the memory may be used again."""
    staged = Staged(tensor, read=True, write=False)
    operation = Operation(f"the hub to take what goes to {who}", None, place.timeout_s)
    operation.parts = [Part(target, staged.data, tensor.dtype.itemsize)]
    return _outgoing(operation, [tensor], [staged])


def receive(place: Place, tensor: torch.Tensor, who: str, tag: int) -> tuple[Prepared, Slot]:
    """From one rank, or from any; the slot is for `GroupMember.receive`."""
    staged = Staged(tensor, read=False, write=True)
    operation = Operation(f"{who} to send (tag {tag})", None, place.timeout_s)
    return Prepared(operation, [tensor], [], [staged]).finish_with(), _slot(staged, tensor.dtype)
