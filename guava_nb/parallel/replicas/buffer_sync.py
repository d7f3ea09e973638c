"""What forwards change of a model, buffers and parameters that take no gradient, made equal on all replicas after every step.

By the same rules as in the star exchange, see `buffer_policy`. What did not move on any replica stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from guava_nb.errors import TrainingError
from guava_nb.parallel.replicas.buffer_policy import (
    ChangeFacts,
    Way,
    change_of,
    facts_of,
    followed_parameters,
    is_lost,
    is_statistic,
    lost_text,
    policy_of,
    taken,
    way_of,
    with_all_forwards,
)

__all__ = ["BufferSync"]


class BufferSync:
    """Makes moved tensors equal over a group; one small message a step tells how they moved, none where there are none.

    Attributes:
        unlike: names of tensors that replicas changed differently, with no rule or choice for it.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        full_names: Mapping[str, str] | None = None,
        policies: str = "auto",
    ) -> None:
        """Look at the buffers of a model whose replicas are the ranks of a group.

        Args:
            model: its buffers, and the parameters that are followed as such.
            group: of the replicas.
            policies: the run's option `buffers`.
            full_names: names in the whole model, by those here; None: they are the same.
        """
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        frozen = [(name, p) for name, p in followed_parameters(model) if not isinstance(p, DTensor)]
        found = [*model.named_buffers(), *frozen]
        self._owners = [_owner(model, name) for name, _ in found]
        names = [(full_names or {}).get(name, name) for name, _ in found]
        self._facts = [(name, policy_of(policies, name), _is_whole(found[i][1])) for i, name in enumerate(names)]
        self._uncertain = [i for i, name in enumerate(names) if not is_statistic(name)]
        self.unlike: set[str] = set()
        self._counted: dict[str, bool] = {}
        self._full_rank = 0  # of the step: the first replica with all forwards
        self._before: list[Tensor] = []
        self.mark()

    def mark(self) -> None:
        """What is there now is equal everywhere: at the start, after loading, after a step."""
        # Copies, because torch's batch norm moves its statistics without a new version of the tensor.
        self._before = [self._live(i).detach().clone() for i in range(len(self._owners))]

    def _live(self, index: int) -> Tensor:
        """Return the tensor that stands there now, of any shape, not a copy."""
        module, key = self._owners[index]
        tensor = module._buffers.get(key, module._parameters.get(key))
        assert tensor is not None
        return tensor

    @torch.no_grad()
    def finish(self, rows: int, forwards: int = 1, policies: str = "") -> None:
        """Make the tensors equal; this replica saw `rows` samples in so many forwards since the last step.

        `policies`, the same on all ranks, are for those that the run's option leaves to us.
        """
        if not self._owners:
            return
        changes = [change_of(before, self._live(i)) for i, before in enumerate(self._before)]
        if not rows:  # a replica without samples may hold anything, even NaN
            changes = [torch.zeros_like(change) for change in changes]
        anywhere, all_rows, ways = self._agree(changes, rows, forwards, policies)
        steps: dict[tuple[Way, torch.dtype], list[int]] = {}
        for i, way in ways.items():
            steps.setdefault((way, changes[i].dtype), []).append(i)
        for (way, _), members in sorted(steps.items(), key=str):
            self._exchange(way, [changes[i] for i in members], all_rows)
        for i, before in enumerate(self._before):
            if anywhere[i] or not rows:
                self._live(i).copy_(taken(before, changes[i]))
        self.mark()

    def _agree(
        self, changes: Sequence[Tensor], rows: int, forwards: int, policies: str
    ) -> tuple[list[bool], list[int], dict[int, Way]]:
        """Return which tensors moved anywhere, each replica's rows, and what becomes of those that moved.

        Args:
            changes: of each tensor, `[N]`, as `change_of` gives them.
            rows, forwards: of this replica.
            policies: as of `finish`.

        Raises:
            TrainingError: a new value is lost in its change, on any replica.
        """
        count, size = len(changes), self._size
        looked = len(self._uncertain)
        facts = changes[0].new_zeros(count + size + (6 * size + 1) * looked, dtype=torch.float64)
        facts[:count] = torch.stack([(change != 0).any() for change in changes])
        facts[count + self._rank] = rows
        table = facts[count + size : count + size + 6 * size * looked].view(-1, size, 6)
        if rows and looked:
            facts[-looked:] = torch.stack(
                [is_lost(self._before[i], self._live(i), changes[i]) for i in self._uncertain]
            )
        for place, i in enumerate(self._uncertain):
            table[place, self._rank] = torch.cat([_digest(changes[i]), facts_of(changes[i], rows, forwards)])
        dist.all_reduce(facts, group=self._group)
        told = facts.tolist()
        for i, is_so in zip(self._uncertain, told[len(told) - looked :], strict=True):
            if is_so:
                raise TrainingError(lost_text(self._facts[i][0], self._before[i], self._live(i)))
        anywhere, all_rows = [bool(one) for one in told[:count]], [int(one) for one in told[count : count + size]]
        busy = [rank for rank in range(size) if all_rows[rank]]
        ways: dict[int, Way] = {}
        for i in (i for i in range(count) if anywhere[i]):
            of_ranks = table[self._uncertain.index(i)].tolist() if i in self._uncertain else [[0.0] * 6] * size
            way = self._way_of(i, policies, [of_ranks[rank] for rank in busy], [all_rows[rank] for rank in busy], busy)
            if way != "same":
                ways[i] = way
            elif len(busy) < size:
                ways[i] = "first"  # who had no samples gets it from those who had
        return anywhere, all_rows, ways

    def _way_of(
        self, index: int, policies: str, numbers: list[list[float]], rows: list[int], busy: Sequence[int]
    ) -> Way:
        """Return what becomes of a tensor, of the digest and the facts of the `busy` replicas' changes, with their samples."""
        name, policy, is_whole = self._facts[index]
        policy = policy_of(policies, name) if policies and policy == "auto" else policy
        facts = [ChangeFacts.of(one[2:]) for one in numbers]

        def alike(places: Sequence[int]) -> bool:
            return all(numbers[place][:2] == numbers[places[0]][:2] for place in places)

        way, is_told = way_of(name, policy, is_whole, alike, facts, rows, self._counted)
        if is_told:
            self.unlike.add(name)
        if way == "full":
            self._full_rank = busy[with_all_forwards(facts)[0]]
        return way

    def _exchange(self, way: Way, changes: Sequence[Tensor], all_rows: Sequence[int]) -> None:
        """Make of the changes here, each `[N]`, in place what those of all replicas come to.

        Args:
            way: for all of them.
            changes: of one dtype.
            all_rows: samples of each replica.
        """
        flat = torch.cat([change.reshape(-1) for change in changes])
        if way == "average":
            share = all_rows[self._rank] / max(1, sum(all_rows))
            flat = flat * share if flat.is_floating_point() else (flat.double() * share)
        elif way in ("first", "full"):
            first = next((rank for rank, rows in enumerate(all_rows) if rows), 0)
            if self._rank != (self._full_rank if way == "full" else first):
                flat = torch.zeros_like(flat)
        dist.all_reduce(flat, op=dist.ReduceOp.MAX if way == "most" else dist.ReduceOp.SUM, group=self._group)
        parts = flat.split([change.numel() for change in changes])  # type: ignore[no-untyped-call]
        for change, part in zip(changes, parts, strict=True):
            change.copy_(part if part.dtype == change.dtype else part.round())


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor of any shape holds whole numbers or truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _digest(change: Tensor) -> Tensor:
    """Return two numbers by which replicas see whether they changed a tensor alike, `[2]`; the second one minds the places."""
    wide = change.double()
    return torch.stack([wide.sum(), wide @ torch.arange(1, len(wide) + 1, device=wide.device, dtype=torch.float64)])
