"""A model's buckets as records that are the same on every machine.

Knows names, shapes and dtypes of parameters and buffers; knows no gradients and no network. A bucket holds one wire
dtype. Half-precision parameters travel as float32, so that sums do not overflow or round in half precision; all others
travel as they are. A bucket's tensor is flat, `[numel]`, in its wire dtype: its parameters one after another, each in
row-major order. The run's wire format may make gradients and their sums shorter on the way (`BucketWire`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from guava_nb.data.codec import dtype_name, tensor_bytes, tensor_from
from guava_nb.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from guava_nb.outer_methods.outer_methods import OUTER_METHODS, sparse_format
from guava_nb.parallel.replicas.bucketing import plan_buckets, wire_dtype
from guava_nb.parallel.replicas.buffer_policy import followed_parameters
from guava_nb.protocol.messages import FlatTensor, ParameterBucket, RunSpec, SumBucket
from guava_nb.wire_formats.error_feedback import ErrorFeedback
from guava_nb.wire_formats.message_sum import mean_of_senders, sum_of_messages
from guava_nb.wire_formats.registry import WIRE_FORMATS
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import WireFormat

__all__ = [
    "BUFFERS",
    "Bucket",
    "BucketLayout",
    "BucketWire",
    "build_layout",
    "message_format",
    "pack_present",
    "present_at",
]

#: Number of the bucket that carries what a step changed of a model's buffers instead of gradients.
BUFFERS = -1


def pack_present(present: Sequence[bool]) -> bytes:
    """Return one bit per element, lowest bit of the first byte first."""
    bits = sum(1 << i for i, is_present in enumerate(present) if is_present)
    return bits.to_bytes((len(present) + 7) // 8, "little")


def present_at(present: bytes, count: int) -> list[bool]:
    """Read `count` bits that `pack_present` made.

    Raises:
        LocalProtocolError: there are too few bytes.
    """
    if len(present) != (count + 7) // 8:
        raise LocalProtocolError(
            f"{len(present)} bytes of presence bits for {count} tensors, expected {(count + 7) // 8}"
        )
    bits = int.from_bytes(present, "little")
    return [bool(bits >> i & 1) for i in range(count)]


@dataclass(frozen=True)
class Bucket:
    """One bucket: tensors that travel as one flat tensor.

    Attributes:
        index: its number; 0 is complete first, `BUFFERS` carries buffers.
        names: full names, in the order in which they lie in the flat tensor.
        shapes: their shapes.
        dtype: dtype on the wire. Of the buffer bucket: float32, or float64 where a buffer is, or counts with integers.
        whole_numbers: places of those that hold integers or truth values; of the buffer bucket only.
        complex_numbers: likewise complex ones, whose real and imaginary parts travel as two elements each.
        wire: the run's wire format.
    """

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    whole_numbers: frozenset[int] = frozenset()
    complex_numbers: frozenset[int] = frozenset()
    wire: WireFormat = WIRE_FORMATS["fp32"]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor on the wire."""
        doubled = self.complex_numbers
        return tuple(math.prod(shape) * (2 if i in doubled else 1) for i, shape in enumerate(self.shapes))

    @cached_property
    def numel(self) -> int:
        """Elements of the flat tensor. The buffer bucket carries at most so many: what did not move stays at home."""
        return sum(self.sizes)

    @property
    def present_bytes(self) -> int:
        """Length of the presence bits, in bytes."""
        return (len(self.names) + 7) // 8

    @property
    def wire_format(self) -> WireFormat | None:
        """How its gradients travel where that loses something; None: as they are, as buffers and complex numbers always do."""
        is_exact = self.wire.is_exact or self.index == BUFFERS or not self.dtype.is_floating_point
        return None if is_exact else self.wire

    def is_forwarded(self, shards: int) -> bool:
        """Whether a worker gets the messages of all other shards: sparse ones, where they are shorter than what they came to."""
        found = self.wire_format
        if not isinstance(found, TopK):
            return False
        # Of two the other one's message is as short as the sum, and loses nothing more.
        sent = found.encoded_bytes(self.numel, self.dtype)
        return (shards - 1) * sent <= (self.numel * self.dtype.itemsize if found.of_senders else sent)

    @property
    def is_mean_of_senders(self) -> bool:
        """Whether shards' messages come to the mean, element by element, of those that have it; it goes down exact."""
        found = self.wire_format
        return isinstance(found, TopK) and found.of_senders

    def form_down(self, numel: int) -> FlatTensor:
        """Return what a message says of `numel` elements of what the shards came to, where that goes down."""
        return FlatTensor(dtype_name(self.dtype), numel) if self.is_mean_of_senders else self.form(numel)

    def form(self, numel: int) -> FlatTensor:
        """Return what a message says of `numel` elements of it as they travel; of gradients that is all of them."""
        wire_format = self.wire_format
        if wire_format is None:
            return FlatTensor(dtype_name(self.dtype), numel)
        return FlatTensor("uint8", wire_format.encoded_bytes(numel, self.dtype))

    def check_form(self, tensor: FlatTensor, present: bytes) -> None:
        """Check that this is a flat tensor of this bucket, as it travels.

        Raises:
            RemoteProtocolError: it is of another type or size, or has too few presence bits or too many.
        """
        if len(present) != self.present_bytes:
            raise RemoteProtocolError(
                f"bucket {self.index} has {len(present)} bytes of presence bits, not {self.present_bytes}"
            )
        bits = present_at(present, len(self.names)) if self.index == BUFFERS else [True] * len(self.names)
        numel = sum(size for size, bit in zip(self.sizes, bits, strict=True) if bit)
        if tensor != (form := self.form(numel)):
            raise RemoteProtocolError(
                f"bucket {self.index} has {tensor.numel} elements of {tensor.dtype[:40]}, not {form.numel} of {form.dtype}"
            )

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat tensor, `[numel]`, into its parameters' shapes; the views share its memory.

        Raises:
            LocalProtocolError: it has another size.
        """
        if flat.numel() != self.numel:
            raise LocalProtocolError(f"bucket {self.index} has {self.numel} elements, {flat.numel()} came")
        parts = flat.reshape(-1).split(self.sizes)  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def not_finite(self, flat: Tensor, present: bytes) -> list[str]:
        """Return the names whose values in a flat tensor contain NaN or Inf.

        Args:
            flat: `[numel]`; of buffers only those that are `present` lie in it.
            present: presence bits.
        """
        bits = present_at(present, len(self.names)) if self.index == BUFFERS else [True] * len(self.names)
        chosen = [i for i, bit in enumerate(bits) if bit]
        parts = flat.split([self.sizes[i] for i in chosen])  # type: ignore[no-untyped-call]
        return [self.names[i] for i, part in zip(chosen, parts, strict=True) if not bool(torch.isfinite(part).all())]


@dataclass(frozen=True)
class BucketLayout:
    """All buckets of a model.

    Attributes:
        buckets: the gradient buckets, by index.
        buffers: the bucket of all that a forward may change: buffers, and parameters that take no gradient; None where the
            model has none.
        fingerprint: further facts that must be equal everywhere (frozen parameters, buffers).
    """

    buckets: tuple[Bucket, ...]
    buffers: Bucket | None = None
    fingerprint: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the buckets that every shard hands over."""
        own = tuple(bucket.index for bucket in self.buckets)
        return own if self.buffers is None else (*own, BUFFERS)

    def bucket(self, number: int) -> Bucket:
        """Return a bucket by its number.

        Raises:
            LocalProtocolError: there is none.
        """
        if number == BUFFERS and self.buffers is not None:
            return self.buffers
        if not 0 <= number < len(self.buckets):
            raise LocalProtocolError(f"there is no bucket {number}; this model has {list(self.numbers)}")
        return self.buckets[number]

    def digest(self) -> str:
        """Return a digest of names, shapes, dtypes and buckets; devices do not count."""
        hasher = hashlib.sha256()
        for bucket in self.buckets:
            hasher.update(repr((bucket.index, bucket.names, bucket.shapes, str(bucket.dtype))).encode())
        hasher.update(repr(self.fingerprint).encode())
        return hasher.hexdigest()


def message_format(spec: RunSpec) -> tuple[WireFormat, float]:
    """Return how gradients travel in a run, and how much of what a message left out counts in the next one."""
    rounds = spec.rounds
    if rounds is not None and isinstance(OUTER_METHODS[rounds.outer].wire_format, TopK):
        keeps_rest = OUTER_METHODS[rounds.outer].keeps_rest
        return sparse_format(rounds.density, rounds.bits, keeps_rest), 1.0 if keeps_rest else rounds.decay
    return WIRE_FORMATS[spec.wire], 1.0


#: A worker's message: generation and step of the attempt, shard, and of a name the bucket.
_Shard = tuple[int, int, int]
_Name = tuple[int, int, int, int]


class BucketWire:
    """Flat tensors of buckets as they travel, and back; what one sender's messages left out goes with its next ones.

    A worker has one for its gradients, the orchestrator one for their sums. `commit` and `discard` follow the step.
    """

    def __init__(
        self, layout: BucketLayout, wire_format: WireFormat = WIRE_FORMATS["fp32"], decay: float = 1.0
    ) -> None:
        """Send in that format, with nothing left out so far; `decay` as of `ErrorFeedback`."""
        self._layout, self._format, self._decay = layout, wire_format, decay
        self.reset()

    def reset(self) -> None:
        """Forget what was left out: the state is another one."""
        self._feedback = ErrorFeedback(self._format, self._decay)
        self._own: dict[_Name, memoryview] = {}  # sparse messages
        self._void = set[_Name]()  # messages that do not count, of steps that are not over
        self._step = -1  # of the newest message

    @property
    def is_exact(self) -> bool:
        """Whether everything travels as it is."""
        return self._feedback.wire_format.is_exact

    def _format_of(self, number: int) -> WireFormat | None:
        return None if self.is_exact else self._layout.bucket(number).wire_format

    def encode(self, number: int, flat: Tensor, shard: _Shard | None = None) -> tuple[FlatTensor, memoryview]:
        """Return what a message says of a bucket's flat tensor, `[numel]`, and its payload, which may be the tensor's memory.

        `shard` is a worker's, of an attempt at a step. A sparse message is kept under it, since it need not come back,
        and any may turn out not to count.
        """
        if self._format_of(number) is None:
            return FlatTensor(dtype_name(flat.dtype), flat.numel()), tensor_bytes(flat)
        name = None if shard is None else (*shard, number)
        self._step = -1 if shard is None else shard[1]
        message = self._feedback.encode(number, flat, name)
        if name is not None and isinstance(self._format, TopK):
            self._own[name] = message
        return FlatTensor("uint8", len(message)), message

    def encode_sum(self, number: int, flat: Tensor) -> tuple[FlatTensor, memoryview]:
        """Return what a message says of what the shards came to, `[numel]`, and its payload, as `encode` does."""
        if self._layout.bucket(number).is_mean_of_senders:
            return FlatTensor(dtype_name(flat.dtype), flat.numel()), tensor_bytes(flat)
        return self.encode(number, flat)

    def settle(self, number: int, flat: Tensor) -> Tensor:
        """Return a bucket's flat tensor, `[numel]`, that does not travel, with all that earlier messages left out."""
        return flat if self._format_of(number) is None else self._feedback.settle(number, flat)

    def rest(self, number: int) -> Tensor | None:
        """Return what messages of a bucket left out so far, `[numel]`, those of the open step included; None: nothing."""
        return self._feedback.rest(number)

    def rests(self) -> dict[str, Tensor]:
        """Return all that messages of committed steps left out, `[numel]` each, by bucket; not to be changed."""
        return self._feedback.committed()

    def take_rests(self, rests: Mapping[str, Tensor]) -> None:
        """Go on from what `rests` returned, of the same layout and format."""
        self._feedback.take(rests)

    def is_forwarded(self, number: int, shards: int) -> bool:
        """Whether the shards' messages go on as they came, not their sum: then this sender owes nothing either."""
        if not isinstance(self._format, TopK):
            return False
        return self._layout.bucket(number).is_forwarded(shards) and not self._feedback.owes(number)

    def decode(self, number: int, tensor: FlatTensor, payload: memoryview) -> Tensor:
        """Return the flat tensor, `[numel]`, of a bucket that came; its memory is the payload's where nothing was encoded.

        Args:
            number: of the bucket.
            tensor: what the message says of it.
            payload: of the message, of a peer that is not believed.

        Raises:
            RemoteProtocolError: the payload is none of that bucket.
        """
        wire_format = self._format_of(number)
        if wire_format is None:
            return tensor_from(tensor.dtype, (tensor.numel,), payload)
        bucket = self._layout.bucket(number)
        return wire_format.decode(payload, bucket.numel, bucket.dtype)

    def decode_part(self, number: int, tensor: FlatTensor, payload: memoryview) -> Tensor:
        """Return what a shard sent of a bucket, `[numel]`, to be added up, as `decode` does; a sparse message stays sparse.

        Args:
            number, tensor, payload: as for `decode`, whose errors it has.
        """
        bucket, wire_format = self._layout.bucket(number), self._format_of(number)
        if isinstance(wire_format, TopK) and bucket.numel:
            return wire_format.decode_sparse(payload, bucket.numel, bucket.dtype)
        return self.decode(number, tensor, payload)

    def decode_sum(self, message: SumBucket, payload: memoryview) -> Tensor:
        """Return the sum, `[numel]`, of a bucket that came from the hub; memory as of `decode`.

        Raises:
            RemoteProtocolError: the payload is none of that bucket, or a shard's message is neither in it nor here.
        """
        self.note_void(message)
        bucket = self._layout.bucket(message.bucket)
        if message.forwarded is None:
            if bucket.is_mean_of_senders:
                return tensor_from(dtype_name(bucket.dtype), (bucket.numel,), payload)
            return self.decode(message.bucket, message.tensor, payload)
        messages = self._messages_of(message, payload, self._format.encoded_bytes(bucket.numel, bucket.dtype))
        if isinstance(self._format, TopK) and bucket.is_mean_of_senders:
            return mean_of_senders(self._format, messages, bucket.numel, bucket.dtype)
        return sum_of_messages(self._format, messages, bucket.numel, bucket.dtype)

    def _messages_of(self, message: SumBucket, payload: memoryview, nbytes: int) -> Iterator[memoryview]:
        """Give the messages of all shards in their order: those that came, and this worker's own."""
        came = {shard: payload[k * nbytes : (k + 1) * nbytes] for k, shard in enumerate(message.forwarded or ())}
        if len(payload) != nbytes * len(came):
            raise RemoteProtocolError(f"{len(payload)} bytes came for {len(came)} messages of {nbytes}")
        for shard in range(message.shards):
            found = came.get(shard, self._own.get((message.generation, message.step, shard, message.bucket)))
            if found is None:
                raise RemoteProtocolError(f"bucket {message.bucket} came without the message of shard {shard}")
            yield found

    def owed_norm(self) -> float:
        """Return the 2-norm of all that was left out, the open step's messages included."""
        return self._feedback.norm()

    def note_void(self, message: SumBucket | ParameterBucket) -> None:
        """Take notice of this worker's messages that do not count, though their step does."""
        self._void.update((message.generation, message.step, shard, bucket) for bucket, shard in message.void)

    def commit(self) -> None:
        """The step counts, less those of its messages of which was told that they do not."""
        self._feedback.commit(self._void)
        self._void = {name for name in self._void if name[1] > self._step}
        self._own.clear()

    def discard(self) -> None:
        """The step does not count: what it encoded is as if it had never been."""
        self._feedback.discard()
        self._own.clear()


def build_layout(model: nn.Module, bucket_bytes: int, wire: WireFormat = WIRE_FORMATS["fp32"]) -> BucketLayout:
    """Cut a model's trainable parameters into buckets of about `bucket_bytes`; tied parameters stand once.

    `wire` is the format of their gradients.

    Raises:
        ConfigError: a parameter has no shape yet (a lazy layer), or is to be trained in a type that torch does not add.
    """
    named = list(model.named_parameters())
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet; run the lazy layer once inside the model factory")
        if parameter.requires_grad and parameter.is_floating_point() and parameter.itemsize < 2:
            raise ConfigError(
                f"parameter {name!r} is {dtype_name(parameter.dtype)}, and torch has no norm and no optimizer for its gradient: "
                "keep it in bfloat16 or float32 and round it in forward, or freeze it (requires_grad_(False))"
            )
    buckets = tuple(
        Bucket(index, tuple(name for name, _ in bucket), _shapes(bucket), wire_dtype(bucket[0][1].dtype), wire=wire)
        for index, bucket in enumerate(plan_buckets(named, bucket_bytes))
    )
    return BucketLayout(buckets, _buffer_bucket(model), tuple(_facts(model)))


def _shapes(named: Iterable[tuple[str, Tensor]]) -> tuple[tuple[int, ...], ...]:
    """Return the tensors' shapes, in order."""
    return tuple(tuple(tensor.shape) for _, tensor in named)


def _buffer_bucket(model: nn.Module) -> Bucket | None:
    named = [*model.named_buffers(), *followed_parameters(model)]
    if not named:
        return None
    whole = {i for i, (_, b) in enumerate(named) if not (b.is_floating_point() or b.is_complex())}
    double = any(b.dtype in (torch.float64, torch.complex128) for _, b in named)
    # A sum of float32 would lose what many samples count; the counter of batches never gets there.
    double = double or any(not named[i][0].endswith("num_batches_tracked") for i in whole)
    return Bucket(
        BUFFERS, tuple(name for name, _ in named), _shapes(named), torch.float64 if double else torch.float32,
        frozenset(whole), frozenset(i for i, (_, b) in enumerate(named) if b.is_complex()),
    )  # fmt: skip


def _facts(model: nn.Module) -> Iterable[str]:
    for name, parameter in model.named_parameters():
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    for name, buffer in model.named_buffers():
        yield f"{name} {tuple(buffer.shape)} {buffer.dtype}"
