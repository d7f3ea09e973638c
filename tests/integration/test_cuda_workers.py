"""Worker processes on a GPU: the same weights as plain PyTorch on the CPU, in float64."""

from __future__ import annotations

import pytest
import torch

from guava_nb.orchestrator import Orchestrator
from tests.support.training import difference, loader, losses_of, plain, spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("site", ["workers", "orchestrator"])
@pytest.mark.parametrize("workers", [1, 2])
def test_gpu_workers_equal_plain_pytorch(workers: int, site: str) -> None:
    with Orchestrator(num_workers=workers, precision="fp64", bucket_mb=1, optimizer_site=site) as orchestrator:
        orchestrator.launch_workers(workers, device="cuda:0")
        orchestrator.wait_for_workers(timeout=120)
        orchestrator.register_model("tests.support.training:SmallNet")
        run = orchestrator.start_training(
            loader(), loader(), num_epochs=4, optimizer_args={"lr": 0.01}, progress=False, max_grad_norm=0.5
        )
        model, losses = plain(spec(max_grad_norm=0.5), loader(), 4)
        assert losses_of(run) == pytest.approx(losses, abs=1e-10)
        assert difference(run.model(), model) <= 1e-9
        assert (run.lost_samples, run.duplicated_samples) == (0, 0)
        assert {w.device for w in orchestrator.status().workers} == {"cuda:0"}
