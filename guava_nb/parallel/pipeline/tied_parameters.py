"""Parameters that stand in stages on several ranks: an embedding and the head that shares its weight.

Every rank with a copy ends up with the sum of all gradients, added in rank order, so that the copies stay equal to the
last bit. Point-to-point on the pipeline's group: each holder sends to the first one, which adds and sends the sum back.
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
        """Add the gradients up; a parameter that got none anywhere stays without."""
        for parameter, ranks in self._shared:
            if self._rank == ranks[0]:
                self._collect(parameter, ranks[1:])
            else:
                self._put(parameter, ranks[0])
                self._replace(parameter, ranks[0])

    def _collect(self, parameter: nn.Parameter, others: Sequence[int]) -> None:
        for rank in others:
            gradient = self._take(parameter, rank)
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).add_(gradient)
        for rank in others:
            self._put(parameter, rank)

    def _replace(self, parameter: nn.Parameter, rank: int) -> None:
        gradient = self._take(parameter, rank)
        if gradient is None:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_part(parameter.grad).copy_(gradient)

    def _put(self, parameter: nn.Parameter, rank: int) -> None:
        peer = dist.get_global_rank(self._group, rank)
        there = parameter.grad is not None
        dist.send(torch.tensor([int(there)], device=self._device), peer, group=self._group)
        if parameter.grad is not None:
            dist.send(local_part(parameter.grad).contiguous(), peer, group=self._group)

    def _take(self, parameter: nn.Parameter, rank: int) -> Tensor | None:
        peer = dist.get_global_rank(self._group, rank)
        there = torch.empty(1, dtype=torch.int64, device=self._device)
        dist.recv(there, peer, group=self._group)
        if not int(there):
            return None
        gradient = torch.empty_like(local_part(parameter), memory_format=torch.contiguous_format)
        dist.recv(gradient, peer, group=self._group)
        return gradient
