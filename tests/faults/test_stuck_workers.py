"""A worker whose loop never comes out of a group that was given up leaves, and its process is replaced: the next run trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator, RemoteError
from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(240)

CELL = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def stuck_step(model, batch):
    # As gloo where it misses the end of its connections: below Python, in a function of torch.distributed.
    if torch.distributed.get_rank() == 0:
        raise ValueError("this batch is cursed")
    names = {}
    exec(compile("def wait(lock): lock.acquire() and lock.acquire()", torch.distributed.__file__, "exec"), names)
    import threading
    names["wait"](threading.Lock())
"""


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(16, 4, generator=generator), torch.arange(16) % 2), 8)


def test_a_worker_that_is_blocked_for_ever_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with Orchestrator(num_workers=2, checkpoint_dir=str(tmp_path)) as orchestrator:
        workers = orchestrator.launch_workers(2, device="cpu")
        orchestrator.wait_for_workers(timeout=90)
        orchestrator.share(CELL)
        orchestrator.register_model("Net")
        orchestrator.set_mode("zero", zero_stage=3)
        before = {worker._process.pid for worker in workers}
        with pytest.raises(RemoteError, match="this batch is cursed"):
            orchestrator.start_training(loader(), step="stuck_step", check="off", progress=False)
        run = orchestrator.start_training(loader(), num_epochs=2, progress=False)
        assert len(run.history) == 4 and run.lost_samples == run.duplicated_samples == 0
        assert len(before & {worker._process.pid for worker in workers}) == 1
