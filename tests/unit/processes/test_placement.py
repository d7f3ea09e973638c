"""Workers take the GPUs and cores that are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.processes.placement import Placement, allowed_cores, describe, place, visible_gpus

GPUS = ["cuda:0", "cuda:1"]


def test_gpus_first_then_processors_that_share_the_cores() -> None:
    assert place(2, gpus=[], cores=8) == [Placement("cpu", 3)] * 2
    assert place(1, gpus=[], cores=8) == [Placement("cpu", 7)]
    assert place(2, gpus=[], cores=2) == [Placement("cpu", 1)] * 2
    assert place(3, gpus=GPUS, cores=13) == [Placement("cuda:0", 4), Placement("cuda:1", 4), Placement("cpu", 4)]


def test_what_runs_already_keeps_its_gpu_and_its_part_of_the_cores() -> None:
    assert place(2, gpus=GPUS, cores=13, running=["cuda:0"]) == [Placement("cuda:1", 4), Placement("cpu", 4)]
    assert place(1, gpus=GPUS, cores=16, running=["cuda:1", "cpu"]) == [Placement("cuda:0", 5)]


def test_what_was_asked_for_is_given() -> None:
    assert place(2, "cpu", gpus=GPUS, cores=9) == [Placement("cpu", 4)] * 2
    assert place(1, "cuda:1", 2, gpus=GPUS, cores=9) == [Placement("cuda:1", 2)]


@given(st.integers(0, 9), st.integers(0, 4), st.integers(1, 64), st.integers(0, 5))
def test_no_gpu_is_given_twice_and_no_core_beyond_one_each(count: int, gpus: int, cores: int, running: int) -> None:
    names = [f"cuda:{k}" for k in range(gpus)]
    before = [one.device for one in place(running, gpus=names, cores=cores)]
    made = place(count, gpus=names, cores=cores, running=before)
    taken = [d for d in [*before, *(one.device for one in made)] if d != "cpu"]
    assert len(set(taken)) == len(taken) == min(gpus, running + count)
    assert all(one.threads and one.threads >= 1 for one in made)
    assert sum(one.threads or 0 for one in made) <= max(cores - 1, count)


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu.max": "max 100000"}, "0::/\n", 8),
        ({"cpu.max": "250000 100000"}, "0::/\n", 2),
        ({"cpu.max": "50000 100000"}, "0::/\n", 1),
        ({"cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, "0::/a\n", 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, "2:cpu:/\n", 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "2:cpu:/\n", 8),
        ({"cpu.max": "nonsense"}, "0::/\n", 8),
    ],
)
def test_cores_are_those_that_a_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], own: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    assert allowed_cores(tmp_path / "groups", tmp_path / "own") == cores


def test_the_gpus_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_gpus() == GPUS


def test_what_was_taken_is_said() -> None:
    said = describe(["local-1", "local-2"], [Placement("cuda:0", 4), Placement("cpu", 1)])
    assert said == "local-1 takes cuda:0, 4 threads; local-2 takes the processor, 1 thread"
