"""`gather_batch` among pieces of a batch that one worker computes one after another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import Tensor

__all__ = ["SimulatedGather", "no_process_group"]


class SimulatedGather:
    """Gathers over pieces that are computed one after another, as replicas would at the same time.

    A piece is given what the whole batch came to, as constants. What its loss finds out about them is collected, and goes back
    through the pieces that they are of when all are done.

    Attributes:
        whole: what was gathered of the whole batch, call by call.
    """

    def __init__(self) -> None:
        """Nothing was gathered."""
        self.whole: list[Tensor] = []
        self._is_whole = True
        self._at = 0
        self._lent: list[list[tuple[Tensor, Tensor]]] = []  # for each call, of each piece: its rows, and all rows

    def begin(self, is_whole: bool) -> None:
        """A whole batch is computed, or its pieces are."""
        self._is_whole, self._lent = is_whole, []
        if is_whole:
            self.whole = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the rows of the whole batch, `[B, ...]`, for those of a piece, `[b, ...]`."""
        if self._is_whole:
            self.whole.append(tensor.detach().clone())
            return tensor
        rows = self.whole[self._at].clone().requires_grad_(tensor.requires_grad)
        if len(self._lent) == self._at:
            self._lent.append([])
        self._lent[self._at].append((tensor, rows))
        self._at += 1
        return rows

    def begin_piece(self) -> None:
        """The next calls are those of another piece."""
        self._at = 0

    def finish(self) -> None:
        """Let what all pieces found out go back, last call first: it may depend on earlier ones."""
        for call in reversed(self._lent):
            found = [rows.grad for _, rows in call if rows.grad is not None]
            if not found:
                continue
            parts = sum(found[1:], found[0]).split([len(own) for own, _ in call])  # type: ignore[no-untyped-call]
            for (own, _), gradient in zip(call, parts, strict=True):
                own.backward(gradient, retain_graph=True)  # type: ignore[no-untyped-call]
        self._lent = []


@contextlib.contextmanager
def no_process_group() -> Iterator[None]:
    """Hide the process group that stands: what user code would ask of it, the other ranks do not join."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or distributed.GroupMember.WORLD is None:
        yield
        return
    world, distributed.GroupMember.WORLD = distributed.GroupMember.WORLD, None
    try:
        yield
    finally:
        distributed.GroupMember.WORLD = world
