"""What a lossy format left out, kept by the sender and sent with the next message (error feedback).

Over many messages nothing is lost: the sum of what was sent and the residual is the sum of what was given. The residual is state
with an owner, who keeps it through checkpoints and may hand it to another member: residuals add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from guava_nb.errors import LocalProtocolError, RemoteProtocolError
from guava_nb.wire_formats.wire_format import WireFormat, accumulation_dtype

__all__ = ["ErrorFeedback", "Sent"]


class Sent(NamedTuple):
    """One encoded tensor.

    Attributes:
        message: its bytes.
        decoded: what every receiver reads in them, `[numel]` of float32 or float64.
    """

    message: memoryview
    decoded: Tensor


class ErrorFeedback:
    """Residuals of one sender, by a name or number of each flat tensor.

    What `encode` leaves out is only proposed until `commit`: a step or round that does not count calls `discard`, and the
    residuals are those before it. Several messages of one tensor between two commits follow on from each other. An exact format
    has no residuals.
    """

    def __init__(self, wire_format: WireFormat, decay: float = 1.0) -> None:
        """Send in that format; a residual counts `decay` times when it is sent (SparseLoCo: 0.95)."""
        self.wire_format, self.decay = wire_format, decay
        self._committed: dict[str, Tensor] = {}
        self._proposed: dict[str, Tensor] = {}

    def encode(self, key: object, flat: Tensor) -> Sent:
        """Return what `message` returns, and what is read in it."""
        message, dtype = self.message(key, flat), accumulation_dtype(flat.dtype)
        return Sent(message, self.wire_format.decode(message, flat.numel(), dtype, flat.device))

    def message(self, key: object, flat: Tensor) -> memoryview:
        """Return the message of a flat tensor, `[numel]`, and of what is left of earlier ones of that key.

        Raises:
            LocalProtocolError: earlier ones had another size.
        """
        values = self._with_rest(key, flat)
        message = self.wire_format.encode(values)
        if not self.wire_format.is_exact:
            # What is not finite must not stay for ever, whether or not its step is discarded.
            self._proposed[str(key)] = self.wire_format.left_out(values, message).nan_to_num_(0.0, 0.0, 0.0)
        return message

    def settle(self, key: object, flat: Tensor) -> Tensor:
        """Return a flat tensor, `[numel]`, with all that earlier messages of that key left out, which is then owed no more.

        For what does not travel: it loses nothing. Errors as of `encode`.
        """
        values = self._with_rest(key, flat)
        if self.owes(key):
            self._proposed[str(key)] = torch.zeros_like(values)
        return values

    def owes(self, key: object) -> bool:
        """Whether earlier messages of that key left something out, or may have."""
        return str(key) in self._proposed or str(key) in self._committed

    def rest(self, key: object) -> Tensor | None:
        """Return what messages of that key left out, `[numel]` of float32 or float64, committed or not; None: there were none."""
        return self._proposed.get(str(key), self._committed.get(str(key)))

    def _with_rest(self, key: object, flat: Tensor) -> Tensor:
        values, before = flat.detach().to(accumulation_dtype(flat.dtype)), self.rest(key)
        if before is None:
            return values
        if before.shape != values.shape:
            raise LocalProtocolError(f"{values.numel()} elements for the residual of {before.numel()} of {key}")
        before = before.to(values.device)
        return values + (before if self.decay == 1 else before * self.decay)

    def commit(self) -> None:
        """What was encoded since the last commit counts."""
        self._committed.update(self._proposed)
        self._proposed.clear()

    def discard(self) -> None:
        """What was encoded since the last commit does not count; the next message is as if it had never been."""
        self._proposed.clear()

    # ----------------------------------------------------------------------------------------------------- its owner's

    def state_dict(self) -> dict[str, Tensor]:
        """Return the committed residuals by key, `[numel]` each, as copies on the CPU."""
        return {name: residual.to("cpu", copy=True) for name, residual in self._committed.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        """Take these residuals in place of all that are here; arguments and errors as in `take_over`."""
        _check(state, sizes)
        self._committed, self._proposed = {}, {}
        self.take_over(state, sizes)

    def take_over(self, state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        """Add the residuals of a member that leaves: what it still owed is sent from here.

        Args:
            state: what its `state_dict` gave.
            sizes: elements of every tensor that is sent, by key.

        Raises:
            RemoteProtocolError: a key, size or type is not one of those, or a value is not finite; then nothing was taken.
        """
        _check(state, sizes)
        for name, residual in state.items():
            mine = self._committed.get(name)
            self._committed[name] = residual.clone() if mine is None else mine + residual.to(mine.device)

    def norm(self) -> float:
        """Return the 2-norm of all residuals, proposed ones included: what a loss of their owner would lose."""
        norms = [float(residual.norm()) for residual in (self._committed | self._proposed).values()]
        return math.hypot(*norms)


def _check(state: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
    for name, residual in state.items():
        if residual.shape != (sizes.get(name, -1),) or residual.dtype not in (torch.float32, torch.float64):
            raise RemoteProtocolError(
                f"the residual {name[:40]!r} has shape {tuple(residual.shape)[:4]} and type {residual.dtype}; "
                f"{sizes.get(name, 'no')} elements of float32 or float64 were expected"
            )
        if not bool(residual.isfinite().all()):
            raise RemoteProtocolError(f"the residual {name[:40]!r} has values that are not finite")
