"""What a lossy format left out, kept by the sender and sent with the next message (error feedback).

Over many messages nothing is lost: the sum of what was sent and the residual is the sum of what was given. The residual is state
with an owner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from guava_nb.errors import LocalProtocolError
from guava_nb.wire_formats.wire_format import WireFormat, accumulation_dtype

__all__ = ["ErrorFeedback"]


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

    def encode(self, key: object, flat: Tensor) -> memoryview:
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
        """Return `flat`, `[numel]`, plus `decay` times what earlier messages of that key left out, in float32 or float64."""
        values, before = flat.detach().to(accumulation_dtype(flat.dtype)), self.rest(key)
        if before is None:
            return values
        if before.shape != values.shape:
            raise LocalProtocolError(f"{values.numel()} elements for the residual of {before.numel()} of {key}")
        before = before.to(values.device)
        return values + (before if self.decay == 1 else before * self.decay)

    def committed(self) -> dict[str, Tensor]:
        """Return what messages that count left out, `[numel]` of float32 or float64 each, by key; not to be changed."""
        return dict(self._committed)

    def take(self, committed: Mapping[str, Tensor]) -> None:
        """Go on from what `committed` returned."""
        self._committed, self._proposed = dict(committed), {}

    def commit(self) -> None:
        """What was encoded since the last commit counts."""
        self._committed.update(self._proposed)
        self._proposed.clear()

    def discard(self) -> None:
        """What was encoded since the last commit does not count; the next message is as if it had never been."""
        self._proposed.clear()

    def norm(self) -> float:
        """Return the 2-norm of all residuals, proposed ones included: what a loss of their owner would lose."""
        norms = [float(residual.norm()) for residual in (self._committed | self._proposed).values()]
        return math.hypot(*norms)
