"""`--on slurm:N` with a real Slurm: a job is requeued in the middle of a run, no sample is lost, and the end takes it back."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator
from guava_nb.launchers import slurm as slurm_launcher
from guava_nb.launchers.slurm import SlurmLauncher
from tests.support import slurm
from tests.support.processes import ROOT, eventually

pytestmark = [pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not() or "-"), pytest.mark.timeout(420)]

CELL = """
import time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        time.sleep(0.1)  # so that the run lasts longer than the word to its workers
        return self.layer(x)
"""
STEPS, BATCH = 60, 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm.running(Path(folder)) as running:
        yield running


@pytest.fixture
def session(cluster: slurm.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Orchestrator]:
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(slurm_launcher, "LOOK_S", 0.5)
    with Orchestrator(tunnel="direct", precision="fp64", num_workers=2, seed=3) as orchestrator:
        yield orchestrator


def losses_of_a_plain_loop(data: TensorDataset, net: nn.Module) -> list[float]:
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for inputs, targets in DataLoader(data, batch_size=BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_a_job_that_is_requeued_in_mid_run_loses_no_sample(
    session: Orchestrator, cluster: slurm.Slurm, tmp_path: Path
) -> None:
    data = TensorDataset(torch.randn(STEPS * BATCH, 4, dtype=torch.float64), torch.randint(0, 3, (STEPS * BATCH,)))
    session.share(CELL)
    namespace: dict[str, Any] = {}
    exec(CELL, namespace)
    model = namespace["Net"]()
    plain = copy.deepcopy(model.layer)
    session.register_model(model)
    launcher = session.launch_on("slurm:2,time=10")
    assert isinstance(launcher, SlurmLauncher)
    session.wait_for_workers(2, 150)
    run = session.start_training(
        DataLoader(data, batch_size=BATCH),
        criterion="CrossEntropyLoss",
        optimizer="SGD",
        optimizer_args={"lr": 0.1},
        detach=True,
    )
    eventually(lambda: run.status().step >= 5, 120, "the run is in the middle")
    cluster.ask("scontrol", "requeue", launcher._job)
    eventually(lambda: "PENDING" in cluster.ask("squeue", "-h", "-o", "%T"), 60, "its tasks have left")
    cluster.ask("scontrol", "update", f"JobId={launcher._job}", "StartTime=now")  # else Slurm waits two minutes
    assert run.wait(180)
    found = run.report()
    assert (found["steps"], found["samples"]) == (STEPS, STEPS * BATCH)
    assert (found["lost_samples"], found["duplicated_samples"]) == (0, 0)
    assert len(found["workers"]) > 2, "the run was over before its workers left"
    assert found["train_loss"] == pytest.approx(losses_of_a_plain_loop(data, plain), abs=1e-9)
    session.close()
    eventually(lambda: not cluster.ask("squeue", "-h"), 60, "the job is gone")
    assert not list((tmp_path / "guava_nb" / "launched").glob("*.code")), "the secret is gone"


def test_a_job_that_slurm_cannot_hold_is_refused_by_its_own_words(session: Orchestrator) -> None:
    with pytest.raises(ValueError, match="Slurm would not take this job: .*partition"):
        session.launch_on("slurm:2,partition=nowhere")
