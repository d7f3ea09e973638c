"""What becomes of a tensor that forwards change and no optimizer does, where replicas changed it by different amounts.

Such tensors are buffers, and parameters that take no gradient (a target network that the forward moves). One process would
have computed the change from the whole batch; each replica computed it from its own samples. Pure rules, used by the hub for
whole replicas and by the ranks of a group alike:

- batch statistics are averaged by samples, and count one step (`sync_batchnorm` makes them exact);
- a change that is the same on all replicas did not depend on the data, and is taken as it is;
- a change of 1 in each forward counts forwards, of which a replica may have had fewer (accumulation of small batches);
- any other that replicas with all forwards of a step have alike, fractions that is, is theirs, and not that of one that had
  fewer; a lone one with all forwards is believed where they had it alike before;
- a change that counts samples (whole numbers that add up to a multiple of each replica's samples) is added up; a person is
  told where such a count does something else later, as a position that goes round its end does;
- else whole numbers are added up, and all others averaged by samples; a person is told, because neither need be right.

The option `buffers` of a run replaces all rules but the first for the buffers that it names.

Shapes: a change is flat, [N]: N elements of the buffer, twice as many where it is complex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from guava_nb.parallel.replicas.bucketing import wire_dtype

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

__all__ = [
    "change_of",
    "POLICIES",
    "ChangeFacts",
    "Way",
    "combined",
    "facts_of",
    "followed_parameters",
    "is_lost",
    "is_statistic",
    "lost_text",
    "numbers",
    "policy_of",
    "taken",
    "unused_in",
    "way_of",
    "with_all_forwards",
]

#: "same": any replica's. "full": that of the first with all forwards. "most": the furthest of whole numbers.
Way = Literal["same", "full", "most", "average", "first", "sum"]

POLICIES = ("auto", "average", "first", "sum")
#: Parameters without gradient of at most so many bytes in all are followed however small the rest is.
_FOLLOWED_BYTES = 64 << 20
#: Larger numbers stand for infinity: what is taken from them loses all of its digits.
_ENDLESS = 1e18
#: Shards whose changes may be added up.
_MANY = 2.0**20
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
#: A value is lost in its change where `taken` misses it by more than this part, and what was there before is at least so large.
_LOST, _LARGE = {torch.float32: 1e-6, torch.float64: 1e-12}, 1e4


class ChangeFacts(NamedTuple):
    """What a replica can say of its own change of one tensor.

    Attributes:
        counts: whole numbers, none below 0, that add up to a multiple of its samples.
        is_one: all of them are 1 in each forward, as of a counter of steps.
        of_several: a forward had more than one sample, so that samples and forwards can be told apart.
        forwards: of its own, since the last step.
    """

    counts: bool
    is_one: bool
    of_several: bool
    forwards: int = 1

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """Return the facts from numbers `[4]`, as `facts_of` gives them."""
        return cls(bool(numbers[0]), bool(numbers[1]), bool(numbers[2]), int(numbers[3]))


def facts_of(change: Tensor, rows: int, forwards: int = 1) -> Tensor:
    """Return the facts of a change `[N]` as numbers, `[4]` float64, on its device; `rows`: samples of these forwards."""
    total, wide = change.sum(dtype=torch.float64), change.double()
    counts = (total >= max(rows, 1)) & (total % max(rows, 1) == 0) & ((wide >= 0) & (wide == wide.round())).all()
    known = counts.new_tensor([rows > forwards, forwards], dtype=torch.float64)
    return torch.cat([torch.stack([counts, (wide == forwards).all()]).double(), known])


def numbers(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor as a flat one, `[N]`, whose differences can be taken: complex numbers as pairs, integers as int64.

    Args:
        tensor: of any shape.
        dtype: of all others; None: their own, and float32 for halves.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor.reshape(-1).to(torch.int64)
    return tensor.reshape(-1).to(dtype or wire_dtype(tensor.dtype))


def change_of(before: Tensor, after: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return by how much a tensor changed, `[N]`, for `taken`.

    What was infinite, NaN or as good as infinite (a causal mask, the least value seen so far, which begins at 1e30) has no
    difference that holds the new value: it stayed, which is 0, or the new value stands for the change.

    Args:
        before, after: of one shape.
        dtype: as for `numbers`.
    """
    old, new = numbers(before, dtype), numbers(after, dtype)
    if not old.is_floating_point():
        return new - old
    stayed, is_endless = (new == old) | (new.isnan() & old.isnan()), ~(old.abs() < _ENDLESS)
    change = new - old.masked_fill(is_endless, 0)
    # Nothing at all means that it stayed, so what becomes 0 has a change that is as good as nothing.
    return change.masked_fill(is_endless & (new == 0), _nearly_nothing(change)).masked_fill(stayed, 0)


def taken(before: Tensor, change: Tensor) -> Tensor:
    """Return a tensor, of the shape and dtype of `before`, after a change `[N]` as `change_of` gives it."""
    now = numbers(before, change.dtype if change.is_floating_point() else None)
    if now.is_floating_point():
        is_new = ~(now.abs() < _ENDLESS) & (change != 0)
        change = change.masked_fill(is_new & (change.abs() <= _MANY * _nearly_nothing(change)), 0)
        now = now.masked_fill(is_new, 0)
    now = now + (change if now.is_floating_point() else change.round() if change.is_floating_point() else change).to(
        now
    )
    if before.is_complex():
        return torch.view_as_complex(now.view(*before.shape, 2)).to(before.dtype)
    return (now.clamp(0, 1) if before.dtype == torch.bool else now).view(before.shape).to(before.dtype)


def _nearly_nothing(change: Tensor) -> float:
    """Return the number of the dtype of a change, of any shape, that stands for "became 0"."""
    return torch.finfo(change.dtype).tiny * _MANY


def is_lost(before: Tensor, after: Tensor, change: Tensor) -> Tensor:
    """Return whether the new value cannot be told from its change, as a truth value `[]` on the device.

    Beside a very large value that a buffer leaves (a sentinel of 1e30) the new one has no digits in their difference; whole
    numbers whose change is larger than 2**53 (2**24) have too many for a float64 (float32).

    Args:
        before, after: of one shape.
        change: as `change_of` gives it, `[N]`, in the dtype in which it travels.
    """
    old, new = numbers(before), numbers(after)
    if not old.is_floating_point():
        return (change.to(torch.int64) != new - old).any()
    if not new.numel():
        return torch.zeros((), dtype=torch.bool, device=new.device)
    got = numbers(taken(before, change))
    size, gap = new.abs().nan_to_num(0, 0, 0).max(), (got - new).abs().nan_to_num(0, 0, 0).max()
    return (gap > _LOST[old.dtype] * size) & (old.abs().nan_to_num(0, 0, 0).max() > _LARGE)


def lost_text(name: str, before: Tensor, after: Tensor) -> str:
    """Say that the new value of a tensor is lost in its change, and what to do; `before` and `after` are of one shape."""
    if not (before.is_floating_point() or before.is_complex()):
        step = float((numbers(after).double() - numbers(before).double()).abs().max())
        return (
            f"buffer {name!r} of whole numbers changes by {step:.3g} in one step, and so large a change does not travel exactly "
            "between workers: keep its upper and lower digits in two buffers, or train with one worker"
        )
    old, new = (float(numbers(one).abs().nan_to_num(0, 0, 0).max()) for one in (before, after))
    return (
        f"buffer {name!r} goes from values of {old:.3g} to values of {new:.3g} in one step. What travels between workers is by "
        "how much it changes, and beside so large a number the new value is lost in it: let it begin at inf or -inf, which are "
        "treated apart, or at a number of its usual size, or train with one worker"
    )


def followed_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters without gradient whose changes in a forward are followed, as those of buffers are.

    That takes a copy of each. A network that the forward moves after another one is not larger than that one, so all are
    followed where they are not larger than what is trained, or small; else none, and a change is refused.
    """
    named = list(model.named_parameters())
    trained = sum(p.nbytes for _, p in named if p.requires_grad)
    frozen = [(name, p) for name, p in named if not p.requires_grad]
    return frozen if trained and sum(p.nbytes for _, p in frozen) <= max(trained, _FOLLOWED_BYTES) else []


def is_statistic(name: str) -> bool:
    """Whether a tensor of this full name is kept by a layer that normalises."""
    return name.rpartition(".")[2] in _STATISTICS


def policy_of(buffers: str, name: str) -> str:
    """Return what the option `buffers` says of a tensor: the first of its parts that fits.

    Args:
        buffers: a policy for all, or parts "pattern=policy" with commas between them, as in "vq.*=first,hist=sum".
        name: full name.

    Raises:
        ValueError: a part is neither.
    """
    found = ""
    for part in buffers.split(","):
        pattern, _, policy = part.strip().rpartition("=")
        if policy.strip() not in POLICIES:
            raise ValueError(f"{part.strip()!r} is not one of {', '.join(POLICIES)}, nor NAME=one of them")
        if not found and fnmatchcase(name, pattern.strip() or "*"):
            found = policy.strip()
    return found or "auto"


def unused_in(buffers: str, model: nn.Module) -> list[str]:
    """Return the patterns of the option `buffers` that fit no buffer of a model, and no parameter that is followed as one."""
    names = [name for name, _ in model.named_buffers()] + [name for name, _ in followed_parameters(model)]
    patterns = (part.strip().rpartition("=")[0].strip() for part in buffers.split(","))
    return [one for one in patterns if one and not any(fnmatchcase(name, one) for name in names)]


def way_of(
    name: str,
    policy: str,
    whole_numbers: bool,
    alike: Callable[[Sequence[int]], bool],
    facts: list[ChangeFacts],
    rows: list[int],
    counted: dict[str, bool],
) -> tuple[Way, bool]:
    """Return what becomes of a tensor, and whether a person must be told that it may be wrong.

    Args:
        name, policy: of the tensor.
        whole_numbers: integers or truth values.
        alike: whether the replicas at these places changed it by the same.
        facts, rows: of each replica that had samples.
        counted: by name, whether a tensor counted samples where that could be told from a count of steps; added to.
    """
    if is_statistic(name):
        return ("most" if whole_numbers else "average"), False
    if policy != "auto":
        return policy, False  # type: ignore[return-value]
    counts, is_one, known = all(one.counts for one in facts), all(one.is_one for one in facts), counted.get(name)
    # One sample each says nothing, and a count of steps may happen to fit the samples of a smaller batch.
    of_several = any(one.of_several for one in facts)
    if counts and known is not False and (known or (of_several and not is_one)):
        counted.update({name: True} if len(rows) > 1 else {})
        return "sum", False
    if alike(range(len(rows))):
        if not counts and len(rows) > 1:
            counted.setdefault(name, False)
        is_either = counts and known is None and not of_several and len(rows) > 1 and max(rows) > 1
        return "same", is_either or (whole_numbers and bool(known) and not is_one)
    if is_one and (of_several or known is False):
        return "most", False
    full = with_all_forwards(facts)
    if not whole_numbers and len(full) < len(rows) and alike(full):
        return "full", len(full) == 1 and known is not False
    return ("sum" if whole_numbers else "average"), True


def with_all_forwards(facts: Sequence[ChangeFacts]) -> list[int]:
    """Return the places of the replicas that made as many forwards as any."""
    most = max(one.forwards for one in facts)
    return [place for place, one in enumerate(facts) if one.forwards == most]


def combined(way: Way, changes: list[Tensor], rows: list[int], forwards: Sequence[int]) -> Tensor:
    """Return one change, `[N]`, of all replicas' changes, in their dtype; it shares no memory with them.

    Args:
        way: as `way_of` returned it.
        changes: of each replica that had samples, each `[N]`.
        rows, forwards: samples and forwards of each of these.
    """
    if way in ("same", "first"):
        return changes[0].clone()
    if way == "full":
        return changes[forwards.index(max(forwards))].clone()
    stacked = torch.stack(changes)
    if way == "sum":
        return stacked.sum(0)
    if way == "most":
        return stacked.amax(0)
    shares = torch.tensor(rows, dtype=torch.float64) / sum(rows)
    return (stacked * shares.to(stacked.dtype).view(-1, *[1] * changes[0].dim())).sum(0)
