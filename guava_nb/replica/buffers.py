"""What forwards change of a model, through shards, commits and aborts: buffers, and parameters that take no gradient.

Knows their values; knows nothing of gradients or the network. The policy:

- every shard starts from the committed values, whichever worker computes it and however many shards came before;
- a shard hands over by how much it changed each; what all shards' changes come to is decided by
  `guava_nb.parallel.replicas.buffer_policy`;
- only what moves travels. Running statistics of normalisation layers always do; any other buffer does in the steps in
  which a forward changed it. Masks and position tables may be larger than the model and may hold infinities.

Shapes: what a shard hands over is flat, [N]: the changes of those tensors that moved, one after another, in the order of the
bucket's names, each as `buffer_policy.change_of` gives it; presence bits say which. All of it is in the bucket's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from guava_nb.errors import LocalProtocolError, TrainingError
from guava_nb.parallel.replicas.buffer_policy import change_of, is_lost, is_statistic, lost_text, policy_of, taken
from guava_nb.parallel.state.full_state import local_part
from guava_nb.parallel.unloaded import is_dtensor
from guava_nb.replica.buckets import Bucket, pack_present, present_at

__all__ = ["BufferBook"]

#: Shards during which every tensor is compared by value, to find those that user code moves through `.data`, which
#: torch's version counter does not see. Later only those whose version changed or that moved before are compared.
LEARNING_SHARDS = 4
#: Whole numbers in a buffer that may be a position in another one.
_MOST_COUNTED = 16


class BufferBook:
    """The committed value of every buffer and every followed parameter, beside the live one.

    Attributes:
        has_followed: hooks of the optimizer changed some in the last step.
    """

    def __init__(self, model: nn.Module, bucket: Bucket | None) -> None:
        """Take the model's present values as committed; `bucket` names them."""
        self._bucket = bucket
        self._names = bucket.names if bucket else ()
        self._owners: list[tuple[nn.Module, str]] = []
        for name in self._names:
            path, _, key = name.rpartition(".")
            self._owners.append((model.get_submodule(path), key))
        self._statistics = frozenset(i for i, name in enumerate(self._names) if is_statistic(name))
        self._movers: set[int] = set(self._statistics)
        self._persistent = set(model.state_dict().keys())
        frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
        self._unfollowed = [(name, p, _mark(p)) for name, p in frozen if name not in self._names]
        self._shards = 0
        self._touched = False
        self.has_followed = False
        self._counters = {
            i: self._live(i).clone() for i, name in enumerate(self._names)
            if i not in self._statistics and _is_counter(self._live(i))
        }  # fmt: skip
        self._held: list[Tensor] = []  # the live tensors as they stood when a state was taken
        self._previous: dict[int, Tensor] = {}  # values before the last step of what it changed
        self._saved: list[Tensor] = []
        self._marks: list[tuple[int, int, int]] = []
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

    @contextmanager
    def as_committed(self) -> Iterator[None]:
        """Let the live values be the committed ones in the block, whatever shards have moved since."""
        moved = self._moved() if self._touched else []
        values = {i: self._live(i).detach().clone() for i in moved}
        self._write(moved, self._saved)
        try:
            yield
        finally:
            for i, value in values.items():
                self._replace(i, value)  # its mark stays that of the committed value: it has moved

    @property
    def saved(self) -> list[Tensor]:
        """The committed values, to be given to `reopen`; a list of its own, the tensors are not copied."""
        return list(self._saved)

    def reopen(self, saved: list[Tensor]) -> None:
        """Take earlier committed values for the committed ones again; what moved since is what one shard moved."""
        self._saved, self._touched = list(saved), bool(saved)

    def write_committed(self) -> None:
        """Make the live buffers the committed ones, whatever happened to either."""
        self._write(range(len(self._owners)), self._saved)
        self._touched = False

    def save_all(self) -> None:
        """Take all live values as committed, as after loading a state."""
        self._saved = [self._live(i).detach().clone() for i in range(len(self._owners))]
        self._held = [self._live(i) for i in range(len(self._owners))]
        self._marks = [_mark(held) for held in self._held]
        self._unfollowed = [(name, parameter, _mark(parameter)) for name, parameter, _ in self._unfollowed]
        self._touched = False

    def commit(self) -> None:
        """Take the live values as committed: a lone worker's commit."""
        if self._touched:
            moved = self._moved()
            for i in moved:
                self._previous[i] = self._saved[i]  # kept, not written over: the step may be taken back
                self._saved[i] = self._live(i).detach().clone()
            self._remember(moved)
            self._touched = False

    def flatten(self) -> tuple[bytes, Tensor]:
        """Return which tensors moved in this shard, as presence bits, and by how much, `[N]` on the CPU, memory of its own.

        Raises:
            TrainingError: one changed its shape, or by so much that the new value is lost.
        """
        assert self._bucket is not None
        moved = self._moved()
        parts = [self._outgoing(i) for i in moved]
        self._refuse_lost({i: part for i, part in zip(moved, parts, strict=True) if i not in self._statistics})
        flat = torch.cat(parts).cpu() if parts else torch.empty(0, dtype=self._bucket.dtype)
        chosen = set(moved)
        return pack_present([i in chosen for i in range(len(self._owners))]), flat

    def refuse_unfollowed(self) -> None:
        """Check that no forward changed a parameter without gradient that is too large to be followed.

        Raises:
            TrainingError: one did.
        """
        for name, parameter, mark in self._unfollowed:
            if _mark(parameter) != mark:
                raise TrainingError(
                    f"parameter {name!r} takes no gradient, and the forward changes it; such parameters are larger here than all "
                    "that is trained, so they are not followed. Keep what the forward changes in a buffer (register_buffer)"
                )

    def refuse_resized(self, shared: bool) -> None:
        """Check that no forward gave a buffer another shape.

        Args:
            shared: with other workers; else those may that no state dict carries.

        Raises:
            TrainingError: one did.
        """
        for index, name in enumerate(self._names):
            if shared or name in self._persistent:
                self._refuse_resized(index)

    def _refuse_resized(self, index: int) -> None:
        live, saved = self._live(index), self._saved[index]
        if live.shape != saved.shape:
            raise TrainingError(
                f"buffer {self._names[index]!r} changed its shape from {tuple(saved.shape)} to {tuple(live.shape)} in a forward; "
                "buffers that workers share must keep their shape, and a new model loads no other one. Give it its full size in "
                "the factory, and count in another buffer how much of it is filled"
            )

    def put_in_place(self) -> None:
        """Write what a forward replaced (`self.n = self.n + 1`) into the tensor that stood there: others hold that one."""
        for i, held in enumerate(self._held):
            module, key = self._owners[i]
            live = module._buffers.get(key)
            if live is not None and live is not held and (live.shape, live.dtype) == (held.shape, held.dtype):
                with torch.no_grad():
                    held.copy_(live)
                module._buffers[key] = held

    def nothing(self) -> tuple[bytes, Tensor]:
        """Return what a shard without samples hands over: no presence bit, and `[0]`."""
        assert self._bucket is not None
        return bytes(self._bucket.present_bytes), torch.empty(0, dtype=self._bucket.dtype)

    def adopt(self, present: bytes, flat: Tensor) -> None:
        """Commit what all shards' changes came to.

        Args:
            present: which tensors changed, one bit each.
            flat: `[N]`.

        Raises:
            LocalProtocolError: they do not fit this model.
        """
        assert self._bucket is not None
        chosen = [i for i, bit in enumerate(present_at(present, len(self._owners))) if bit]
        sizes = [self._bucket.sizes[i] for i in chosen]
        if sum(sizes) != flat.numel():
            names = ", ".join(self._names[i] for i in chosen)
            raise LocalProtocolError(f"buffers {names} have {sum(sizes)} elements, {flat.numel()} came")
        with torch.no_grad():
            parts = flat.split(sizes)  # type: ignore[no-untyped-call]
            values = {i: self._incoming(i, part) for i, part in zip(chosen, parts, strict=True)}
        self._previous = {i: self._saved[i] for i in values}
        stray = [i for i in self._moved() if i not in values] if self._touched else []
        for i, value in values.items():
            self._saved[i] = value
        self._movers.update(values)
        self._write([*values, *stray], self._saved)
        self._touched = False

    def follow(self) -> None:
        """Take as committed what the optimizer's own hooks changed, alike on every worker, after `adopt`."""
        moved = [i for i, mark in enumerate(self._marks) if _mark(self._live(i)) != mark]
        for i in moved:
            self._previous.setdefault(i, self._saved[i])
            self._saved[i] = self._live(i).detach().clone()
        self._remember(moved)
        self.has_followed = bool(moved)

    def begin_step(self) -> None:
        """A step is about to be applied: `take_back` undoes what it changes from now on."""
        self._previous = {}

    def take_back(self) -> None:
        """Make the committed values those before the step that was applied last."""
        for i, value in self._previous.items():
            self._saved[i] = value
        self._write(list(self._previous), self._saved)
        self._previous = {}

    def last_changes(self) -> tuple[bytes, Tensor]:
        """Return which tensors the last step and the optimizer's hooks changed, and by how much, `[N]`, as `flatten` does."""
        assert self._bucket is not None
        dtype, chosen = self._bucket.dtype, sorted(self._previous)
        parts = [change_of(self._previous[i], self._saved[i], dtype).to(dtype) for i in chosen]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        return pack_present([i in self._previous for i in range(len(self._owners))]), flat

    def moved_numbers(self) -> dict[str, Tensor]:
        """Return the buffers that moved since the last commit and could have become NaN or Inf, of their shapes, by name."""
        if self._bucket is None or not self._touched:
            return {}
        live = {self._names[i]: self._live(i) for i in self._moved()}
        return {name: one for name, one in live.items() if one.is_floating_point() or one.is_complex()}

    def first_not_finite(self) -> str:
        """Return the name of the first moved buffer with NaN or Inf, "" when there is none."""
        moved = ((name, local_part(one)) for name, one in self.moved_numbers().items())
        return next((name for name, one in moved if not bool(torch.isfinite(one).all())), "")

    def counted(self, policies: str) -> dict[str, Tensor]:
        """Return the buffers of few whole numbers that have changed since the run was built, with no policy for them."""
        changed = {i: self._saved[i] for i, first in self._counters.items() if not torch.equal(first, self._saved[i])}
        return {self._names[i]: one for i, one in changed.items() if policy_of(policies, self._names[i]) == "auto"}

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
        """Return the tensor that stands in the model now, of any shape, not a copy.

        Raises:
            TrainingError: the user's code removed it.
        """
        module, key = self._owners[index]
        value = module._buffers.get(key, module._parameters.get(key))
        if value is None:
            raise TrainingError(
                f"buffer {key!r} of {type(module).__name__} was removed during the run; keep it as a tensor"
            )
        return value

    def _moved(self) -> list[int]:
        moved = [i for i in range(len(self._owners)) if i in self._statistics or self._differs(i)]
        self._movers.update(moved)
        return moved

    def _differs(self, index: int) -> bool:
        live, saved = self._live(index), self._saved[index]
        is_marked = _mark(live) != self._marks[index]
        if is_dtensor(live) is not is_dtensor(saved):
            return is_marked  # gathered for a forward that raised, see `_replace`
        if is_marked and isinstance(live, nn.Parameter):
            return True  # a comparison of each would wait for the device
        if not (is_marked or self._shards <= LEARNING_SHARDS or index in self._movers):
            return False
        if live.shape != saved.shape or live.dtype != saved.dtype:
            return True
        # Of a sharded one this rank's rows: a comparison of the whole waits for all ranks, which may never come here.
        live, saved = local_part(live), local_part(saved)
        # A NaN that was there before is no change.
        return not (torch.equal(live, saved) or bool(((live == saved) | (live.isnan() & saved.isnan())).all()))

    def _outgoing(self, index: int) -> Tensor:
        """Return by how much one tensor changed since the commit, flat. Errors as of `flatten`."""
        live, saved = self._live(index).detach(), self._saved[index].detach()
        assert self._bucket is not None
        self._refuse_resized(index)
        return change_of(saved, live, self._bucket.dtype).to(self._bucket.dtype)

    def _refuse_lost(self, changes: dict[int, Tensor]) -> None:
        """Check that every new value can be told from its change; `changes` are flat, by place. Errors as of `flatten`."""
        lost = [is_lost(self._saved[i], self._live(i), change).cpu() for i, change in changes.items()]
        for i, is_so in zip(changes, lost, strict=True):
            if is_so:
                raise TrainingError(lost_text(self._names[i], self._saved[i], self._live(i)))

    def _incoming(self, index: int, change: Tensor) -> Tensor:
        """Return one tensor after a flat change, of its committed shape and device."""
        saved = self._saved[index].detach()
        return taken(saved, change.to(saved.device))

    def _write(self, indices: Sequence[int], values: Sequence[Tensor]) -> None:
        """Make live tensors these values, and remember that they stand as committed."""
        for i in indices:
            self._replace(i, values[i])
        self._remember(indices)

    def _replace(self, index: int, value: Tensor) -> None:
        """Make one live tensor this value: in place where shape and dtype are the same."""
        live = self._live(index)
        if is_dtensor(live) is not is_dtensor(value):
            return  # shared out by ZeRO, as of the last commit: what was gathered for a forward that raised is given back
        if live.shape == value.shape and live.dtype == value.dtype:
            with torch.no_grad():
                live.copy_(value)
        elif isinstance(live, nn.Parameter):
            live.data = value.detach().clone().to(live.device)
        else:
            module, key = self._owners[index]
            module._buffers[key] = value.detach().clone().to(live.device)

    def _remember(self, indices: Iterable[int]) -> None:
        for i in indices:
            self._marks[i] = _mark(self._live(i))


def _is_counter(tensor: Tensor) -> bool:
    """Whether a tensor has few whole numbers, and may count something or be a position."""
    return tensor.numel() <= _MOST_COUNTED and not (tensor.is_floating_point() or tensor.is_complex())


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    """Return what tells whether a tensor of any shape was replaced or written in place since."""
    return id(tensor), tensor._version, tensor.data_ptr()
