"""Two GPUs: every mode over the relay and over NCCL, against plain PyTorch on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import Orchestrator
from guava_nb.cli.demo_model import DigitNet
from guava_nb.data.digits import split_digits

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and this machine has fewer"),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Orchestrator]:
    with Orchestrator(num_workers=2, precision="fp64", hash_every_steps=1) as made:
        for number in range(2):
            made.launch_workers(1, device=f"cuda:{number}")
        made.wait_for_workers(2, timeout=120)
        made.register_model("guava_nb.cli.demo_model:DigitNet")
        yield made


def batches() -> DataLoader[Any]:
    images, labels = split_digits(0)[0]
    return DataLoader(TensorDataset(images[:330], labels[:330]), batch_size=32)


@pytest.fixture(scope="module")
def plain() -> tuple[torch.nn.Module, list[float]]:
    torch.manual_seed(0)
    model = DigitNet().double().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        for images, labels in batches():
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return model.cpu(), losses


MODES = [
    ("zero", {"zero_stage": 1}),
    ("zero", {"zero_stage": 2}),
    ("zero", {"zero_stage": 3}),
    ("tensor", {}),
    ("pipeline", {}),
    ("pipeline", {"pipeline_schedule": "gpipe", "checkpoint_activations": ""}),
    ("data", {}),
]


@pytest.mark.parametrize("path", ["relay", "direct"])
@pytest.mark.parametrize(("mode", "settings"), MODES, ids=str)
def test_a_mode_on_two_gpus_equals_one(
    orchestrator: Orchestrator,
    plain: tuple[torch.nn.Module, list[float]],
    mode: str,
    settings: dict[str, Any],
    path: str,
) -> None:
    orchestrator.set_mode(mode, path=path, **settings)
    run = orchestrator.start_training(
        batches(), num_epochs=2, optimizer="AdamW", optimizer_args={"lr": 1e-3}, max_grad_norm=0.5, fresh=True,
        progress=False,
    )  # fmt: skip
    model, losses = plain
    gap = max(abs(record["loss"] - loss) for record, loss in zip(run.history, losses, strict=True))
    ours = run.model().state_dict()
    weights = max(float((ours[name] - value).abs().max()) for name, value in model.state_dict().items())
    print(
        f"{mode} {settings} {path}: {run.report()['path']} losses {gap:.1e} weights {weights:.1e}",
        run.report()["step_s"],
    )
    assert gap <= 1e-9 and weights <= 1e-9
    expected = {"relay": "relay", "direct": "direct"}[path]
    if not (mode == "data" and path == "relay"):
        assert run.report()["path"]["path"] == expected
        assert run.report()["path"]["backend"] == {"relay": "guava", "direct": "nccl"}[path]
