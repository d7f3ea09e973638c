"""What would make a run smaller, and by how much: the same arithmetic again with one thing changed.

Only what this version can do, and only what saves something worth a sentence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guava_nb.cluster.traffic import Traffic
from guava_nb.errors import GuavaError
from guava_nb.forecast.forecast import Feeding, Parts, Saving
from guava_nb.forecast.run_facts import RunFacts
from guava_nb.forecast.run_parts import parts_of
from guava_nb.nested import ARRAYS, leaves
from guava_nb.protocol.messages import CacheSpec, ParallelSpec

__all__ = ["looks_like_bytes", "savings"]

#: Below this part of the run a change is not worth a sentence.
_WORTH = 0.02
_CACHE_BYTES = 1 << 30
_SEEN_ELEMENTS = 200_000
_Changes = Iterator[tuple[str, Parts]]


def savings(run: RunFacts, parts: Parts, left: Callable[[Traffic], Traffic]) -> tuple[Saving, ...]:
    """Return what would make the run smaller, the most effective first; `left`: what compression leaves of bytes."""
    per_step = parts.run() is None

    def size(changed: Parts) -> float:
        changed = changed.squeezed(left)
        step = changed.one_step(run.train.batch_rows * changed.accumulation)
        return (changed.run() or step * (1 / changed.accumulation)).total_bytes

    now, times = size(parts), parts.accumulation if per_step else 1
    told = [
        (size(changed), what)
        for change in (_replicas, _exchanges, _as_bytes)
        for what, changed in change(run, parts, left)
    ]
    return tuple(
        Saving(what, round(then * times), per_step) for then, what in sorted(told) if then < (1 - _WORTH) * now
    )


def _replicas(run: RunFacts, parts: Parts, left: Callable[[Traffic], Traffic]) -> _Changes:
    """Changes to whole replicas that meet at the orchestrator."""
    if run.spec.parallel is not None:
        return
    if run.spec.cache is None and len(parts.epochs) > 1 and not run.spec.data:
        cached = parts_of(run.changed(cache=CacheSpec("memory", _CACHE_BYTES)))
        yield "--cache memory (later epochs send only what workers lack)", cached
    if run.spec.precision == "fp64":
        halved = replace(parts, start=parts.start * 0.5, step=parts.step * 0.5, state=parts.state * 0.5)
        yield "--precision fp32 (parameters and gradients of 4 bytes instead of 8)", halved
    if run.workers > 1 and not run.at_orchestrator:
        yield "one worker alone (it exchanges no gradients)", parts_of(replace(run, workers=1))
    if not run.spec.data and run.train.first is not None and not run.train.first.source:
        ids = _rows_times(parts.train, 8 / max(8.0, parts.train.row.total_bytes))
        yield "WorkerData, where every worker has the data itself (only ids travel)", replace(parts, train=ids)


def _exchanges(run: RunFacts, parts: Parts, left: Callable[[Traffic], Traffic]) -> _Changes:
    """Fewer steps and validations; replicas instead of parts, or parts instead of replicas; halves between the parts."""
    times, steps, shape = 4 * parts.accumulation, parts.steps(), run.spec.parallel
    whole_step = parts.one_step(run.train.batch_rows * parts.accumulation)
    if parts.step.total_bytes > _WORTH * whole_step.total_bytes and (
        parts.train.batches is None or parts.train.batches >= times
    ):
        what = f"--accumulate {times} (one exchange for {times} batches: fewer, larger steps)"
        yield what, replace(parts, accumulation=times)
    several = len(parts.epochs) > 1 if parts.val_interval is None else parts.val_interval < (steps or 0)
    if parts.validation is not None and steps is not None and several:
        yield f"--val-interval {steps} (one validation, at the end)", replace(parts, val_interval=steps)
    if run.workers < 2 or run.train.first is None or run.spec.data:
        return
    others: dict[str, dict[str, Any]] = {}
    if shape is None:
        pipeline = ParallelSpec(mode="pipeline", pp=run.workers, micro_batches=4, path="relay")
        others["%guava_mode pipeline"] = {"parallel": pipeline, "sync_batchnorm": False}
    elif shape.mode != "data":
        others["%guava_mode data"] = {"parallel": None, "sync_batchnorm": False}
    if shape is not None and shape.pp > 1 and run.spec.precision == "fp32":
        others["--precision bf16 (halves between the stages)"] = {"precision": "bf16"}
    for what, changes in others.items():
        other = run.changed(**changes)
        if other.spec.parallel is None or (other.spec.criterion is not None and not other.at_orchestrator):
            with contextlib.suppress(GuavaError, RuntimeError):  # a model that cannot be cut, or not be run here
                yield what, parts_of(other)


def _as_bytes(run: RunFacts, parts: Parts, left: Callable[[Traffic], Traffic]) -> _Changes:
    """Floats that look like normalised bytes, sent as bytes; where compression finds that out by itself nothing is gained."""
    squeezed = left(Traffic.going("sample", 1.0)).total_bytes
    share = _byte_share(run)
    if share < squeezed and run.spec.preprocess is None:
        share /= squeezed  # bytes themselves are taken as they are
        val = None if parts.validation is None else _rows_times(parts.validation, share)
        smaller = replace(parts, train=_rows_times(parts.train, share), validation=val)
        yield "uint8 data, and a --preprocess function that makes floats of it on the workers", smaller


def _rows_times(feeding: Feeding, share: float) -> Feeding:
    return replace(feeding, row=feeding.row * share)


# --------------------------------------------------------------------------------------------------- bytes dressed as floats


def _byte_share(run: RunFacts) -> float:
    """Which part of a batch's bytes would be left if floats that look like normalised bytes were sent as bytes."""
    tensors = [] if run.train.first is None else list(_tensors(run.train.first.batch))
    before = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
    after = sum(leaf.numel() * (1 if looks_like_bytes(leaf) else leaf.element_size()) for leaf in tensors)
    return after / before if before else 1.0


def _tensors(batch: Any) -> Iterator[Tensor]:
    for leaf in leaves(batch, ARRAYS):
        if isinstance(leaf, Tensor):
            yield leaf
        elif leaf.dtype.kind == "f":
            yield torch.from_numpy(np.ascontiguousarray(leaf))


def looks_like_bytes(tensor: Tensor) -> bool:
    """Whether floats are evenly spaced steps, 256 of them at most in each channel: images divided by 255, or normalised.

    A tensor of four axes is `[rows, channels, height, width]`; all others, of any shape, have one channel.
    """
    if tensor.dtype not in (torch.float32, torch.float64) or tensor.layout is not torch.strided:
        return False
    channels = tensor.unbind(1) if tensor.ndim == 4 and tensor.shape[1] <= 4 else (tensor,)
    return all(_is_in_steps(channel) for channel in channels)


def _is_in_steps(values: Tensor) -> bool:
    levels = torch.unique(values.detach().reshape(-1)[:_SEEN_ELEMENTS].double())
    if not 8 <= len(levels) <= 256 or not bool(torch.isfinite(levels).all()):
        return False  # with a handful of levels it may be anything: labels, flags, whole numbers
    gaps = levels.diff()
    steps = gaps / gaps.min()
    even = bool(((steps - steps.round()).abs() < 0.02 * steps).all())
    return even and float(steps.sum()) < 255.5
