"""Which trained parameters a forward, or the user's step function, changes by itself: a norm held down, a clamp, `max_norm`.

Workers that hold whole copies stay alike only if all of them make the same change. So each worker says what it changed, and the
orchestrator compares. Knows parameters; knows nothing of steps or the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from guava_nb.errors import TrainingError
from guava_nb.nested import leaves
from guava_nb.parallel.foreign_use import is_compiled, writes
from guava_nb.parallel.unloaded import is_dtensor
from guava_nb.protocol.messages import ParameterChange

__all__ = ["ForwardWrites"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Relative difference of norms that is rounding, in steps of a number's last place: what is normalised twice is not quite itself.
_ROUNDING_STEPS = 16


class ForwardWrites:
    """Watches the trained parameters of one model between two steps of its optimizer.

    Version and address of a parameter tell of any change but one in place through `.data`. That is found by looking at what is
    called in the first shard, and by values: all are compared in the first shard, in later ones those that were ever changed.
    """

    def __init__(self, model: nn.Module, named: Mapping[str, nn.Parameter] | None = None, always: bool = False) -> None:
        """Watch these parameters, by default the model's; parts that ZeRO shares out are left out.

        Args:
            always: compare all values in each shard.
        """
        found = dict(model.named_parameters()) if named is None else named
        self._trained = {n: p for n, p in found.items() if p.requires_grad and not is_dtensor(p)}
        kinds = (nn.Embedding, nn.EmbeddingBag)
        by_rows = [m.weight for m in model.modules() if isinstance(m, kinds) and m.max_norm is not None]
        self._by_rows = {name for name, p in self._trained.items() if any(p is weight for weight in by_rows)}
        self._always, self._is_compiled = always, is_compiled(model)
        self._known: set[str] = set()
        self._marks: dict[str, tuple[int, int]] = {}
        self._before: dict[str, tuple[int, float]] = {}
        self._piece: dict[str, tuple[int, float]] = {}
        self.is_new = True

    def __bool__(self) -> bool:
        """Whether a forward was seen to change some."""
        return bool(self._known)

    def begin(self) -> None:
        """A shard begins: the first one after a step of the optimizer starts from what that left."""
        self._piece = {}
        if not self._marks:
            self._marks = {name: _mark(p) for name, p in self._trained.items()}
            self._before = self._values(self._trained if self._always or self.is_new else self._known)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what is called in the block, in the first shard."""
        if not (self.is_new and self._marks) or self._is_compiled:  # a mode would be traced into a compiled module
            yield
            return
        mode = _InPlace(self._trained, self._known)
        with mode:
            yield

    def piece(self, module: nn.Module | None = None) -> None:
        """One of several forwards for one batch is over: the same change once more must change nothing.

        Args:
            module: whose forward it was; None: the model's.

        Raises:
            TrainingError: it does.
        """
        if not self._marks:  # a validation
            return
        self._look()
        own = None if module is None else {id(p) for p in module.parameters()}
        names = [n for n in self._known - self._by_rows if own is None or id(self._trained[n]) in own]
        now = self._values(names)
        for name, value in now.items():
            rounding = _rounding(self._trained[name])
            if not math.isclose(self._piece.get(name, value)[1], value[1], rel_tol=rounding):
                raise TrainingError(
                    f"each forward changes parameter {name!r} further, and a batch takes several forwards here (micro-batches of "
                    "a pipeline, or pieces that fit the memory) where plain PyTorch does one: use data mode with batches that "
                    "fit the memory, or change it so that a second time changes nothing (a clamp, a norm)"
                )
        self._piece.update(now)

    def end(self) -> ParameterChange | None:
        """A shard is over: return what changed since `begin`, None for nothing."""
        self._look()
        self.is_new = False
        names = [name for name in self._trained if name in self._known or name in self._before]
        after = self._values(names)
        changed = [name for name in names if self._before.get(name) != after[name]]
        self._known.update(changed)
        if not changed:
            return None
        digest = hashlib.sha256(repr([(name, after[name][0]) for name in changed]).encode()).hexdigest()[:16]
        rounding = max(_rounding(self._trained[name]) for name in changed)
        return ParameterChange(changed[0], digest, sum(after[name][1] for name in changed), rounding)

    def forget(self) -> None:
        """The step was applied, or given up."""
        self._marks = {}

    def _look(self) -> None:
        self._known.update(name for name, mark in self._marks.items() if _mark(self._trained[name]) != mark)

    def _values(self, names: Iterable[str]) -> dict[str, tuple[int, float]]:
        """Return two figures of each, read from the device at one time: the sum of its bits as whole numbers, and its norm."""
        names = list(names)
        if not names:
            return {}
        tensors = [self._trained[name].detach() for name in names]
        with torch.no_grad():
            bits = torch.stack([_bits(one) for one in tensors]).tolist()
            norms = torch.stack([_norm(one) for one in tensors]).tolist()
        return dict(zip(names, zip(bits, norms, strict=True), strict=True))


class _InPlace(TorchFunctionMode):
    """Adds the names of parameters to `found` whose memory a function changes."""

    def __init__(self, named: Mapping[str, nn.Parameter], found: set[str]) -> None:
        super().__init__()
        self._names, self._found = {_memory(p): name for name, p in named.items()}, found
        self._names.pop(0, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function; look at what it was given if it writes."""
        result = func(*args, **(kwargs or {}))
        if writes(func, kwargs):
            for tensor in leaves((args[:1], (kwargs or {}).get("out"))):
                name = self._names.get(_memory(tensor))
                if name is not None:
                    self._found.add(name)
        return result


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor of any shape, 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _norm(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor of any shape, a scalar `[]` on its device."""
    wide = torch.float32 if tensor.dtype.itemsize < 4 else None  # halves have too few digits for a sum
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
    return found.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _rounding(tensor: Tensor) -> float:
    """Return how far rounding moves a norm, relative to it; the tensor has any shape."""
    return _ROUNDING_STEPS * torch.finfo(tensor.dtype).eps


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Return what tells whether a tensor of any shape was written in place or got other memory."""
    return tensor._version, tensor.data_ptr()


def _bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as whole numbers, a scalar `[]`."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_INTEGERS[tensor.itemsize]).sum()
