"""Whether a split of a module gives the same numbers, tried before anything is trained.

No rule about names or classes knows what a user's forward does between two layers. So the split is run: as many
threads as there will be ranks each get a copy of the module, split for their rank, and random inputs in float64, in
both modes and of several sizes; outputs, every gradient, all buffers and what the forward leaves in attributes are compared
with the whole module's. What fails is not split that way. What only other numbers would show is for tensor_check.py.

Shapes: W the width that the module takes; the random input is [2, 5, W] or [3, W], float64.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from guava_nb.nested import leaves
from guava_nb.parallel.module_state import unheard
from guava_nb.parallel.tensor.without_randomness import WithoutRandomness

__all__ = ["SplitTrial", "try_split"]

_CLOSE = 1e-8
_WAIT_S = 60.0
_MAX_BYTES = 1 << 31
#: Whose modules leave nothing in attributes that a user reads: torch's, and the layers here.
_NOT_USERS = ("torch.nn", "guava_nb.")
#: Whether training, and what the random input is multiplied with. Training last, so that its state counts in both.
_TRIES = ((False, 1.0), (True, 1.0), (True, 0.01), (True, 30.0), (False, 30.0), (False, 0.01), (True, 1.0))

#: Splits a module, in place, for one rank; returns local parameter name to the slice function of its full tensor.
Split = Callable[[nn.Module, "_ThreadRanks"], Callable[[str, Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class SplitTrial:
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
        """Return the sum of all threads' tensors, of the tensor's own shape."""
        return torch.stack(self._meet(tensor)).sum(dim=0)

    def collect(self, tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Return every thread's `[..., lengths[r]]`, in rank order."""
        return self._meet(tensor)

    def _meet(self, tensor: Tensor) -> list[Tensor]:
        """Wait for all threads, and return what every thread gave, of its shape and without its graph, in rank order."""
        self.meeting.slots[self.rank] = tensor.detach()
        self.meeting.barrier.wait()
        of_all = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return of_all


@dataclass(slots=True)
class _Run:
    """One forward and backward.

    Attributes:
        output: all floating-point outputs, one after the other, `[numel]`.
        gradients: of parameters by name, and of the input as "<input>"; each of its tensor's shape.
        buffers: by name, after the forward.
        left: what the forward left in attributes, by path.
    """

    output: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    left: dict[str, Tensor]

    @property
    def finite(self) -> bool:
        tensors = [self.output, *(g for g in self.gradients.values() if g is not None)]
        return all(bool(torch.isfinite(t).all()) for t in tensors)


@dataclass(slots=True)
class _Story:
    """What one rank saw, or the whole module: all runs one after the other, as state may go from one to the next."""

    runs: list[_Run] = field(default_factory=list)
    problem: Exception | None = None
    cut: Callable[[str, Tensor], Tensor] | None = None


def try_split(module: nn.Module, width: int, ranks: int, split: Split) -> SplitTrial:
    """Try a split, in training and in evaluation mode, on small, usual and large numbers.

    Args:
        module: whole; it is not changed.
        width: last dim of its input.
        ranks: how many will share it.
        split: how each rank's copy is made from a whole one.
    """
    if 8 * sum(p.numel() for p in module.parameters()) * (ranks + 2) > _MAX_BYTES:
        return SplitTrial(False, False)
    try:
        original = copy.deepcopy(module).cpu().double()
    except Exception:  # A user's attribute that cannot be copied: the module cannot be tried.
        return SplitTrial(False, False)
    generator = torch.Generator().manual_seed(0)
    found: list[SplitTrial] = []
    with torch.random.fork_rng([]):
        # Both shapes, since a norm over dim 1 is one over the features of the second only.
        for shape in ((2, 5, width), (3, width)):
            for count in (1, 3):
                given = torch.randn(shape, generator=generator, dtype=torch.float64)
                whole = _Story()
                _tell(whole, copy.deepcopy(original), given, count)
                if whole.problem is None:
                    found.append(_compare(whole, _split_stories(original, given, count, ranks, split)))
                    break
            if found and not found[-1].equal:
                break
    alike = bool(found) and all(one.equal and one.partial == found[0].partial for one in found)
    return SplitTrial(bool(found), alike, found[0].partial if alike else ())


def _tell(story: _Story, module: nn.Module, given: Tensor, count: int) -> None:
    """Run a module on `given * scale`, `[..., F]`, for every try in turn; what is raised becomes the story's problem."""
    try:
        with unheard():
            for training, scale in _TRIES:
                story.runs.append(_run(module.train(training), given * scale, count))
    except Exception as problem:  # Whatever a user's forward raises on a strange input: it cannot be tried.
        story.problem = problem


def _run(module: nn.Module, given: Tensor, count: int) -> _Run:
    """Run forward and backward once.

    Args:
        module: whole or split.
        given: input, `[2, 5, W]` or `[3, W]`; handed over `count` times, as query, key and value are.
        count: of the module's arguments.
    """
    module.zero_grad()
    before = _attributes(module)
    leaf = given.clone().requires_grad_()
    with torch.enable_grad():
        with WithoutRandomness():
            outputs = [t for t in leaves(module(*[leaf] * count)) if t.is_floating_point()]
        weights = torch.Generator().manual_seed(1)
        total = sum((o * torch.randn(o.shape, generator=weights, dtype=o.dtype)).sum() for o in outputs)
        assert isinstance(total, Tensor)
        with WithoutRandomness():
            total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    output = torch.cat([o.detach().reshape(-1) for o in outputs])
    return _Run(output, {**gradients, "<input>": leaf.grad}, buffers, _left(before, _attributes(module)))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What the user's modules hold in attributes, by path: a loss or a step may read it there after a forward."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        if not type(part).__module__.startswith(_NOT_USERS):
            own = {key: value for key, value in vars(part).items() if not key.startswith("_") and key != "training"}
            found.update((f"{name}.{key}", one) for key, one in own.items() if type(one) in (int, float))
            found.update(
                (f"{name}.{key}.{number}", leaf) for key in own for number, leaf in enumerate(leaves(own[key]))
            )
    return found


def _left(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that attributes hold after a forward, and the numbers that it has changed there."""
    numbers = {n: v for n, v in after.items() if type(v) in (int, float) and before.get(n) != v}
    tensors = {
        n: v.detach().clone() for n, v in after.items() if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)
    }
    return tensors | {n: torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()}


def _split_stories(original: nn.Module, given: Tensor, count: int, ranks: int, split: Split) -> list[_Story]:
    """Run the split module in one thread a rank; `given` and `count` as in `_run`.

    Returns:
        What each rank saw, by rank.
    """
    meeting = _Meeting(threading.Barrier(ranks, timeout=_WAIT_S), [given] * ranks)
    stories = [_Story(problem=TimeoutError("did not end")) for _ in range(ranks)]

    def one(rank: int) -> None:
        story = _Story()
        try:
            part = copy.deepcopy(original)
            story.cut = split(part, _ThreadRanks(rank, ranks, meeting))
            _tell(story, part, given, count)
        except Exception as problem:  # The split does not fit this module.
            story.problem = problem
        if story.problem is not None:
            meeting.barrier.abort()  # the others must not wait for it
        stories[rank] = story

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stories


def _compare(whole: _Story, stories: list[_Story]) -> SplitTrial:
    cuts = [story.cut for story in stories if story.problem is None and story.cut is not None]
    if len(cuts) < len(stories):
        return SplitTrial(True, False)
    partial: set[str] = set()
    alike: set[str] = set()
    for number, run in enumerate(whole.runs):
        if not run.finite and _TRIES[number][1] != 1.0:
            continue  # too large for this module: nothing to compare
        parts = [story.runs[number] for story in stories]
        if not all(_close(part.output, run.output) and _same_state(part, run) for part in parts):
            return SplitTrial(True, False)
        for name in run.gradients:
            whole_here, summed = _gradient(name, run, parts, cuts)
            if not whole_here and not summed:
                return SplitTrial(True, False)
            alike |= {name} if not summed else set()
            partial |= {name} if not whole_here else set()
    # Zero is both; but what is a sum on one input and whole on another is nothing that could be relied on.
    return SplitTrial(True, not alike & partial, tuple(name for name in whole.runs[0].gradients if name in partial))


def _gradient(
    name: str, whole: _Run, runs: list[_Run], cuts: Sequence[Callable[[str, Tensor], Tensor]]
) -> tuple[bool, bool]:
    """Return whether every rank has the true gradient, of its part's shape, and whether the ranks' gradients add up to it."""
    wanted = whole.gradients[name]
    parts = [run.gradients[name] for run in runs]
    have = [part for part in parts if part is not None]
    if wanted is None or len(have) < len(parts):
        has_none = wanted is None and not have
        return has_none, has_none
    if name == "<input>":
        return all(_close(part, wanted) for part in have), False
    alike = all(_close(part, cut(name, wanted)) for part, cut in zip(have, cuts, strict=True))
    return alike, all(part.shape == wanted.shape for part in have) and _close(torch.stack(have).sum(0), wanted)


def _same_state(part: _Run, whole: _Run) -> bool:
    mine, its = ({**run.buffers, **run.left} for run in (part, whole))
    return mine.keys() == its.keys() and all(_close(mine[name], value) for name, value in its.items())


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether tensors have one shape and differ by at most 1e-8 of the largest number; whole numbers must be equal."""
    if a.shape != b.shape:
        return False
    if not (b.is_floating_point() or b.is_complex()):
        return torch.equal(a, b)
    return bool(((a - b).abs() <= _CLOSE * (1 + b.abs().max() if b.numel() else 1)).all())
