"""Runs a torch.distributed program as one rank, in this worker's process, as torchrun would start it in one of its own.

Knows torch's process group, the environment of a launcher and `__main__`; does not know who asked. What the program defines
stays in the namespace of the user's cells; what it did to the process is taken back.
"""

from __future__ import annotations

import os
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from msgspec.structs import replace

from guava_nb.backend.led_group import OPERATION_S, LedGroup, environment
from guava_nb.errors import GuavaError
from guava_nb.protocol.messages import RunProgram
from guava_nb.worker.process_group import GroupSeat

__all__ = ["ProgramEnded", "run_program"]

#: Where libraries keep who is which rank of how many, for the life of a process.
_LIBRARIES = (
    ("accelerate.state", "AcceleratorState"),
    ("accelerate.state", "PartialState"),
    ("accelerate.state", "GradientState"),
)


#: The groups of the last programs. A DistributedDataParallel that is the last to hold one ends it with Python's lock held, and
#: waits for gloo's threads, one of which may want the lock; torch gives the lock away where Python lets go of a group.
_GROUPS: deque[Any] = deque(maxlen=8)


class ProgramEnded(GuavaError):
    """The program called sys.exit with a status or a text that says that it failed."""


def run_program(
    order: RunProgram, module: types.ModuleType, seat: GroupSeat, device: torch.device, run: Callable[[], None]
) -> None:
    """Take this rank's place in the group and run the program; the group stands when this returns, unless it ended that itself.

    Args:
        module: whose namespace the program runs in; it is `__main__` meanwhile.
        seat: takes places in process groups.
        device: of this worker; a program that names "cuda" means this one.
        run: executes the text.

    Raises:
        ProgramEnded: it ended by sys.exit with a failure.
        GuavaError, RuntimeError: the group could not be formed.
        BaseException: what the program raised.
    """
    group, formed = order.group, 0

    def form(timeout: timedelta) -> None:
        nonlocal formed
        formed += 1  # a name for each: a program may destroy its group and make another one
        seat.form(replace(group, name=f"{group.name}{formed}/"))
        seat.complete()
        _GROUPS.append(torch.distributed.group.WORLD)

    def say(sentence: str) -> None:
        sys.stdout.write(f"{sentence}\n")

    led = LedGroup(group.rank, len(group.members), group.backend, form, say)
    local_rank = order.local_rank if device.type != "cuda" else device.index or 0  # programs take cuda:LOCAL_RANK
    found = environment(group.rank, len(group.members), local_rank, order.local_size)
    if device.type == "cpu":
        found["ACCELERATE_USE_CPU"] = "true"
    with ExitStack() as stack:
        stack.enter_context(_as_a_process(module, found, [order.name, *order.arguments]))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        led.form(timedelta(seconds=OPERATION_S))
        stack.callback(led.give_back)
        led.lead()
        try:
            run()
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise ProgramEnded(f"the program ended with {_status(ended.code)}") from None


def _status(code: Any) -> str:
    return f"exit status {code}" if isinstance(code, int) else str(code)


@contextmanager
def _as_a_process(module: types.ModuleType, found: dict[str, str], argv: list[str]) -> Iterator[None]:
    """In the block this process is a rank's; after it what programs change for a whole process is as before."""
    before = {name: os.environ.get(name) for name in found}
    main, name, arguments = sys.modules["__main__"], module.__name__, sys.argv
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    _forget_ranks()
    os.environ.update(found)
    sys.argv, sys.modules["__main__"], module.__name__ = argv, module, "__main__"
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"], module.__name__ = arguments, main, name
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _forget_ranks() -> None:
    """Libraries of an earlier program would go on as a rank of its group."""
    for place, name in _LIBRARIES:
        kind = getattr(sys.modules.get(place), name, None)
        if kind is not None:
            with suppress(Exception):  # of another version: then the program sees what it left
                kind._reset_state()
