"""Which gradients travel together, and when they are complete: for every exchange that begins while backward still runs.

Knows parameters and their hooks; knows no sums and no network.

When is a gradient complete? Normally a parameter's hook fires once in a backward, however often the forward used it.
Reentrant activation checkpointing runs backwards inside the backward, and then a hook fires several times. So the first
backward only counts; later ones wait for as many firings. A gradient that grows after its bucket is gone would be a
silent error: it raises, and from then on no bucket is reported before backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from guava_nb.errors import TrainingError

__all__ = ["CompletionCounter", "NamedParameters", "plan_buckets", "wire_dtype"]

#: The parameters of one bucket, with their names, in the order in which they lie in the flat tensor.
NamedParameters = list[tuple[str, nn.Parameter]]


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient of `dtype` travels and is summed.

    Shorter ones than float32 and complex64 as these, all others as they are.
    """
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def plan_buckets(named: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[NamedParameters]:
    """Cut trainable parameters into buckets of about `bucket_bytes`, each of one wire dtype and one device.

    Parameters stand in reverse order, because backward reaches the last ones first, and buckets in the order in which
    they were filled, so bucket 0 is the first to be complete. Frozen parameters are left out. A parameter that is larger
    than `bucket_bytes` has a bucket of its own.
    """
    closed: list[NamedParameters] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[NamedParameters, int]] = {}
    for name, parameter in reversed(list(named)):
        if not parameter.requires_grad:
            continue
        dtype = wire_dtype(parameter.dtype)
        kind, nbytes = (dtype, parameter.device), parameter.numel() * dtype.itemsize
        bucket, filled = filling.get(kind, ([], 0))
        if bucket and filled + nbytes > bucket_bytes:
            closed.append(bucket)
            del filling[kind]
            bucket, filled = [], 0
        bucket.append((name, parameter))
        filling[kind] = bucket, filled + nbytes
    return closed + [bucket for bucket, _ in filling.values()]


class CompletionCounter:
    """Tells during backward when all gradients of a bucket are complete; between `end` and `begin` it does nothing.

    Attributes:
        missing: for each bucket, how many of its gradients are not complete in this backward.
        sent: numbers of the buckets whose gradients were taken during this backward; the caller that takes them adds the number.
    """

    def __init__(
        self,
        buckets: Sequence[NamedParameters],
        on_complete: Callable[[int], None],
        on_gradient: Callable[[], None] | None = None,
    ) -> None:
        """Register nothing yet.

        Args:
            buckets: as `plan_buckets` gives them.
            on_complete: called with a bucket's number when its last gradient is complete; on CUDA in autograd's thread.
            on_gradient: called at each firing of a hook, before it counts.
        """
        self._buckets, self._on_complete, self._on_gradient = buckets, on_complete, on_gradient
        self._needed = [[1] * len(bucket) for bucket in buckets]
        self._fired: list[list[int]] = []  # in the backward that runs; empty between two
        self.missing: list[int] = []
        self.sent: set[int] = set()
        self._counted = False  # some backward has told how often each hook fires
        self._may_be_early = True
        self._early = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def install(self) -> None:
        """Put hooks on the parameters, where there are none yet."""
        if self._hooks:
            return
        for number, bucket in enumerate(self._buckets):
            for position, (_, parameter) in enumerate(bucket):
                if parameter.requires_grad:  # the user may have frozen it since
                    hook = self._hook(number, position)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Leave the parameters as they were found."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def begin(self, early: bool = True) -> None:
        """Count the backward that is about to start.

        Args:
            early: report complete buckets, unless this is the first backward; False only counts.
        """
        self._early = early and self._counted and self._may_be_early
        self._fired = [[0] * len(needed) for needed in self._needed]
        self.missing = [len(needed) for needed in self._needed]
        self.sent.clear()

    def end(self) -> None:
        """The backward is over: learn how often each hook fired. Does nothing where `begin` was not called."""
        for needed, fired in zip(self._needed, self._fired, strict=False):
            needed[:] = map(max, needed, fired)
            self._counted = self._counted or any(fired)
        self.cancel()

    def cancel(self) -> None:
        """Forget the backward that runs."""
        self._fired, self._early = [], False

    def _hook(self, number: int, position: int) -> Callable[[Tensor], None]:
        # Runs once per parameter and step: a step of a small model has no time for more.
        needed, on_gradient, sent = self._needed[number], self._on_gradient, self.sent

        def on_fired(parameter: Tensor) -> None:
            if not self._fired:
                return
            if number in sent:
                self._too_late(number, position)
            if on_gradient is not None:
                on_gradient()
            fired = self._fired[number]
            fired[position] += 1
            if fired[position] == needed[position]:
                self.missing[number] -= 1
                if self.missing[number] == 0 and self._early:
                    self._on_complete(number)

        return on_fired

    def _too_late(self, number: int, position: int) -> None:
        self._may_be_early = self._early = False
        name, _ = self._buckets[number][position]
        raise TrainingError(
            f"the gradient of {name!r} changed after it had been handed over: the model uses it more often in this "
            "step than in the first one, as reentrant activation checkpointing does when it is switched on later. Do "
            "the step again: from now on gradients are handed over after backward. checkpoint(..., use_reentrant=False)"
            " does not have this limit"
        )
