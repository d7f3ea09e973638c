"""A pool of processes that are ranks of a process group, over a hub in this one; cases run in all of them at once.

    with Ranks(3) as ranks:
        ranks.run("all_reduce_sums", "guava")

A process imports torch once and runs many cases; a case is a function of `tests.support.group_cases` that takes a
`Here` and asserts. A rank that was killed is replaced before the next case.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from guava_nb.hub.relay import Relay
from guava_nb.link.listener import Listener
from guava_nb.link.options import LinkOptions
from guava_nb.link.session_events import Event, MessageArrived
from tests.support import warm

CASE_S = 45.0
OPTIONS = LinkOptions(heartbeat_s=0.5, silence_s=5.0, grace_s=1.0)
_names = itertools.count(1)


@dataclass(frozen=True)
class Here:
    """What a case knows of its rank."""

    rank: int
    size: int
    backend: str
    endpoint: Any
    folder: Path


class Hub:
    """A listener with a relay in this process."""

    def __init__(self) -> None:
        self.relay = Relay()
        self.listener = Listener(OPTIONS, self._on_event, tls=False)
        self.listener.start()

    def _on_event(self, event: Event) -> None:
        if not self.relay.on_event(event) and isinstance(event, MessageArrived):
            event.done()


class Ranks:
    """So many processes, each a rank; use as a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.hub = Hub()
        self.folder = Path(tempfile.mkdtemp(prefix="guava-ranks-"))
        self._context = warm.context()
        self._processes: list[Any] = [None] * size
        self._pipes: list[Any] = [None] * size
        self._formed = ""
        self.group = ""

    def __enter__(self) -> Ranks:
        self._ensure()
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            if process is not None and process.is_alive():
                pipe.send(None)
        for process in self._processes:
            if process is not None:
                process.join(10)
                process.kill()
                process.join()
        self.hub.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def pid(self, rank: int) -> int:
        return int(self._processes[rank].pid)

    def kill(self, rank: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # a case may have ended it
            os.kill(self.pid(rank), signal.SIGKILL)
        self._processes[rank].join(10)
        self._formed = ""

    def run(self, case: str, backend: str, timeout_s: float = 30.0, **arguments: Any) -> list[Any]:
        """Run a case on all ranks; gives what they returned. A failed one is raised with its traceback."""
        self.start(case, backend, timeout_s, **arguments)
        return self.results()

    def start(self, case: str, backend: str, timeout_s: float = 30.0, **arguments: Any) -> None:
        """Begin a case; `results` waits for it."""
        self._form(f"{backend} {timeout_s}", backend, timeout_s)
        for pipe in self._pipes:
            pipe.send((case, arguments))

    def results(self, ranks: list[int] | None = None) -> list[Any]:
        until = time.monotonic() + CASE_S
        outcomes = []
        for rank in range(self.size) if ranks is None else ranks:
            if self._pipes[rank].poll(max(0.0, until - time.monotonic())):
                outcomes.append(self._pipes[rank].recv())
            else:
                outcomes.append((False, "did not finish"))
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:  # who hangs is of no use for the next case
            for rank in range(self.size):
                self.kill(rank)
        assert not failures, "\n".join(failures)
        return [value for _, value in outcomes]

    def forget(self) -> None:
        """The next case gets a group of its own."""
        self._formed = ""

    def _ensure(self) -> None:
        for rank in range(self.size):
            process = self._processes[rank]
            if process is None or not process.is_alive():
                ours, theirs = self._context.Pipe()
                code = self.hub.listener.join_code().encode()
                args = (rank, self.size, code, str(self.folder), theirs)
                self._processes[rank] = self._context.Process(target=_serve, args=args, daemon=True)
                self._processes[rank].start()
                self._pipes[rank] = ours

    def _form(self, key: str, backend: str, timeout_s: float) -> None:
        if self._formed == key:
            return
        self._ensure()
        self.group = f"g{next(_names)}"
        for pipe in self._pipes:
            pipe.send(("form", {"backend": backend, "name": self.group, "timeout_s": timeout_s}))
        self.results()
        self._formed = key


class _Rank:
    """The process's own state: its session and its group."""

    def __init__(self, rank: int, size: int, code: str, folder: str) -> None:
        import torch

        from guava_nb.backend.init_group import Dialled
        from guava_nb.protocol.joincode import JoinCode

        torch.set_num_threads(1)
        self.dialled = Dialled(JoinCode.decode(code), f"w{rank}", OPTIONS)
        self.here = Here(rank, size, "", self.dialled.endpoint, Path(folder))

    def form(self, backend: str, name: str, timeout_s: float) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        from guava_nb.backend import end_group, init_group, store_for

        end_group()
        rank, size, endpoint = self.here.rank, self.here.size, self.here.endpoint
        if backend == "guava":
            init_group(endpoint, name, rank, size, [f"w{r}" for r in range(size)], timeout_s)
        else:
            timeout = timedelta(seconds=timeout_s)
            self.store = store_for(endpoint, f"{name}/")
            dist.init_process_group(backend, store=self.store, rank=rank, world_size=size, timeout=timeout)
        self.here = replace(self.here, backend=backend)

    def run(self, case: str, arguments: dict[str, Any]) -> Any:
        from tests.support import group_cases

        function: Callable[..., Any] = getattr(group_cases, case)
        return function(self.here, **arguments)


def _serve(rank: int, size: int, code: str, folder: str, pipe: Any) -> None:
    from guava_nb.backend import end_group

    state = _Rank(rank, size, code, folder)
    while (job := pipe.recv()) is not None:
        name, arguments = job
        try:
            value = state.form(**arguments) if name == "form" else state.run(name, arguments)
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    end_group()
    state.dialled.close()
