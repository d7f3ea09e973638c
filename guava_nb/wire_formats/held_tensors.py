"""Named tensors as another side holds them, and the short messages that bring that copy nearer to what they are now."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from guava_nb.errors import RemoteProtocolError
from guava_nb.wire_formats.top_k import TopK
from guava_nb.wire_formats.wire_format import accumulation_dtype

__all__ = ["CHUNK", "HeldTensors", "largest_count"]

#: Elements of which some are sent, and elements that are encoded at once: what that needs beside is 16 MiB and its places.
CHUNK, _SLICE = 4096, 4096 << 10


class HeldTensors:
    """A copy of tensors that two sides keep alike. The sender proposes a message and settles it; the other side takes it.

    What a message leaves out stays in the difference to this copy, and is in the next one: error feedback, as a top-k of
    differences to what is held (EF21, arXiv:2106.05203). Both sides add the same decoded values, so they stay the same bits.

    Args:
        tensors: by name, on the CPU; one that stands there under two names is one.
        moving: names of those that travel as differences. Of the others those that changed are sent as they are.

    Attributes:
        count: messages that are in it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], moving: Collection[str]) -> None:
        """Copy them, each of its own shape."""
        self.count = 0
        self._held: dict[str, Tensor] = {}
        self._same: dict[str, str] = {}  # name: the first name of the same tensor
        places: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in tensors.items():
            # Empty tensors may all lie at address 0, and are not tied.
            first = places.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
            self._same[name] = first
            if first == name:
                is_moving = name in moving and tensor.is_floating_point()
                self._held[name] = tensor.detach().to(accumulation_dtype(tensor.dtype) if is_moving else None).clone()
        self._moving = [name for name in self._held if name in moving and self._held[name].is_floating_point()]
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self._proposed: tuple[int, list[Tensor], dict[str, Tensor]] | None = None

    @property
    def moving_elements(self) -> int:
        """Elements that travel as differences."""
        return sum(self._held[name].numel() for name in self._moving)

    def propose(self, now: Mapping[str, Tensor], count: int) -> tuple[list[Tensor], dict[str, Tensor], float]:
        """Return the next message: what `settle` takes or forgets, and `take` takes on the other side.

        Args:
            now: the tensors, by the same names and of the same shapes; they are read only, and not kept.
            count: elements of each 4,096 that are sent.

        Returns:
            Encoded differences, each `[bytes]` of uint8; tensors that are sent as they are, copies in their own shape and type;
            which part of the way from the copy the message leaves out, from 0 to 1.
        """
        messages, left, way = list[Tensor](), 0.0, 0.0
        for dtype, names in self._by_dtype():
            for piece in _pieces([(self._held[name], now[name]) for name in names], dtype):
                message = TopK(count, CHUNK).encode(piece)
                messages.append(torch.frombuffer(bytearray(message), dtype=torch.uint8))
                way += float(piece.double().square().sum())
                # What the receiver will not get is what the copy lacks after it, so it is in the next message.
                piece -= TopK(count, CHUNK).decode(message, piece.numel(), dtype)
                left += float(piece.double().square().sum())
        others = {name: held for name, held in self._held.items() if name not in self._moving}
        exact = {name: now[name].detach().clone() for name, held in others.items() if not torch.equal(held, now[name])}
        self._proposed = count, messages, exact
        return messages, exact, (left / way) ** 0.5 if way > 0 else 0.0

    def settle(self, held: int) -> bool:
        """Take or forget what was proposed last, as the other side holds so many messages; returns whether that is possible."""
        if self._proposed is not None and held == self.count + 1:
            self.take(*self._proposed)
        self._proposed = None
        return held == self.count

    def take(self, count: int, messages: Sequence[Tensor], exact: Mapping[str, Tensor]) -> None:
        """Come nearer by a message.

        Args:
            count: elements of each 4,096 that were sent.
            messages: encoded differences, each `[bytes]` of uint8.
            exact: tensors that came as they are, by name.

        Raises:
            RemoteProtocolError: it does not fit these tensors; nothing has changed.
        """
        pieces = [piece for dtype, names in self._by_dtype() for piece in self._places(names, dtype)]
        if len(messages) != len(pieces):
            raise RemoteProtocolError(f"{len(messages)} pieces of a difference came, and it has {len(pieces)}")
        for name, tensor in exact.items():
            held = self._held.get(name)
            if held is None or name in self._moving or held.shape != tensor.shape or held.dtype != tensor.dtype:
                raise RemoteProtocolError(f"{name} came as a tensor that is not of this model")
        # All is decoded before anything is added: a message that does not fit must leave the copy as it was.
        changes = [
            TopK(count, CHUNK).decode(message.numpy().data, sum(part.numel() for part in piece), piece[0].dtype)
            for message, piece in zip(messages, pieces, strict=True)
        ]
        if not all(bool(change.isfinite().all()) for change in changes):
            raise RemoteProtocolError("a difference came with values that are not finite")
        for change, piece in zip(changes, pieces, strict=True):
            for part, values in zip(
                piece, torch.split_with_sizes(change, [part.numel() for part in piece]), strict=True
            ):
                part += values
        for name, tensor in exact.items():
            self._held[name] = tensor.detach().clone()
        self.count += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the copy by all names, of the tensors' shapes and types; what is not converted shares the memory held here."""
        made = {name: held.to(self._dtypes[name]) for name, held in self._held.items()}
        return {name: made[first] for name, first in self._same.items()}

    # ------------------------------------------------------------------------------------------------------ to a file

    def content(self) -> dict[str, object]:
        """Return all of it as plain data and tensors, for `from_content`."""
        return {
            "held": dict(self._held), "same": dict(self._same), "moving": list(self._moving), "count": self.count,
            "types": {name: torch.empty(0, dtype=one) for name, one in self._dtypes.items()}, "proposed": self._proposed,
        }  # fmt: skip

    @classmethod
    def from_content(cls, content: Mapping[str, object]) -> HeldTensors:
        """Return what `content` was taken of."""
        made = cls({}, ())
        given: dict[str, object] = dict(content)
        held, types, proposed = given["held"], given["types"], given["proposed"]
        assert isinstance(held, dict) and isinstance(types, dict)
        made._held = {name: tensor.clone() for name, tensor in held.items()}
        made._same, made._moving, made.count = given["same"], given["moving"], given["count"]  # type: ignore[assignment]
        made._dtypes = {name: one.dtype for name, one in types.items()}
        if isinstance(proposed, tuple):
            count, messages, exact = proposed
            made._proposed = (
                count,
                [one.clone() for one in messages],
                {name: one.clone() for name, one in exact.items()},
            )
        return made

    def _by_dtype(self) -> Iterator[tuple[torch.dtype, list[str]]]:
        for dtype in (torch.float32, torch.float64):
            if names := [name for name in self._moving if self._held[name].dtype == dtype]:
                yield dtype, names

    def _places(self, names: Sequence[str], dtype: torch.dtype) -> Iterator[list[Tensor]]:
        """Yield the flat parts of the copy, views, that each piece of a message is about: at most `_SLICE` elements a piece."""
        piece, room = list[Tensor](), _SLICE
        for name in names:
            rest = self._held[name].view(-1)
            while rest.numel():
                part, rest = rest[:room], rest[room:]
                piece.append(part)
                room -= part.numel()
                if not room:
                    yield piece
                    piece, room = [], _SLICE
        if piece:
            yield piece


def _pieces(pairs: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the differences of tensors to those that are held, one after another, in flat pieces of at most `_SLICE` elements.

    Args:
        pairs: what is held, contiguous, and what it is now, of the same shape.
        dtype: of the pieces, which are memory of their own.
    """
    parts, room = list[Tensor](), _SLICE
    for held, now in pairs:
        old, new = held.view(-1), now.detach().reshape(-1)
        while old.numel():
            parts.append(new[:room].to(dtype) - old[:room])
            old, new, room = old[room:], new[room:], room - parts[-1].numel()
            if not room:
                yield torch.cat(parts)
                parts, room = [], _SLICE
    if parts:
        yield torch.cat(parts)


def largest_count(numel: int, most_bytes: float, most: int) -> int:
    """Return how many elements of each 4,096, `most` at most, fit a message of so many bytes; 0: not one.

    Args:
        numel: elements in all.
        most_bytes: of the message.
        most: 4,096 at most.
    """
    return bisect_right(range(1, most + 1), most_bytes, key=lambda count: TopK(count, CHUNK).encoded_bytes(numel))
