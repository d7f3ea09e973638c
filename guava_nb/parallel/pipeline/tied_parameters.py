"""Parameters that stand in stages on several ranks: an embedding and the head that shares its weight.

Every rank with a copy ends up with the same sum of all gradients, so that the copies stay equal to the last bit: by one
all_reduce where all ranks of the pipeline hold it, else each holder sends to the first one, which adds and sends the sum back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.parallel.state.full_state import local_part

__all__ = ["TiedParameters"]


class TiedParameters:
    """Sums the gradients of shared parameters.

    Args:
        named: this rank's parameters.
        holders: name of each shared parameter to the ranks of the group that hold it, lowest first.
        group: the pipeline's ranks.
        device: where messages are made.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        holders: Mapping[str, Sequence[int]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._rank = dist.get_rank(group)
        self._shared = [(named[name], ranks) for name, ranks in holders.items() if self._rank in ranks]
        self._group, self._device = group, device

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients up; a parameter that got none anywhere stays without.

        A rank that has a gradient waits for no device: it knows that there is a sum. One without reads whether others have one.
        """
        for parameter, ranks in self._shared:
            holders = torch.full((1,), float(parameter.grad is not None), device=self._device)
            self._sum(holders, ranks)
            if parameter.grad is None:
                if not float(holders):
                    continue
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_part(parameter.grad)
            total = gradient.contiguous()
            self._sum(total, ranks)
            if total is not gradient:
                gradient.copy_(total)

    def _sum(self, tensor: Tensor, ranks: Sequence[int]) -> None:
        """Add up a contiguous tensor in place over the ranks that hold a parameter."""
        if len(ranks) == self._group.size():
            dist.all_reduce(tensor, group=self._group)
            return
        first, *others = (dist.get_global_rank(self._group, rank) for rank in ranks)
        if self._rank != ranks[0]:
            dist.send(tensor, first, group=self._group)
            dist.recv(tensor, first, group=self._group)
            return
        part = torch.empty_like(tensor)
        for other in others:
            dist.recv(part, other, group=self._group)
            tensor.add_(part)
        for other in others:
            dist.send(tensor, other, group=self._group)
