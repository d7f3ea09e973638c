"""`guava run --orchestrate`: rank 0 runs the script of an Orchestrator user, the other ranks are its workers."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import replace

from guava_nb.cli.meeting import board_of, hub_host
from guava_nb.cli.worker import follow, own_device
from guava_nb.errors import ConfigError, GuavaError
from guava_nb.launchers.board import Board
from guava_nb.launchers.ranks import RanksLauncher, beating, code_for_rank
from guava_nb.launchers.task_place import TaskPlace

__all__ = ["SEVERAL", "orchestrate"]

#: What to do where there is no other rank.
SEVERAL = "start several processes, as in torchrun --nproc-per-node 4 -m guava_nb run --orchestrate train.py"

#: What torchrun and its like set for the processes of a process group, which these are not.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Times that a rank whose worker failed joins the same session again.
MOST_AGAIN = 3


def orchestrate(args: argparse.Namespace, task: TaskPlace, run_script: Callable[[], int]) -> int:
    """Be the orchestrator or one of its workers; the exit status is that of rank 0's script, and 0 for a worker.

    Raises:
        ConfigError: there is no other rank, or the ranks cannot find each other.
    """
    if args.join is not None:
        raise ConfigError("--orchestrate opens a session and joins none: leave --join out")
    if task.world_size is None or task.world_size < 2:
        raise ConfigError(f"--orchestrate makes workers of ranks 1 and up, and there is rank 0 alone: {SEVERAL}")
    if not 0 <= task.rank < task.world_size:
        raise ConfigError(
            f"there is no rank {task.rank} among {task.world_size} processes; ranks go from 0 to {task.world_size - 1}"
        )
    board = board_of(task, os.environ, args.wait)
    host = hub_host(task, os.environ)
    _forget(os.environ)
    if task.rank == 0:
        return _lead(task, board, host, run_script)
    return _Worker(task, board, args.wait).work()


def _forget(environ: MutableMapping[str, str]) -> None:
    """A library in the script would take them for a process group that it has to wait for."""
    for name in [name for name in environ if name in _VARIABLES or name.startswith("TORCHELASTIC_")]:
        del environ[name]


def _lead(task: TaskPlace, board: Board, host: str, run_script: Callable[[], int]) -> int:
    from guava_nb.cluster.elsewhere.launched_workers import launch_as_standing

    others = (task.world_size or 1) - 1
    launch_as_standing(lambda: RanksLauncher(board, others), "" if task.is_one_machine else host)
    with beating(board):
        return run_script()


class _Worker:
    """A rank that works for each session of rank 0."""

    def __init__(self, task: TaskPlace, board: Board, wait_s: float) -> None:
        self._task, self._board, self._wait_s = task, board, wait_s
        self._is_asked_to_end = self._has_met = False

    def work(self) -> int:
        """Work until rank 0 has ended, or this process is asked to end."""
        from guava_nb.telemetry.hardware import pick_device

        device = str(pick_device(own_device("auto", _of_workers(self._task))))
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, self._on_end)
        code, failed = "", 0
        while failed <= MOST_AGAIN and (found := self._next_code("" if failed else code)) is not None:
            failed = failed if found == code else 0
            code = found
            failed = 0 if self._serve(code, device) == 0 else failed + 1
        return int(failed > MOST_AGAIN)  # else rank 0 has ended, whose status tells how

    def _next_code(self, before: str) -> str | None:
        return code_for_rank(self._board, before, self._wait_s, lambda: self._is_asked_to_end, self._has_met)

    def _on_end(self, number: int, frame: object) -> None:
        self._is_asked_to_end = True

    def _serve(self, code: str, device: str) -> int:
        from guava_nb.worker.network_worker import start_worker

        try:
            worker = start_worker(code, device, f"rank-{self._task.rank}")
        except GuavaError as problem:
            self._say(str(problem))
            return 1
        try:
            return follow([worker], self._say, asked=lambda: self._on_end(0, None))
        finally:
            self._has_met |= worker.status().joined
            worker.close()

    def _say(self, line: str) -> None:
        print(f"guava: rank {self._task.rank}: {line}", file=sys.stderr, flush=True)


def _of_workers(task: TaskPlace) -> TaskPlace:
    """The place among the workers of this machine: rank 0, which computes nothing, leaves its GPU to the next."""
    is_beside_rank_0 = task.rank == task.local_rank  # ranks are dealt out machine by machine
    return replace(task, local_rank=task.local_rank - 1) if is_beside_rank_0 and task.local_rank else task
