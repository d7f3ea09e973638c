"""What ranks that share each layer check and complete after backward.

A parameter that is whole on every rank must get the same gradient on every rank. It does where the activations it
works on are whole; where they are split (a norm inside the heads, say), each rank has the gradient of its own heads
only, and the sum over the ranks is the true one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from guava_nb.errors import TrainingError
from guava_nb.parallel.replicas.gradient_sum import sum_gradients
from guava_nb.parallel.state.full_state import local_part
from guava_nb.parallel.state.shard_layout import Layout

__all__ = ["TensorSums"]

#: Relative difference of a gradient's norm that rounding does not explain, by dtype; and the same of the largest norm,
#: because a gradient that is zero but for rounding (of a key's bias, say) may differ by any factor.
_SLACK = {torch.float64: (1e-6, 1e-9), torch.float32: (1e-2, 1e-5)}
_HALF_SLACK = (0.1, 1e-2)


class TensorSums:
    """Sums partial gradients over the ranks that share each layer, and checks once that the others agree."""

    def __init__(
        self, group: dist.ProcessGroup | None, partial: Sequence[str] = (), layouts: Mapping[str, Layout] | None = None
    ) -> None:
        """Know who shares what.

        Args:
            group: the ranks that share each layer; None: every layer is whole.
            partial: full names of whole parameters that work on split activations.
            layouts: which parameters are whole.
        """
        self._group = group
        self._partial = tuple(partial)
        self._layouts = layouts or {}
        self._checked = group is None

    @property
    def is_active(self) -> bool:
        """Whether `finish` looks at gradients."""
        return self._group is not None and (bool(self._partial) or not self._checked)

    @torch.no_grad()
    def finish(self, named: Mapping[str, nn.Parameter]) -> None:
        """Complete the gradients of a step whose sums over the replicas are there.

        Raises:
            TrainingError: gradients of a whole parameter differ between the ranks.
        """
        if self._group is None:
            return
        if self._partial:
            self._sum_partial(named)
        if not self._checked:
            self._check(named)
            self._checked = True

    def _sum_partial(self, named: Mapping[str, nn.Parameter]) -> None:
        assert self._group is not None
        chosen = {name: named[name] for name in self._partial if named[name].requires_grad}
        stand_ins = {name: nn.Parameter(local_part(p)) for name, p in chosen.items()}
        for name, parameter in chosen.items():
            if parameter.grad is not None:
                stand_ins[name].grad = local_part(parameter.grad)
        sum_gradients(stand_ins, self._group)
        for name, parameter in chosen.items():
            total = stand_ins[name].grad
            if parameter.grad is not None and total is not None:
                local_part(parameter.grad).copy_(total)

    def _check(self, named: Mapping[str, nn.Parameter]) -> None:
        whole = [(n, p) for n, p in named.items() if self._layouts[n].tensor_copies and p.requires_grad]
        if not whole:
            return
        device = local_part(whole[0][1]).device
        norms = [
            torch.full((), -1.0, dtype=torch.float64, device=device)
            if p.grad is None
            else torch.linalg.vector_norm(local_part(p.grad)).double()
            for _, p in whole
        ]
        here = torch.stack(norms)
        extremes = torch.cat([here, -here])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        highest, lowest = extremes[: len(whole)], -extremes[len(whole) :]
        slack = here.new_tensor([_SLACK.get(p.dtype, _HALF_SLACK) for _, p in whole])
        allowed = slack[:, 0] * highest.abs() + slack[:, 1] * highest.abs().max()
        apart = (~(highest - lowest <= allowed) & torch.isfinite(highest)).nonzero().flatten().tolist()
        if apart:
            worst = apart[0]
            raise TrainingError(
                f"gradients of {whole[worst][0]!r} and {len(apart) - 1} more parameters differ between the workers that "
                f"share each layer (norm {float(lowest[worst]):.6g} to {float(highest[worst]):.6g}): they work on split "
                "activations, the forward is not the same on every worker, or the loss takes derivatives of derivatives through "
                'split layers (autograd.grad with create_graph=True); give their module the plan "partial" in the first case, '
                "seed its randomness alike in the second, and use data mode in the third"
            )
