"""A pool of processes that form process groups, for tests of everything that speaks torch.distributed.

Each process imports torch once and serves many cases: a case is a function of this process's rank, run by as many
processes as it needs in a group of its own. The backend is a parameter; "guava" works wherever it is registered.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import warm

TIMEOUT_S = 60.0


def backends() -> list[str]:
    """Backends that can be tried here."""
    return ["gloo", "guava"] if importlib.util.find_spec("guava_nb.backend") else ["gloo"]


class RankFailed(AssertionError):
    """A case raised on some ranks; the text holds the first one's traceback."""

    def __init__(self, failures: dict[int, tuple[str, str]]) -> None:
        rank, (_, text) = next(iter(failures.items()))
        super().__init__(f"{len(failures)} ranks failed; rank {rank}:\n{text}")
        self.types = {rank: name for rank, (name, _) in failures.items()}


class GroupPool:
    """Spawned processes that wait for cases."""

    def __init__(self, size: int) -> None:
        context = warm.context()
        self._numbers = itertools.count()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._store.port), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, ranks: int, backend: str, case: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list:
        """Run `case(*args)` on so many ranks of one group; returns what it gave on each."""
        name = f"case{next(self._numbers)}"
        for rank, pipe in enumerate(self._pipes[:ranks]):
            pipe.send((name, rank, ranks, backend, case, args))
        deadline = time.monotonic() + timeout_s
        results: list[Any] = [None] * ranks
        failures: dict[int, tuple[str, str]] = {}
        for rank, pipe in enumerate(self._pipes[:ranks]):
            if not pipe.poll(max(0.1, deadline - time.monotonic())):
                self.close()
                pytest.fail(f"rank {rank} did not finish within {timeout_s:g} s; others said {failures}")
            ok, answer = pipe.recv()
            if ok:
                results[rank] = answer
            else:
                failures[rank] = answer
        if failures:
            raise RankFailed(failures)
        return results

    def close(self) -> None:
        """End every process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def group_pool(size: int) -> Iterator[GroupPool]:
    pool = GroupPool(size)
    try:
        yield pool
    finally:
        pool.close()


def _serve(pipe: Connection, port: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while True:
        try:
            name, rank, ranks, backend, case, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send((True, _run(port, name, rank, ranks, backend, case, args)))
        except BaseException as error:
            pipe.send((False, (type(error).__name__, traceback.format_exc())))


def _run(port: int, name: str, rank: int, ranks: int, backend: str, case: Callable[..., Any], args: Any) -> Any:
    if backend == "guava":
        importlib.import_module("guava_nb.backend")
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    limit = timedelta(seconds=TIMEOUT_S / 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    try:
        answer = case(*args)
        dist.barrier()
        return answer
    finally:
        dist.destroy_process_group()
