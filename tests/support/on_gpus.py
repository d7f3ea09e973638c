"""What runs on several GPUs are measured against: the demo's net on one of them, in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.cli.demo_model import DigitNet
from guava_nb.datasets.digits import split_digits
from guava_nb.training.run import Run

Plain = tuple[torch.nn.Module, list[float]]


def batches() -> DataLoader[Any]:
    images, labels = split_digits(0)[0]
    return DataLoader(TensorDataset(images[:330], labels[:330]), batch_size=32)


def train_plainly() -> Plain:
    """Two epochs; the model on the CPU, and the loss of every step."""
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


def assert_equal(run: Run, plain: Plain) -> None:
    """Losses and weights of a run over the same batches are those of one GPU."""
    model, losses = plain
    gap = max(abs(record["loss"] - loss) for record, loss in zip(run.history, losses, strict=True))
    ours = run.model().state_dict()
    weights = max(float((ours[name] - value).abs().max()) for name, value in model.state_dict().items())
    print(f"{run.report()['path']} losses {gap:.1e} weights {weights:.1e}", run.report()["step_s"])
    assert gap <= 1e-9 and weights <= 1e-9
