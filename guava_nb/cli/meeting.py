"""How the processes of one `guava run` that torchrun, an MPI or Slurm started find each other, without a join code to paste."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from guava_nb.config.state_folder import state_folder
from guava_nb.errors import ConfigError, LinkError
from guava_nb.launchers.board import Board, FolderBoard, StoreBoard
from guava_nb.launchers.ranks import CODE, code_for_rank
from guava_nb.launchers.task_place import TaskPlace

if TYPE_CHECKING:
    from guava_nb.backend.preset_group import Place, ProgramGroup

__all__ = ["board_of", "hub_host", "meet_at_board"]

#: Rank 0 stays for the others so long when its program is done.
LINGER_S = 30.0


def board_of(place: TaskPlace, environ: Mapping[str, str], wait_s: float) -> Board:
    """The board of all ranks: torchrun's store, one at MASTER_ADDR, or a folder of this user.

    Raises:
        ConfigError: nothing tells this start from others.
    """
    assert place.world_size is not None
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=timedelta(seconds=wait_s)))
        return StoreBoard(store)
    job = place.job or (f"parent-{os.getppid()}" if place.is_one_machine else "")
    if not job:
        raise ConfigError(
            f"{place.by} does not say which start this process belongs to: set MASTER_ADDR to the machine of rank 0 and "
            "MASTER_PORT to a free port there, the same in all processes"
        )
    board = FolderBoard(state_folder() / "ranks" / "".join(c if c.isalnum() or c in "-_." else "_" for c in job))
    if place.rank == 0:
        board.begin()
    return board


def hub_host(place: TaskPlace, environ: Mapping[str, str]) -> str:
    """Where the others reach rank 0."""
    if named := environ.get("GUAVA_HOST") or environ.get("MASTER_ADDR"):
        return named
    if place.is_one_machine:
        return "127.0.0.1"
    from guava_nb.tunnels.direct import own_address

    return own_address()


@contextmanager
def meet_at_board(place: Place, task: TaskPlace, board: Board, say: Callable[[str], None]) -> Iterator[ProgramGroup]:
    """A program's group whose hub is in rank 0; the others learn from the board where.

    Raises:
        ConfigError: rank 0 has not come in time.
        GuavaError: as `ProgramGroup`.
    """
    from guava_nb.backend.embedded_hub import EmbeddedHub
    from guava_nb.backend.preset_group import ProgramGroup

    with ExitStack() as stack:
        if place.rank == 0:
            hub = EmbeddedHub(hub_host(task, os.environ))
            stack.callback(hub.close_when_left, LINGER_S)
            stack.callback(board.close)
            board.put(CODE, hub.code.encode())
            group = stack.enter_context(ProgramGroup(replace(place, code=hub.code), say))
            board.close()  # all are here
        else:
            group = _joined(stack, place, task, board, say)
        yield group


def _joined(stack: ExitStack, place: Place, task: TaskPlace, board: Board, say: Callable[[str], None]) -> ProgramGroup:
    from guava_nb.backend.preset_group import ProgramGroup
    from guava_nb.protocol.joincode import JoinCode

    tried = ""
    while (text := code_for_rank(board, tried, place.wait_s)) is not None:
        try:
            return stack.enter_context(ProgramGroup(replace(place, code=JoinCode.decode(text)), say))
        except LinkError:
            tried = text  # of a start before this one, which was killed
    raise ConfigError(
        f"rank 0 of {place.world_size} did not come within {place.wait_s:g} s (started by {task.by}); on several machines "
        "all must see the same home folder, or have MASTER_ADDR and MASTER_PORT set"
    )
