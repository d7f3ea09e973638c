"""Which of how many processes this one is, as the program that started it says in the environment. Pure.

torchrun, Open MPI (`OMPI_*`), HPE's PALS (`PALS_*`), MPICH and Intel MPI (`PMI_*`), a step of Slurm (`SLURM_*`) and an indexed
Job of Kubernetes (`JOB_COMPLETION_INDEX`) are known, asked in this order: an MPI starts its processes by Slurm, whose numbers
then count something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from guava_nb.errors import ConfigError

__all__ = ["TaskPlace", "number_of", "task_place", "way_to_a_place"]


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """The place of one process among those that were started together.

    Attributes:
        by: who started them, for sentences.
        rank: 0 to world_size - 1.
        world_size: number of processes; None where the starter does not say it.
        local_rank: which of the processes on this machine it is.
        local_size: number of processes on this machine; None where that is not known.
        job: the same text in all of them and in no others; "" where the starter gives none.
    """

    by: str
    rank: int
    world_size: int | None = None
    local_rank: int = 0
    local_size: int | None = None
    job: str = ""

    @property
    def is_one_machine(self) -> bool:
        """Whether all of them are known to be on this machine."""
        return self.local_size is not None and self.local_size == self.world_size

    def variables(self) -> dict[str, str]:
        """The same as torchrun would have said it; what is not known is left out."""
        told = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank if self.local_size is not None else None,
            "LOCAL_WORLD_SIZE": self.local_size,
        }
        return {name: str(value) for name, value in told.items() if value is not None}


def task_place(environ: Mapping[str, str]) -> TaskPlace | None:
    """Read the environment; None where no starter says anything.

    Raises:
        ConfigError: a variable that should be a number is none.
    """
    for ask in (_torchrun, _open_mpi, _pals, _pmi, _slurm, _kubernetes):
        place = ask(_Variables(environ))
        if place is not None:
            return place
    return None


def number_of(environ: Mapping[str, str], name: str) -> int | None:
    """Read one variable; None where it is not set.

    Raises:
        ConfigError: it is no number.
    """
    return _Variables(environ).number(name)


def way_to_a_place(environ: Mapping[str, str]) -> str:
    """Return what to do, in words, in a process that no starter gave a place."""
    if job := _Variables(environ).text("SLURM_JOB_ID", "SLURM_JOBID"):
        return f"this is the batch script or the shell of Slurm's job {job}, one process: start the tasks with srun guava run ..."
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return (
            "in Kubernetes give the Job completionMode: Indexed, and its pods WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return "give --rank (from 0) and --world-size, as in guava run -h"


class _Variables:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, *names: str) -> str:
        """The first of these variables that is set; "" where none is."""
        return next((found for name in names if (found := self._environ.get(name, "").strip())), "")

    def number(self, *names: str) -> int | None:
        for name in names:
            text = self.text(name)
            if text and not (text.isascii() and text.isdecimal()):
                raise ConfigError(f"the variable {name} should be a whole number and is {text!r}: unset it, or mend it")
            if text:
                return int(text)
        return None


def _torchrun(found: _Variables) -> TaskPlace | None:
    rank, size = found.number("RANK"), found.number("WORLD_SIZE")
    if rank is None or size is None:
        return None
    job = found.text("TORCHELASTIC_RUN_ID")
    return TaskPlace(
        "torchrun",
        rank,
        size,
        found.number("LOCAL_RANK") or 0,
        found.number("LOCAL_WORLD_SIZE"),
        job and f"torchrun-{job}",
    )


def _open_mpi(found: _Variables) -> TaskPlace | None:
    rank = found.number("OMPI_COMM_WORLD_RANK")
    if rank is None:
        return None
    job = found.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")
    return TaskPlace(
        "Open MPI", rank, found.number("OMPI_COMM_WORLD_SIZE"), found.number("OMPI_COMM_WORLD_LOCAL_RANK") or 0,
        found.number("OMPI_COMM_WORLD_LOCAL_SIZE"), job and f"ompi-{job}",
    )  # fmt: skip


def _pals(found: _Variables) -> TaskPlace | None:
    rank = found.number("PALS_RANKID")
    if rank is None:
        return None
    job = found.text("PALS_APID")
    return TaskPlace(
        "PALS", rank, found.number("PALS_SIZE", "PMI_SIZE"), found.number("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK") or 0,
        found.number("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"), job and f"pals-{job}",
    )  # fmt: skip


def _pmi(found: _Variables) -> TaskPlace | None:
    rank, size = found.number("PMI_RANK"), found.number("PMI_SIZE")
    if rank is None:
        return None
    local, local_size = (
        found.number("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        found.number("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    )
    step = _slurm(found)
    if step is not None and (step.rank, step.world_size) == (rank, size):  # srun --mpi=pmi2 says both
        return TaskPlace("Slurm", rank, size, step.local_rank, step.local_size, step.job)
    job = found.text("PMI_JOBID")
    return TaskPlace("MPI", rank, size, local or 0, local_size, job and f"pmi-{job}")


def _slurm(found: _Variables) -> TaskPlace | None:
    """A task of a step; a batch script, which Slurm calls task 0 too, belongs to no step and is none."""
    rank, job, step = (
        found.number("SLURM_PROCID"),
        found.text("SLURM_JOB_ID", "SLURM_JOBID"),
        found.text("SLURM_STEP_ID", "SLURM_STEPID"),
    )
    if rank is None or not step:
        return None
    counts = _counts(found.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = found.number("SLURM_NODEID") or 0
    size = found.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    again = found.text("SLURM_RESTART_COUNT")  # a job that was requeued keeps its number
    return TaskPlace(
        "Slurm", rank, size, found.number("SLURM_LOCALID") or 0, counts[node] if node < len(counts) else None,
        f"slurm-{job}-{step}" + (f"-{again}" if again else "") if job else "",
    )  # fmt: skip


def _counts(text: str) -> list[int]:
    """Tasks of each node, from Slurm's short form: "2(x3),1" is [2, 2, 2, 1]."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        found += [int(match[1])] * min(int(match[2] or 1), 1 << 20)
    return found


def _kubernetes(found: _Variables) -> TaskPlace | None:
    """A pod of an indexed Job is a machine of its own; how many there are, Kubernetes does not say."""
    index = found.number("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    return TaskPlace("Kubernetes", index, found.number("WORLD_SIZE"))
