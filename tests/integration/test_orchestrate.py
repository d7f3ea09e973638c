"""`guava run` under torchrun, Open MPI and Slurm without a code: unchanged programs, and rank 0 as orchestrator of the others."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import ROOT, eventually

LAUNCH_S = 120.0
PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
rank, size, local = dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]
print(f"rank {rank} of {size} local {local} total {total.item():g}\\n", end="", flush=True)
dist.destroy_process_group()
"""
SCRIPT = """
import os, pathlib, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from guava_nb import Orchestrator
assert "RANK" not in os.environ and "MASTER_ADDR" not in os.environ
data = DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,))), batch_size=8)
for session in range(int(sys.argv[1])):
    with Orchestrator() as orch:
        orch.share("from torch import nn\\ndef build():\\n    return nn.Linear(4, 3)\\n")
        orch.register_model("build")
        print("workers", *sorted(orch.wait_for_workers(timeout=90)), flush=True)
        found = orch.start_training(data, criterion="CrossEntropyLoss", optimizer="SGD", optimizer_args={"lr": 0.1}).report()
        print("trained", found["steps"], found["samples"], found["lost_samples"], flush=True)
        if len(sys.argv) > 2:
            raise SystemExit("the script is not content")
"""
#: Tells the worker's process, and goes on when it has been replaced.
WAITS_FOR_ANOTHER = """
        import time
        from guava_nb import GuavaError
        (first,) = orch.run_code("import os; os.getpid()").values()
        pathlib.Path({path!r}).write_text(str(first))
        now = first
        while now == first:
            time.sleep(0.2)
            try:
                (now,) = orch.run_code("import os; os.getpid()").values()
            except GuavaError:  # it is lost, and the next one is not here yet
                pass
"""

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(os.name == "nt", reason="process groups of POSIX")]


class Launch:
    """A launcher with its processes, all of which end with the test."""

    def __init__(self, words: list[str], folder: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment.update(
            PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", XDG_STATE_HOME=str(folder), OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        )  # fmt: skip
        self.process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=LAUNCH_S)
        return self.process.returncode, output

    def kill(self) -> None:
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        for process in (*family, psutil.Process(os.getpid())):
            if process.pid != os.getpid() and process.is_running():
                process.kill()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    started: list[Launch] = []
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(starter: str, count: int, *words: str) -> Launch:
        lines = {
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m"],
            "mpirun": ["mpirun", "--oversubscribe", "-n", str(count), sys.executable, "-m"],
            "srun": ["srun", "-n", str(count), sys.executable, "-m"],
        }
        if starter != "torchrun" and shutil.which(starter) is None:
            pytest.skip(f"{starter} is not here (packages openmpi-bin, slurm-client)")
        if (
            starter == "srun"
            and subprocess.run(["srun", "-n", "1", "true"], capture_output=True, timeout=60).returncode
        ):
            pytest.skip("no Slurm cluster answers srun")
        started.append(Launch([*lines[starter], "guava_nb", "run", *words], tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.mark.parametrize("starter", ["mpirun", "srun"])
def test_an_unchanged_program_needs_no_code(launch, starter: str, tmp_path: Path) -> None:
    status, output = launch(starter, 2, str(tmp_path / "program.py")).end()
    assert status == 0, output
    for rank in (0, 1):
        assert f"rank {rank} of 2 local " in output and "total 3" in output, output
    assert not list((tmp_path / "guava_nb" / "ranks").iterdir()), "the secret is gone"


def two_sessions(started: Launch, folder: Path) -> None:
    status, output = started.end()
    assert status == 0, output
    assert output.count("workers rank-1") == 2 and output.count("trained 3 24 0") == 2, output
    ranks = folder / "guava_nb" / "ranks"
    assert not ranks.exists() or not list(ranks.iterdir()), "the secret is gone"


def a_failure(started: Launch, folder: Path) -> None:
    status, output = started.end()
    assert status != 0 and "the script is not content" in output, output


def a_killed_worker(started: Launch, folder: Path) -> None:
    path = folder / "worker.pid"
    eventually(lambda: path.exists() and path.read_text(), LAUNCH_S, "the worker is here")
    os.kill(int(path.read_text()), signal.SIGKILL)
    status, output = started.end()
    assert status == 0 and "trained 3 24 0" in output, output


@pytest.mark.parametrize(
    ("starter", "what"),
    [
        ("torchrun", two_sessions), ("mpirun", two_sessions), ("srun", two_sessions), ("torchrun", a_failure),
        ("torchrun", a_killed_worker),
    ],
)  # fmt: skip
def test_rank_0_orchestrates_the_others(
    launch, starter: str, what: Callable[[Launch, Path], None], tmp_path: Path
) -> None:
    wait = WAITS_FOR_ANOTHER.format(path=str(tmp_path / "worker.pid")) if what is a_killed_worker else ""
    (tmp_path / "script.py").write_text(SCRIPT.replace("        found =", f"{wait}        found ="))
    arguments = {two_sessions: ("2",), a_failure: ("1", "fail"), a_killed_worker: ("1",)}[what]
    what(launch(starter, 2, "--orchestrate", str(tmp_path / "script.py"), *arguments), tmp_path)


def test_one_process_alone_is_told_to_be_more(launch, tmp_path: Path) -> None:
    status, output = launch("torchrun", 1, "--orchestrate", str(tmp_path / "script.py"), "1").end()
    assert status != 0 and "there is rank 0 alone" in output, output
