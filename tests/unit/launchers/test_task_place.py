"""The place of a process, from what torchrun, MPIs, Slurm and Kubernetes put into the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.errors import ConfigError
from guava_nb.launchers.task_place import TaskPlace, task_place

SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1067646977",
}  # fmt: skip
TABLE = [
    ({}, None),
    ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "8"}, None),  # a batch script is no task
    ({"RANK": "1"}, None),
    (
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **OPEN_MPI},
        TaskPlace("torchrun", 1, 4, 1, 2),
    ),
    (OPEN_MPI, TaskPlace("Open MPI", 3, 4, 1, 2, "ompi-1067646977")),
    ({**SLURM, **OPEN_MPI}, TaskPlace("Open MPI", 3, 4, 1, 2, "ompi-1067646977")),
    (SLURM, TaskPlace("Slurm", 5, 7, 1, 2, "slurm-17-0")),
    ({**SLURM, "SLURM_RESTART_COUNT": "1"}, TaskPlace("Slurm", 5, 7, 1, 2, "slurm-17-0-1")),
    ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}, TaskPlace("Slurm", 5, 7, 1, 2, "slurm-17-0")),  # srun --mpi=pmi2
    # MPICH's own starters run as steps of Slurm, one on each machine.
    (
        {**SLURM, "PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"},
        TaskPlace("MPI", 9, 16, 1, 8),
    ),
    (
        {"PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PALS_APID": "a-b", "PMI_SIZE": "16", "PALS_LOCAL_SIZE": "8"},
        TaskPlace("PALS", 9, 16, 1, 8, "pals-a-b"),
    ),
    ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}, TaskPlace("Kubernetes", 2, 4)),
    ({"JOB_COMPLETION_INDEX": "2"}, TaskPlace("Kubernetes", 2)),
]


@pytest.mark.parametrize(("environ", "expected"), TABLE)
def test_what_each_starter_says(environ: dict[str, str], expected: TaskPlace | None) -> None:
    assert task_place(environ) == expected


def test_the_same_in_torchruns_words() -> None:
    assert TaskPlace("x", 3, 4, 1, 2).variables() == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    assert TaskPlace("x", 3).variables() == {"RANK": "3"}
    assert TaskPlace("x", 3, 4, 3, 4).is_one_machine and not TaskPlace("x", 3, 4).is_one_machine


@pytest.mark.parametrize("text", ["three", "-1", "1.5", "\u0663"])
def test_what_is_no_number_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_RANK"):
        task_place({"OMPI_COMM_WORLD_RANK": text})


@given(st.text(max_size=30))
def test_any_list_of_tasks_gives_a_place(text: str) -> None:
    place = task_place({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text})
    assert place is not None and place.rank == 5
