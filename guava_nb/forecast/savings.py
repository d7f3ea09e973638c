"""What would make a run smaller, and by how much: the same arithmetic again with one thing changed.

Only what this version can do, and only what saves something worth a sentence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from guava_nb.cluster.traffic import Traffic
from guava_nb.errors import GuavaError
from guava_nb.forecast.forecast import Feeding, Parts, Saving
from guava_nb.forecast.star_bytes import Sizes, star_parts
from guava_nb.forecast.state_bytes import Asked
from guava_nb.nested import ARRAYS, leaves
from guava_nb.protocol.messages import CacheSpec, ParallelSpec, RunSpec

__all__ = ["looks_like_bytes", "savings"]

#: Below this part of the run a change is not worth a sentence.
_WORTH = 0.02
_CACHE_BYTES = 1 << 30
_SEEN_ELEMENTS = 200_000


def savings(
    asked: Asked,
    parts: Parts,
    resolve: Callable[[str], Any],
    train: Sizes,
    val: Sizes | None,
    left: Callable[[Traffic], Traffic],
) -> tuple[Saving, ...]:
    """Return what would make the run smaller, the most effective first; `left`: what compression leaves of bytes."""

    def size(changed: Parts) -> float:
        run = changed.squeezed(left).run()
        one = changed.squeezed(left).one_step(train.batch_rows * changed.accumulation) if run is None else run
        return one.total_bytes / (1 if run is not None else changed.accumulation)

    now = size(parts)
    squeezed = left(Traffic.going("sample", 1.0)).total_bytes
    others = [*_others(asked, parts, resolve, train, val), *_as_bytes(asked, parts, train, squeezed)]
    told = [(what, size(changed)) for what, changed in others]
    told = sorted(((what, then) for what, then in told if now and then < (1 - _WORTH) * now), key=lambda item: item[1])
    times = 1 if parts.run() is not None else parts.accumulation
    return tuple(Saving(what, round(then * times), per_step=parts.run() is None) for what, then in told)


def _as_bytes(asked: Asked, parts: Parts, train: Sizes, squeezed: float) -> Iterator[tuple[str, Parts]]:
    """Floats that look like normalised bytes, sent as bytes; where compression finds that out by itself nothing is gained."""
    share = _byte_share(train)
    if share < squeezed and asked.spec.preprocess is None:
        share /= squeezed  # bytes themselves are taken as they are
        smaller = replace(parts, train=_rows_times(parts.train, share), validation=_rows_times(parts.validation, share))
        yield "uint8 data, and a --preprocess function that makes floats of it on the workers", smaller


def _others(
    asked: Asked, parts: Parts, resolve: Callable[[str], Any], train: Sizes, val: Sizes | None
) -> Iterator[tuple[str, Parts]]:
    if asked.spec.parallel is None:
        yield from _other_stars(asked, parts, resolve, train, val)
    if parts.step.total_bytes > _WORTH * parts.one_step(train.batch_rows * parts.accumulation).total_bytes:
        times = 4 * parts.accumulation
        if parts.train.batches is None or parts.train.batches >= times:
            what = f"--accumulate {times} (one exchange for {times} batches: fewer, larger steps)"
            yield what, replace(parts, accumulation=times)
    yield from _less_validation(parts)
    yield from _other_modes(asked, parts, resolve, train, val)


def _other_modes(
    asked: Asked, parts: Parts, resolve: Callable[[str], Any], train: Sizes, val: Sizes | None
) -> Iterator[tuple[str, Parts]]:
    """Replicas instead of parts, or parts instead of replicas; and halves between the parts."""
    spec, shape = asked.spec, asked.spec.parallel
    if asked.workers < 2 or not train.groups or spec.data:
        return
    if shape is not None and shape.mode != "data":
        yield "%guava_mode data", star_parts(asked.with_spec(_shaped(spec, None)), resolve, train, val)
    wanted = ParallelSpec(mode="pipeline", pp=asked.workers, micro_batches=4, path="relay")
    others = {} if shape is not None else {"%guava_mode pipeline": _shaped(spec, wanted)}
    if shape is not None and shape.pp > 1 and spec.precision == "fp32":
        others["--precision bf16 (halves between the stages)"] = msgspec.structs.replace(spec, precision="bf16")
    from guava_nb.forecast.group_bytes import group_parts  # torch's parallel libraries cost a second to load

    for what, other in others.items():
        if other.criterion is not None and other.optimizer_site == "workers":
            with contextlib.suppress(GuavaError, RuntimeError):  # a model that cannot be cut, or not be run here
                yield what, group_parts(asked.with_spec(other), resolve, train, val)


def _shaped(spec: RunSpec, shape: ParallelSpec | None) -> RunSpec:
    return msgspec.structs.replace(spec, parallel=shape, sync_batchnorm=False)


def _other_stars(
    asked: Asked, parts: Parts, resolve: Callable[[str], Any], train: Sizes, val: Sizes | None
) -> Iterator[tuple[str, Parts]]:
    spec = asked.spec
    if spec.cache is None and len(parts.epochs) > 1 and not spec.data:
        cached = msgspec.structs.replace(spec, cache=CacheSpec("memory", _CACHE_BYTES))
        then = star_parts(asked.with_spec(cached), resolve, train, val)
        yield "--cache memory (later epochs send only what workers lack)", then
    if spec.precision == "fp64":
        halved = replace(parts, start=parts.start * 0.5, step=parts.step * 0.5, state=parts.state * 0.5)
        yield "--precision fp32 (parameters and gradients of 4 bytes instead of 8)", halved
    if asked.workers > 1 and spec.optimizer_site == "workers":
        then = star_parts(replace(asked, workers=1), resolve, train, val)
        yield "one worker alone (it exchanges no gradients)", then
    if not spec.data and train.groups and not train.groups[0][0].source:
        ids = _rows_times(parts.train, 8 / max(8.0, parts.train.row.total_bytes))
        yield "WorkerData, where every worker has the data itself (only ids travel)", replace(parts, train=ids)


def _less_validation(parts: Parts) -> Iterator[tuple[str, Parts]]:
    steps = parts.steps()
    if parts.validation is None or steps is None:
        return
    once = replace(parts, val_interval=steps)
    if parts.val_interval is None and len(parts.epochs) > 1 or parts.val_interval and parts.val_interval < steps:
        yield f"--val-interval {steps} (one validation, at the end)", once


def _rows_times(feeding: Any, share: float) -> Any:
    if feeding is None:
        return None
    assert isinstance(feeding, Feeding)
    return replace(feeding, row=feeding.row * share)


# --------------------------------------------------------------------------------------------------- bytes dressed as floats


def _byte_share(sizes: Sizes) -> float:
    """Which part of a batch's bytes would be left if floats that look like normalised bytes were sent as bytes."""
    if not sizes.groups:
        return 1.0
    tensors = list(_tensors(sizes.groups[0][0].batch))
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

    The channel of a tensor of four axes is the second one; all other tensors have one.
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
