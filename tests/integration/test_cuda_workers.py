"""Worker processes on a GPU: the same weights as plain PyTorch on the CPU, in float64."""

from __future__ import annotations

import time

import pytest
import torch

from guava_nb import EnergyMeter, energy_task
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


def test_a_task_has_the_device_s_time_and_the_code_in_it_does_not_wait() -> None:
    """The host is done with the block long before the device is; the time of the task is the device's."""
    a = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with EnergyMeter(["cuda:0"]) as meter:
        begun = time.monotonic()
        with energy_task("products"):
            start.record()
            for _ in range(100):
                a @ a
            end.record()
        host_s = time.monotonic() - begun
        torch.cuda.synchronize()
        device_s = start.elapsed_time(end) / 1e3
    assert meter.window is not None
    (task,) = meter.window.tasks
    assert task.seconds == pytest.approx(device_s, rel=0.05) and host_s < device_s / 2
    assert task.joules is None or 0 < task.joules <= (meter.window.joules or 0) * 1.05


@pytest.mark.timeout(180)
def test_workers_take_a_gpu_each_and_then_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `launch_workers(n)`, %guava_up --local n and `guava demo` do by default."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    gpus = torch.cuda.device_count()
    with Orchestrator(num_workers=gpus + 1, precision="fp64", bucket_mb=1) as orchestrator:
        orchestrator.launch_workers(gpus + 1)
        told = "\n".join(orchestrator.status().notes)
        orchestrator.wait_for_workers(timeout=120)
        orchestrator.register_model("tests.support.training:SmallNet")
        run = orchestrator.start_training(loader(), num_epochs=2, optimizer_args={"lr": 0.01}, progress=False)
        model, _ = plain(spec(), loader(), 2)
        assert difference(run.model(), model) <= 1e-9
        status = orchestrator.status()
        assert sorted(w.device for w in status.workers) == ["cpu", *(f"cuda:{k}" for k in range(gpus))]
        assert "local-1 takes cuda:0" in told
        assert f"local-{gpus + 1} takes the processor" in told
