"""What a lossy format left out, kept by the sender and sent with the next message (error feedback).

Over many messages nothing is lost: the sum of what was sent and the residual is the sum of what was given. The residual is state
with an owner.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Mapping

import torch
from torch import Tensor

from guava_nb.errors import LocalProtocolError
from guava_nb.wire_formats.wire_format import WireFormat, accumulation_dtype

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Residuals of one sender, by a name or number of each flat tensor.

    What `encode` leaves out is only proposed until `commit`: a step or round that does not count calls `discard`, and the
    residuals are those before it. Several messages of one tensor between two commits follow on from each other, and each may
    turn out not to count. An exact format has no residuals.
    """

    def __init__(self, wire_format: WireFormat, decay: float = 1.0) -> None:
        """Send in that format; a residual counts `decay` times when it is sent (SparseLoCo: 0.95)."""
        self.wire_format, self.decay = wire_format, decay
        self._committed: dict[str, Tensor] = {}
        self._proposed: dict[str, list[tuple[Hashable, Tensor]]] = {}  # after each message since the last commit

    def encode(self, key: object, flat: Tensor, name: Hashable = None) -> memoryview:
        """Return the message of a flat tensor, `[numel]`, and of what is left of earlier ones of that key.

        `commit` may be told by its name that it does not count.

        Raises:
            LocalProtocolError: earlier ones had another size.
        """
        values = self._with_rest(key, flat)
        message = self.wire_format.encode(values)
        if not self.wire_format.is_exact:
            # What is not finite must not stay for ever, whether or not its step is discarded.
            rest = self.wire_format.left_out(values, message).nan_to_num_(0.0, 0.0, 0.0)
            self._proposed.setdefault(str(key), []).append((name, rest))
        return message

    def settle(self, key: object, flat: Tensor) -> Tensor:
        """Return a flat tensor, `[numel]`, with all that earlier messages of that key left out, which is then owed no more.

        For what does not travel: it loses nothing. Errors as of `encode`.
        """
        values = self._with_rest(key, flat)
        if self.owes(key):
            self._proposed.setdefault(str(key), []).append((None, torch.zeros_like(values)))
        return values

    def owes(self, key: object) -> bool:
        """Whether earlier messages of that key left something out, or may have."""
        return str(key) in self._proposed or str(key) in self._committed

    def rest(self, key: object) -> Tensor | None:
        """Return what messages of that key left out, `[numel]` of float32 or float64, committed or not; None: there were none."""
        proposed = self._proposed.get(str(key))
        return proposed[-1][1] if proposed else self._committed.get(str(key))

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

    def commit(self, void: Container[Hashable] = ()) -> None:
        """What was encoded since the last commit counts, less messages whose names are in `void`, as if never encoded."""
        for key, proposed in self._proposed.items():
            if not any(name in void for name, _ in proposed):
                self._committed[key] = proposed[-1][1]
                continue
            before = rest = self._committed.get(key, torch.zeros_like(proposed[-1][1]))
            for name, after in proposed:
                rest, before = rest if name in void else rest + (after - before.to(after.device)), after
            self._committed[key] = rest
        self._proposed.clear()

    def discard(self) -> None:
        """What was encoded since the last commit does not count; the next message is as if it had never been."""
        self._proposed.clear()

    def norm(self) -> float:
        """Return the 2-norm of all residuals, proposed ones included: what a loss of their owner would lose."""
        proposed = {key: messages[-1][1] for key, messages in self._proposed.items()}
        norms = [float(residual.norm()) for residual in (self._committed | proposed).values()]
        return math.hypot(*norms)
