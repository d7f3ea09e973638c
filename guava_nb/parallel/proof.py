"""Whether a split of a module gives the same numbers, tried before anything is trained.

No rule about names or classes knows what a user's forward does between two layers. So the split is run: as many
threads as there will be ranks each get a copy of the module, split for their rank, and a random input in float64;
outputs and every gradient are compared with the whole module's. What fails is not split that way.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from guava_nb.parallel.touch import tensors_in

__all__ = ["Proof", "prove"]

_CLOSE = 1e-8
_WAIT_S = 60.0
_MAX_BYTES = 1 << 31

#: Splits a module, in place, for one rank; returns local parameter name to the slice function of its full tensor.
Split = Callable[[nn.Module, "_ThreadRanks"], Callable[[str, Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class Proof:
    """What the try showed.

    Attributes:
        ran: the whole module could be run on a random input.
        equal: the split one gave the same numbers.
        partial: whole parameters whose gradients are the sum over the ranks.
    """

    ran: bool
    equal: bool
    partial: tuple[str, ...] = ()


@dataclass(slots=True)
class _Meeting:
    barrier: threading.Barrier
    slots: list[Tensor]


@dataclass(slots=True)
class _ThreadRanks:
    """Ranks that are threads of this process; see `tensor_ops.Ranks`."""

    rank: int
    size: int
    meeting: _Meeting

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._meet(tensor)).sum(dim=0)

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        return self._meet(tensor)

    def _meet(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.slots[self.rank] = tensor.detach()
        self.meeting.barrier.wait()
        everybody = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return everybody


@dataclass(slots=True)
class _Run:
    output: Tensor
    gradients: dict[str, Tensor | None]
    problem: Exception | None = None
    cut: Callable[[str, Tensor], Tensor] | None = field(default=None)


def prove(module: nn.Module, width: int, ranks: int, split: Split) -> Proof:
    """Try a split.

    Args:
        module: whole; it is not changed.
        width: last dim of its input.
        ranks: how many will share it.
        split: how each rank's copy is made from a whole one.
    """
    if 8 * sum(p.numel() for p in module.parameters()) * (ranks + 1) > _MAX_BYTES:
        return Proof(False, False)
    original = copy.deepcopy(module).to("cpu", torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 5, width), (3, width)):
        for count in (1, 3):
            given = torch.randn(shape, generator=generator, dtype=torch.float64)
            whole = _attempt(original, given, count)
            if whole.problem is None:
                return _compare(whole, _split_runs(original, given, count, ranks, split))
    return Proof(False, False)


def _attempt(module: nn.Module, given: Tensor, count: int) -> _Run:
    try:
        return _run(module, given, count)
    except Exception as problem:  # Whatever a user's forward raises on a strange input: it cannot be tried.
        return _Run(given, {}, problem)


def _run(module: nn.Module, given: Tensor, count: int) -> _Run:
    module.zero_grad()
    leaf = given.clone().requires_grad_()
    with torch.enable_grad():
        outputs = [t for t in tensors_in(module(*[leaf] * count)) if t.is_floating_point()]
        weights = torch.Generator().manual_seed(1)
        total = sum((o * torch.randn(o.shape, generator=weights, dtype=o.dtype)).sum() for o in outputs)
        assert isinstance(total, Tensor)
        total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return _Run(torch.cat([o.detach().reshape(-1) for o in outputs]), {**gradients, "<input>": leaf.grad})


def _split_runs(original: nn.Module, given: Tensor, count: int, ranks: int, split: Split) -> list[_Run]:
    meeting = _Meeting(threading.Barrier(ranks, timeout=_WAIT_S), [given] * ranks)
    runs: list[_Run] = [_Run(given, {}, TimeoutError("did not end"))] * ranks

    def one(rank: int) -> None:
        try:
            part = copy.deepcopy(original)
            cut = split(part, _ThreadRanks(rank, ranks, meeting))
            runs[rank] = _run(part, given, count)
            runs[rank].cut = cut
        except Exception as problem:  # The split does not fit this forward; the others must not wait for it.
            meeting.barrier.abort()
            runs[rank] = _Run(given, {}, problem)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return runs


def _compare(whole: _Run, runs: list[_Run]) -> Proof:
    if any(run.problem is not None or not _close(run.output, whole.output) for run in runs):
        return Proof(True, False)
    partial = []
    for name, gradient in whole.gradients.items():
        parts = [run.gradients[name] for run in runs]
        if gradient is None or any(part is None for part in parts):
            if gradient is not None or any(part is not None for part in parts):
                return Proof(True, False)
            continue
        wanted = [gradient if name == "<input>" or not run.cut else run.cut(name, gradient) for run in runs]
        if all(_close(part, want) for part, want in zip(parts, wanted, strict=True)):  # type: ignore[arg-type]
            continue
        whole_here = all(part is not None and part.shape == gradient.shape for part in parts)
        if name == "<input>" or not whole_here or not _close(torch.stack(parts).sum(0), gradient):  # type: ignore[arg-type]
            return Proof(True, False)
        partial.append(name)
    return Proof(True, True, tuple(partial))


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(((a - b).abs() <= _CLOSE * (1 + b.abs().max() if b.numel() else 1)).all())
