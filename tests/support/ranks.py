"""A pool of real processes in one gloo group, kept for many cases: importing torch costs seconds, a case milliseconds."""

from __future__ import annotations

import datetime
import importlib
import os
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.support import warm

GROUP_TIMEOUT_S = 60.0


class Ranks:
    """Runs `module:function(group, *args)` on some ranks of the pool and returns what each gave."""

    def __init__(self, size: int, folder: Path) -> None:
        context = warm.context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, str(folder / "store")), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, ranks: Sequence[int], function: str, *args: Any, timeout_s: float = 90.0) -> list[Any]:
        # A group of some ranks is made by all of them; those that are not in it do nothing else.
        for pipe in self._pipes:
            pipe.send((tuple(ranks), function, args))
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < len(self._pipes):
            ready = wait([p for k, p in enumerate(self._pipes) if k not in answers], timeout_s)
            if not ready:
                self.close()
                raise AssertionError(
                    f"ranks {sorted(set(range(len(self._pipes))) - set(answers))} gave no answer in {timeout_s} s"
                )
            for pipe in ready:
                number = self._pipes.index(pipe)
                answers[number] = pipe.recv()
        wrong = [f"rank {rank}:\n{text}" for rank, (kind, text) in sorted(answers.items()) if kind == "error"]
        assert not wrong, "\n".join(wrong)
        return [answers[rank][1] for rank in ranks]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    groups: dict[
        tuple[int, ...], Any
    ] = {}  # a group of gloo keeps its threads after its end: one for each set of ranks
    while True:
        try:
            ranks, name, args = pipe.recv()
        except EOFError:
            os._exit(0)  # no word with the other ranks: they are ending too
        module, function = name.split(":")
        if ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        if rank not in ranks:
            pipe.send(("done", None))
            continue
        try:
            pipe.send(("done", getattr(importlib.import_module(module), function)(groups[ranks], *args)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
