"""Tensors as bytes in host memory, in both directions, for as long as an operation lasts.

A contiguous CPU tensor is its own memory: nothing is copied. Everything else is staged: strided tensors in an ordinary
buffer, CUDA tensors in pinned memory. What leaves a GPU is copied on the caller's stream and sent once that copy is
done; what comes back is copied on a stream of its own that first waits for the caller's, and the one who waits for the work
makes his stream wait for that copy. All copies are made without autograd.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

import numpy as np
import torch

from guava_nb.backend.operation import Bytes, Run
from guava_nb.errors import CollectiveError
from guava_nb.hub.typed_reduce import dtype_name

__all__ = ["Staged", "runner_for"]

#: Below this a copy is cheaper than a message that tells when the caller's memory may be used again.
SNAPSHOT_BYTES = 64 << 10


class _Memory:
    """A contiguous CPU tensor's bytes by their address; keeps the tensor.

    `Tensor.numpy` would keep its storage from ever being resized, as FSDP does.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        shape = (tensor.numel() * tensor.element_size(),)
        self.__array_interface__ = {"data": (tensor.data_ptr(), False), "shape": shape, "typestr": "|u1", "version": 3}


class Staged:
    """The bytes that stand for a tensor.

    Attributes:
        tensor: whose bytes these are.
        data: flat bytes, row-major.
        shared: `data` is the caller's own memory.
        copied: CUDA event after which `data` holds what the tensor held; None on the CPU.
        landed: CUDA event after which the tensor holds what `data` held; None on the CPU or before.
    """

    __slots__ = ("_called", "_host", "copied", "data", "landed", "shared", "tensor")

    def __init__(self, tensor: torch.Tensor, *, read: bool, write: bool) -> None:
        """Take a tensor's bytes.

        Args:
            tensor: dense, on any device.
            read: `data` must hold its content; else any content.
            write: `land` will be called.

        Raises:
            CollectiveError: the tensor has no plain memory.
        """
        self.copied: torch.cuda.Event | None = None
        self.landed: torch.cuda.Event | None = None
        self._called: torch.cuda.Event | None = None
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise CollectiveError(f"a {tensor.layout} tensor on {tensor.device} cannot take part; make it dense first")
        dtype_name(tensor.dtype)  # raises for what cannot travel
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        self.shared = plain
        if plain:
            self._host = self.tensor
        elif tensor.is_cpu:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype)
            if read:
                self._host.copy_(self.tensor)
        else:
            self._from_device(read, write)
        self.data: Bytes = _flat_bytes(self._host)

    def _from_device(self, read: bool, write: bool) -> None:
        self._host = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, pin_memory=self.tensor.is_cuda)
        if not self.tensor.is_cuda:
            if read:
                self._host.copy_(self.tensor)
            return
        stream = torch.cuda.current_stream(self.tensor.device)
        with torch.cuda.device(self.tensor.device), torch.no_grad():
            if read:
                self._host.copy_(self.tensor, non_blocking=True)
                self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self.copied.record(stream)
            if write:
                self._called = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._called.record(stream)

    def snapshot(self) -> bool:
        """Let go of the caller's memory if the bytes are few; returns whether it still is the caller's."""
        if self.shared and self.data.nbytes <= SNAPSHOT_BYTES:
            self.data, self.shared = self.data.copy(), False
        return self.shared

    def land(self) -> None:
        """Put the bytes into the tensor, where they do not lie already."""
        if self._host is self.tensor:
            return
        with torch.no_grad():
            if not self.tensor.is_cuda:
                self.tensor.copy_(self._host)
                return
            device = self.tensor.device
            stream = _side_stream(device)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                if self._called is not None:
                    stream.wait_event(self._called)
                self.tensor.copy_(self._host, non_blocking=True)
                # The caller may free the tensor while this stream still writes to it.
                self.tensor.record_stream(stream)
                self.landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self.landed.record(stream)


def _flat_bytes(tensor: torch.Tensor) -> Bytes:
    return np.asarray(_Memory(tensor)) if tensor.numel() else np.empty(0, np.uint8)


_side_streams: dict[torch.device, torch.cuda.Stream] = {}
_side_lock = threading.Lock()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    with _side_lock:
        stream = _side_streams.get(device)
        if stream is None:
            stream = _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return stream


def runner_for(staged: Iterable[Staged]) -> Run | None:
    """What calls a function once all these bytes are there; None when they are."""
    events = [one.copied for one in staged if one.copied is not None]
    if not events:
        return None
    return lambda send: _waiter().put((events, send))


_Job = tuple[list["torch.cuda.Event"], Callable[[Exception | None], object]]


class _CopyWaiter:
    """One thread that waits for copies from devices, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="guava-copies", daemon=True).start()

    def put(self, job: _Job) -> None:
        """Queue a function behind the copies it waits for."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            events, send = self._jobs.get()
            failure: Exception | None = None
            try:
                for event in events:
                    event.synchronize()
            except RuntimeError as problem:  # an illegal access of some kernel, say: the waiting call must hear of it
                failure = problem
            send(failure)


_the_waiter: _CopyWaiter | None = None


def _waiter() -> _CopyWaiter:
    global _the_waiter
    with _side_lock:
        if _the_waiter is None:
            _the_waiter = _CopyWaiter()
        return _the_waiter
