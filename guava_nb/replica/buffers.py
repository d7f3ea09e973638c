"""A model's buffers through shards, commits and aborts.

Knows values of buffers; knows nothing of gradients or the network. The policy:

- every shard starts from the committed buffers, whichever worker computes it and however many shards came before;
- the committed value after a step is the mean over its shards, weighted by their rows: floating-point buffers directly,
  integer ones (`num_batches_tracked`) through how far they moved, rounded;
- only what moves travels. Running statistics of normalisation layers always do; any other buffer does in the steps in
  which a forward changed it. Masks and position tables may be larger than the model and may hold infinities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from guava_nb.errors import LocalProtocolError, TrainingError
from guava_nb.replica.buckets import Bucket, pack_present, present_at

__all__ = ["BufferBook"]

#: Shards during which every buffer is compared by value, to find those that user code moves through `.data`, which
#: torch's version counter does not see. Later only buffers whose version changed or that moved before are compared.
LEARNING_SHARDS = 4


class BufferBook:
    """The committed value of every buffer, beside the live one."""

    def __init__(self, model: nn.Module, bucket: Bucket | None) -> None:
        """Take the model's present buffers as committed; `bucket` names them."""
        self._bucket = bucket
        self._owners: list[tuple[nn.Module, str]] = []
        statistics = set()
        for index, name in enumerate(bucket.names if bucket else ()):
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            self._owners.append((module, key))
            if isinstance(module, _NormBase):
                statistics.add(index)
        self._statistics = frozenset(statistics)
        self._movers: set[int] = set(statistics)
        self._persistent = set(model.state_dict().keys())
        self._shards = 0
        self._touched = False
        self._saved: list[Tensor] = []
        self._marks: list[tuple[int, int]] = []
        self.save_all()

    @property
    def touched(self) -> bool:
        """Whether a forward ran since the last commit or restore."""
        return self._touched

    def begin_shard(self) -> None:
        """Go back to the committed values where an earlier shard moved away from them."""
        if self._bucket is None:
            return
        self.restore()
        self._touched = True
        self._shards += 1

    def restore(self) -> None:
        """Make the live buffers the committed ones again."""
        if self._touched:
            self._write(self._moved(), self._saved)
            self._touched = False

    def write_committed(self) -> None:
        """Make the live buffers the committed ones, whatever happened to either."""
        self._write(range(len(self._owners)), self._saved)
        self._touched = False

    def save_all(self) -> None:
        """Take all live values as committed, as after loading a state."""
        self._saved = [self._live(i).detach().clone() for i in range(len(self._owners))]
        self._marks = [self._mark(i) for i in range(len(self._owners))]
        self._touched = False

    def commit(self) -> None:
        """Take the live values as committed: a lone worker's commit."""
        if self._touched:
            moved = self._moved()
            for i in moved:
                live = self._live(i).detach()
                if live.shape == self._saved[i].shape and live.dtype == self._saved[i].dtype:
                    self._saved[i].copy_(live)
                else:
                    self._saved[i] = live.clone()
            self._remember(moved)
            self._touched = False

    def flatten(self) -> tuple[bytes, Tensor]:
        """Return which buffers moved in this shard, and their values as one flat CPU tensor."""
        assert self._bucket is not None
        moved = self._moved()
        parts = [self._outgoing(i) for i in moved]
        flat = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=self._bucket.dtype)
        chosen = set(moved)
        return pack_present([i in chosen for i in range(len(self._owners))]), flat

    def nothing(self) -> tuple[bytes, Tensor]:
        """Return what a shard without samples hands over."""
        assert self._bucket is not None
        return bytes(self._bucket.present_bytes), torch.empty(0, dtype=self._bucket.dtype)

    def adopt(self, present: bytes, flat: Tensor) -> None:
        """Commit the means of all shards.

        Raises:
            LocalProtocolError: they do not fit this model.
        """
        assert self._bucket is not None
        chosen = [i for i, bit in enumerate(present_at(present, len(self._owners))) if bit]
        sizes = [self._saved[i].numel() * (2 if self._saved[i].is_complex() else 1) for i in chosen]
        if sum(sizes) != flat.numel():
            names = ", ".join(self._bucket.names[i] for i in chosen)
            raise LocalProtocolError(f"buffers {names} have {sum(sizes)} elements, {flat.numel()} came")
        with torch.no_grad():
            parts = flat.split(sizes)  # type: ignore[no-untyped-call]
            values = {i: self._incoming(i, part) for i, part in zip(chosen, parts, strict=True)}
        stray = [i for i in self._moved() if i not in values] if self._touched else []
        for i, value in values.items():
            self._saved[i] = value
        self._movers.update(values)
        self._write([*values, *stray], self._saved)
        self._touched = False

    def first_not_finite(self) -> str:
        """Return the name of the first moved buffer with NaN or Inf, "" when there is none."""
        if self._bucket is None or not self._touched:
            return ""
        for i in self._moved():
            live = self._live(i)
            if (live.is_floating_point() or live.is_complex()) and not bool(torch.isfinite(live).all()):
                return self._bucket.names[i]
        return ""

    def committed(self) -> dict[str, Tensor]:
        """Return the committed values by name; they are not copies."""
        return dict(zip(self._bucket.names, self._saved, strict=True)) if self._bucket else {}

    def hidden(self) -> dict[str, Tensor]:
        """Return the committed values of moving buffers that the model's state dict leaves out."""
        names = self._bucket.names if self._bucket else ()
        return {names[i]: self._saved[i] for i in sorted(self._movers) if names[i] not in self._persistent}

    def load_hidden(self, values: dict[str, Tensor]) -> None:
        """Set live values of buffers that the model's state dict leaves out; unknown names are ignored."""
        for i, name in enumerate(self._bucket.names if self._bucket else ()):
            if name in values:
                self._movers.add(i)
                self._replace(i, values[name])

    # ------------------------------------------------------------------------------------------------------ one buffer

    def _live(self, index: int) -> Tensor:
        module, key = self._owners[index]
        value = module._buffers[key]
        if value is None:
            raise TrainingError(
                f"buffer {key!r} of {type(module).__name__} was removed during the run; keep it as a tensor"
            )
        return value

    def _mark(self, index: int) -> tuple[int, int]:
        live = self._live(index)
        return id(live), live._version

    def _moved(self) -> list[int]:
        moved = [i for i in range(len(self._owners)) if i in self._statistics or self._differs(i)]
        self._movers.update(moved)
        return moved

    def _differs(self, index: int) -> bool:
        suspicious = self._shards <= LEARNING_SHARDS or index in self._movers or self._mark(index) != self._marks[index]
        if not suspicious:
            return False
        live, saved = self._live(index), self._saved[index]
        if live.shape != saved.shape or live.dtype != saved.dtype:
            return True
        # A NaN that was there before is no change.
        return not (torch.equal(live, saved) or bool(((live == saved) | (live.isnan() & saved.isnan())).all()))

    def _outgoing(self, index: int) -> Tensor:
        live, saved = self._live(index).detach(), self._saved[index]
        assert self._bucket is not None
        if live.shape != saved.shape:
            raise TrainingError(
                f"buffer {self._bucket.names[index]!r} changed its shape from {tuple(saved.shape)} to "
                f"{tuple(live.shape)} in a forward; buffers that are averaged over workers must keep their shape"
            )
        if live.is_complex():
            live = torch.view_as_real(live)
        elif not live.is_floating_point():
            live = live.to(torch.int64) - saved.to(torch.int64)
        return live.reshape(-1).to(self._bucket.dtype)

    def _incoming(self, index: int, part: Tensor) -> Tensor:
        saved = self._saved[index]
        part = part.to(saved.device)
        if saved.is_complex():
            return torch.view_as_complex(part.reshape(*saved.shape, 2).contiguous()).to(saved.dtype)
        if saved.is_floating_point():
            return part.reshape(saved.shape).to(saved.dtype, copy=True)
        return (saved.to(torch.int64) + part.round().to(torch.int64).reshape(saved.shape)).to(saved.dtype)

    def _write(self, indices: Sequence[int], values: Sequence[Tensor]) -> None:
        for i in indices:
            self._replace(i, values[i])
        self._remember(indices)

    def _replace(self, index: int, value: Tensor) -> None:
        live = self._live(index)
        if live.shape == value.shape and live.dtype == value.dtype:
            with torch.no_grad():
                live.copy_(value)
        else:
            module, key = self._owners[index]
            module._buffers[key] = value.detach().clone().to(live.device)

    def _remember(self, indices: Iterable[int]) -> None:
        for i in indices:
            self._marks[i] = self._mark(i)
