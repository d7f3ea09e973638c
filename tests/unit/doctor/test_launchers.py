"""What the doctor says of starting workers elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from guava_nb.doctor import launchers
from guava_nb.doctor.launchers import check_launcher, check_launchers
from tests.support.stand_ins import StandIns


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_which_programs_are_here(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_launchers().status == "-" and not check_launchers().fix
    StandIns(bare, monkeypatch).put("sbatch")
    found = check_launchers()
    assert (found.status, found.detail) == ("ok", "for `%guava_up --on`: slurm; not here: ssh, k8s, docker, ray")


def test_what_one_start_needs(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "no sbatch on this machine" in check_launcher("slurm:2").detail and check_launcher("slurm:2").status == "fail"
    )
    assert check_launcher("slum:2").status == "fail"
    programs = StandIns(bare, monkeypatch)
    for name in ("sbatch", "scancel", "squeue", "sinfo"):
        programs.put(name)
    monkeypatch.setenv("PATH", f"{bare}:/usr/bin:/bin")
    found = check_launcher("slurm:2,time=1:00:00")
    assert (found.name, found.status) == ("--on slurm", "ok") and "would start 2 workers" in found.detail
    assert all("--test-only" in line for line in programs.lines("sbatch")), "nothing is started"
