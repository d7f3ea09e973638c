"""Workers as a Slurm job, with stand-ins for its commands (tests/integration/test_slurm.py has the real ones)."""

from __future__ import annotations

import getpass
import shlex
import stat
import sys
from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.launchers import slurm
from guava_nb.launchers.launcher import Order
from guava_nb.launchers.slurm import SlurmLauncher
from guava_nb.protocol.joincode import JoinCode
from tests.support.stand_ins import StandIns


@pytest.fixture
def cluster(programs: StandIns) -> StandIns:
    programs.put("sinfo", "(null)\ngpu:a100:4\n")
    programs.put("sbatch", "17;main\n")
    programs.put("sbatch", when="--test-only")
    programs.put("squeue", "PENDING (Resources)\n")
    programs.put("scancel")
    return programs


def started(text: str, order: Order) -> SlurmLauncher:
    launcher = SlurmLauncher(text)
    launcher.check()
    launcher.start(order)
    return launcher


def test_the_job_has_its_options_and_no_secret_in_sight(cluster: StandIns, order: Order) -> None:
    launcher = started("8,time=4:00:00,partition=gpu,exclusive=", order)
    words = shlex.split(cluster.lines("sbatch")[-1])
    assert {"--parsable", "--ntasks=8", "--gpus-per-task=1", "--time=4:00:00", "--partition=gpu", "--exclusive"} < set(
        words
    )
    assert {"--requeue", "--signal=TERM@90", f"--job-name={launcher.mark}"} < set(words)
    script, code = cluster.input("sbatch"), order.folder / f"{launcher.mark}.code"
    assert f"exec srun --kill-on-bad-exit=0 --wait=0 {sys.executable} -m guava_nb worker --join-file {code}" in script
    assert code.read_text().strip() == order.code.encode() and stat.S_IMODE(code.stat().st_mode) == 0o600
    assert stat.S_IMODE(order.folder.stat().st_mode) == 0o700
    assert order.code.encode() not in script + " ".join(cluster.lines("sbatch"))


@pytest.mark.parametrize(("text", "gpus"), [("2,gpus=0", None), ("2,gpus=2", "--gpus-per-task=2")])
def test_gpus_are_asked_for_as_wished(cluster: StandIns, order: Order, text: str, gpus: str | None) -> None:
    started(text, order)
    found = [word for word in cluster.lines("sbatch")[-1].split() if word.startswith("--gpus")]
    assert found == ([gpus] if gpus else [])


def test_a_cluster_without_gpus_is_asked_for_none(cluster: StandIns, order: Order) -> None:
    cluster.put("sinfo", "(null)\n")
    started("2", order)
    assert "--gpus" not in cluster.lines("sbatch")[-1]


def test_each_change_of_state_is_told_once_and_the_end_with_its_last_line(
    cluster: StandIns, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "LOOK_S", 0.0)
    launcher = started("2", order)
    assert launcher.look() == "Slurm's job 17: pending (resources)" and launcher.look() == ""
    cluster.put("squeue", "RUNNING (None)\n")
    assert launcher.look() == "Slurm's job 17: running" and launcher.failure() == ""
    cluster.put("squeue", status=1, complains="slurm_load_jobs error: Unable to contact slurm controller")
    assert launcher.look() == "" and launcher.failure() == ""
    (order.folder / f"{launcher.mark}.log").write_text("one\nDUE TO TIME LIMIT\n")
    cluster.put("squeue", status=1, complains="slurm_load_jobs error: Invalid job id specified")
    assert "has ended: DUE TO TIME LIMIT" in launcher.look()
    assert "has ended" in launcher.failure() and launcher.look() == ""


def test_a_new_code_takes_the_old_ones_place_and_the_end_takes_job_and_file(cluster: StandIns, order: Order) -> None:
    launcher = started("2", order)
    code, new = order.folder / f"{launcher.mark}.code", JoinCode.new("192.0.2.8", 4712)
    launcher.follow(new)
    assert code.read_text().strip() == new.encode() and stat.S_IMODE(code.stat().st_mode) == 0o600
    assert launcher.end() == "" and not code.exists()
    assert cluster.lines("scancel") == [f"--name={launcher.mark} --user={getpass.getuser()}"]
    cluster.put("scancel", status=1, complains="scancel: error: no controller")
    assert "no controller" in launcher.end()


def test_a_later_process_ends_it_by_text_and_mark(cluster: StandIns) -> None:
    later = SlurmLauncher("2")
    later.mark = "guava-0123456789"
    assert later.end() == "" and "--name=guava-0123456789" in cluster.lines("scancel")[0]


def test_what_slurm_refuses_is_told_before_anything_is_started(cluster: StandIns) -> None:
    cluster.put("sbatch", status=1, when="--test-only", complains="sbatch: error: invalid partition specified: gqu")
    launcher = SlurmLauncher("2,partition=gqu")
    with pytest.raises(ConfigError, match="invalid partition specified: gqu"):
        launcher.check()
    assert all("--test-only" in line for line in cluster.lines("sbatch"))


def test_a_machine_without_slurm_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no sbatch on this machine.*login node"):
        SlurmLauncher("2").check()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "needs the number of workers, as in --on slurm:8"),
        ("eight", "needs the number"),
        ("0", "needs the number"),
        ("8,9", "needs the number"),
        ("8,gpus=two", "gpus=two should be a whole number"),
        ("8,time=1,time=2", "time is given twice"),
        ("8,wrap=ls", "wrap is set by guava_nb itself"),
        ("8,job-name=x", "job-name is set by"),
        ("8,a b=c", "no long option"),
    ],
)
def test_a_text_that_cannot_be_read(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SlurmLauncher(text)


def test_a_virtual_environment_is_named_by_its_folder(tmp_path: Path, cluster: StandIns, order: Order) -> None:
    started(f"1,python={tmp_path}", order)
    assert f"{tmp_path}/bin/python -m guava_nb" in cluster.input("sbatch")
