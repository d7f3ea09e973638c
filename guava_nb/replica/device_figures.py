"""Numbers of a step on their way from the device: one copy, begun at once, read when they are needed.

Knows tensors of numbers; knows nothing of what they mean. Reading waits for what the device was given before the copy; who
reads after giving it the next step's work waits for nothing that the device would not do anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["DeviceFigures", "FlopCount", "StepTimer", "norms", "square_sum"]

# Floating point operations of a sample, forward and backward, by torch's own counter; one shard of a run is counted.


class FlopCount:
    """Counts once.

    Args:
        wanted: without it nothing is counted and nothing costs anything.

    Attributes:
        per_sample: operations of one sample; None until counted. Matrix products, convolutions and attention count, as torch's
            `FlopCounterMode` knows them; sums and activations are few beside them.
    """

    def __init__(self, wanted: bool) -> None:
        """Count the first shard that comes."""
        self._wanted = wanted
        self.per_sample: float | None = None

    @contextmanager
    def around(self, rows: int) -> Iterator[None]:
        """Count what is done inside, on so many samples, unless it was counted before. Results are the same."""
        if not self._wanted or self.per_sample is not None or not rows:
            yield
            return
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield
        self.per_sample = counter.get_total_flops() / rows


# Seconds of forward and backward on any device.
#
# Knows devices' clocks. On CUDA the host runs ahead of the device, so the device's own events are read, after the work
# that waits for them anyway.


class StepTimer:
    """Adds up the time of the blocks it measures."""

    def __init__(self, device: torch.device) -> None:
        """Measure on this device."""
        self._device = device if device.type == "cuda" else None
        self._seconds = [0.0, 0.0]
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Measure a block of forward."""
        started = self._now()
        yield
        self._add(0, started)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Measure a block of backward."""
        started = self._now()
        yield
        self._add(1, started)

    def read(self) -> tuple[float, float]:
        """Return the seconds of forward and of backward so far; on CUDA waits for the device."""
        for which, start, end in self._events:
            end.synchronize()
            self._seconds[which] += start.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds[0], self._seconds[1]

    def _now(self) -> float | torch.cuda.Event:
        return time.perf_counter() if self._device is None else self._record()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, which: int, started: float | torch.cuda.Event) -> None:
        if isinstance(started, float):
            self._seconds[which] += time.perf_counter() - started
        else:
            self._events.append((which, started, self._record()))


class DeviceFigures:
    """Some real numbers, tensors of any shape or plain ones.

    Attributes:
        bad: a float32 scalar on the device: 1 where one of the tensors has NaN or Inf, else 0; None without tensors.
    """

    def __init__(self, figures: Sequence[Tensor | float], gates: bool = False) -> None:
        """Begin the copy.

        Args:
            figures: to be read: tensors of any shape, on one device, or plain numbers.
            gates: make `bad`, for what shall happen on the device before they are read.
        """
        self._plain = [None if isinstance(one, Tensor) else float(one) for one in figures]
        self._tensors = [one.detach().reshape(-1) for one in figures if isinstance(one, Tensor)]
        self.bad: Tensor | None = None
        self._host, self._arrived = list[Tensor](), None
        if not self._tensors:
            return
        if gates or self._tensors[0].device.type == "cuda":
            flat = torch.cat([one.double() for one in self._tensors])
            if gates:
                self.bad = (~flat.isfinite().all()).float()
            # To the CPU without waiting: torch makes pinned memory for it, and the event tells when it is filled.
            self._host = list(flat.to("cpu", non_blocking=True).split([one.numel() for one in self._tensors]))  # type: ignore[no-untyped-call]
            if flat.device.type == "cuda":
                self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._arrived.record(torch.cuda.current_stream(flat.device))
        else:
            self._host = self._tensors
        self._tensors = []

    def read(self) -> list[list[float]]:
        """Return the numbers of each figure; on CUDA waits until they have come."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        come = iter(self._host)
        return [next(come).tolist() if one is None else [one] for one in self._plain]


def norms(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return a norm of each tensor, `[tensors]`, which is NaN or Inf just where the tensor has one; None of no tensors.

    One pass without temporaries, and on CUDA without waiting.
    """
    given = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    given = [
        one.float() if one.is_floating_point() and one.itemsize < 2 else one for one in given
    ]  # torch has none of float8
    if not given:
        return None
    places = [i for i, one in enumerate(given) if one.is_floating_point() and one.numel()]
    is_cuda = given[0].is_cuda
    if is_cuda and len(places) == len(given):
        return torch.stack(torch._foreach_norm(given, torch.inf))
    zero = torch.zeros((), device=given[0].device)
    found = [zero] * len(given)  # what whole numbers have, and what is empty
    # The largest value never overflows; the sum of squares may, and is many times faster on a processor.
    of_places = torch._foreach_norm([given[i] for i in places], torch.inf if is_cuda else 2) if places else ()
    sizes = [0.0] * len(of_places) if is_cuda else [float(one) for one in of_places]
    for i, one, size in zip(places, of_places, sizes, strict=True):
        found[i] = one if math.isfinite(size) else torch.linalg.vector_norm(given[i], torch.inf)
    return torch.stack(found)


def square_sum(tensors: Sequence[Tensor], sizes: Tensor | None) -> Tensor:
    """Return the sum of the squares of all numbers, a scalar `[]` that is finite whatever they are; without waiting.

    Args:
        tensors: of any shape.
        sizes: what `norms` gave of tensors that begin with these, `[tensors or more]`.
    """
    if not tensors or sizes is None:
        return torch.zeros(())
    each = sizes[: len(tensors)]
    if sizes.is_cuda:  # where those are the largest values
        real = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
        each = torch.stack(torch._foreach_norm([one for one in real if one.is_floating_point()], 2))
    return torch.nan_to_num(each.double().square().sum(), 0.0, 0.0, 0.0)
