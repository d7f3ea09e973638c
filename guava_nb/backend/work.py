"""What torch gets for a call that goes on: something to wait for, to ask, and a future of the outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import Work
from torch.autograd.profiler import record_function

from guava_nb.backend.group_member import GroupMember, called_back
from guava_nb.backend.operation import Operation
from guava_nb.backend.staging import Staged
from guava_nb.errors import CollectiveTimeout, GuavaError

__all__ = ["GuavaWork", "JointWork", "profiled", "untraced"]

_AFTER_EXPIRY_S = 30.0
_Kind = TypeVar("_Kind", bound=type)


def untraced(kind: _Kind) -> _Kind:
    """Keep `torch.compile` out of a class's methods, and of what they call.

    torch's C++ calls them while a compiled program runs (DDP does, between two steps), and would then compile the sockets' code.
    The decorator of torch for this loads the compiler; the mark in C that is set here does not. A torch without it is left alone.
    """
    marks = torch._C._dynamo.eval_frame
    if not hasattr(marks, "set_code_exec_strategy"):
        return kind
    skip = marks._FrameExecStrategy(marks._FrameAction.SKIP, marks._FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            marks.set_code_exec_strategy(method.__code__, skip)
    return kind


def profiled(what: str) -> AbstractContextManager[object]:
    """Show the block in torch's profiler as `guava:` and this name; costs nothing where none looks on."""
    return record_function(f"guava:{what}") if _profiler_enabled() else _NOT_SHOWN


_NOT_SHOWN = nullcontext()


@untraced
class GuavaWork(Work):
    """One operation as torch sees it.

    Args:
        circle: the group it belongs to.
        operation: what goes on.
        outputs: tensors it writes, what the future resolves to.
        staged: bytes that stand for tensors; CUDA ones know when they have landed.
    """

    def __init__(
        self, circle: GroupMember, operation: Operation, outputs: Sequence[Any], staged: Sequence[Staged] = ()
    ) -> None:
        super().__init__()
        self._circle, self._operation = circle, operation
        self._outputs, self._staged = list(outputs), tuple(staged)
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; on CUDA the caller's stream then waits for the last copy.

        Raises:
            GroupBroken: a member was lost.
            CollectiveTimeout: some ranks did not come in time; it names them.
            CollectiveError: the ranks called different things.
        """
        with profiled(f"{self._operation.call} wait"):
            self._wait(timeout.total_seconds() if timeout else 0.0)
        self._raise()
        self.synchronize()
        return True

    def _wait(self, seconds: float) -> None:
        operation = self._operation
        if not operation.wait(seconds if seconds > 0 else None):
            self._circle.expire(operation, seconds)
            if not operation.wait(_AFTER_EXPIRY_S):
                raise CollectiveTimeout(f"waited {seconds:g} s for {operation.what} in group {self._circle.name!r}")

    def _raise(self) -> None:
        error = self._operation.error
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._operation.done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._operation.done and self._operation.error is None

    def exception(self) -> GuavaError | None:
        """Why it failed; None while it goes on and when it has not."""
        return self._operation.error

    def result(self) -> list[torch.Tensor]:
        """The outputs; waits for them."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Let the caller's CUDA stream wait for what was copied to its device."""
        for staged in self._staged:
            if staged.landed is not None:
                torch.cuda.current_stream(staged.tensor.device).wait_event(staged.landed)

    def block_current_stream(self) -> None:
        """As `wait`: the host brings the bytes, so there is nothing a stream could wait for alone."""
        self.wait()

    def source_rank(self) -> int:
        """Rank that a received tensor came from."""
        self.wait()
        return self._operation.source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of outputs; an error comes out of its `wait` and `value`."""
        if self._future is None:
            self._future = _future(self._circle, self._operation, self._outcome, self._devices())
        return self._future

    def _devices(self) -> list[torch.device]:
        return sorted({one.tensor.device for one in self._staged if one.tensor.is_cuda}, key=str)

    def _outcome(self) -> Any:
        if self._operation.error is not None:
            return self._operation.error
        self.synchronize()  # on the stream of the thread that completes it; the future records that
        return self._outputs


@untraced
class JointWork(Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all of them; `timeout` is for all together."""
        seconds = timeout.total_seconds() if timeout else 0.0
        until = time.monotonic() + seconds
        for work in self._works:
            left = timedelta(seconds=max(0.001, until - time.monotonic())) if seconds > 0 else timedelta(0)
            work.wait(left)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """The first failure."""
        return next((problem for work in self._works if (problem := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """All outputs; waits for them."""
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        """Let the caller's CUDA stream wait for all of them."""
        for work in self._works:
            work.synchronize()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of all outputs in one list."""
        joint = torch.futures.collect_all([work.get_future() for work in self._works])
        return joint.then(lambda done: [tensor for future in done.value() for tensor in future.value()])


def _future(
    circle: GroupMember, operation: Operation, outcome: Callable[[], Any], devices: list[torch.device]
) -> torch.futures.Future[Any]:
    """A future that fails for C++, too: only one made by `then` can carry an error there."""
    base: torch.futures.Future[Any] = torch.futures.Future(devices=[*devices]) if devices else torch.futures.Future()

    def unwrap(done: torch.futures.Future[Any]) -> Any:
        value = done.value()
        if isinstance(value, BaseException):
            raise value
        return value

    def complete() -> None:
        with called_back(circle, operation.sequence):
            base.set_result(outcome())

    future = base.then(unwrap)
    if operation.done:
        base.set_result(outcome())
    else:
        operation.when_done(lambda: _complete(complete))
    return future


def _complete(complete: Callable[[], None]) -> None:
    try:
        _COMPLETIONS.submit(complete)
    except RuntimeError:  # the interpreter ends
        complete()


#: Futures are completed here and not by the link's reader: what a program has called then may call collectives, and wait for
#: futures of theirs (DDP's PowerSGD hook does both), so each has a thread of its own as long as it waits.
_COMPLETIONS = ThreadPoolExecutor(64, "guava-futures")
