"""Models that change their parameters in a forward or at the start of a step, the last batch smaller than some teams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.programs.program import Program, batches, draw, labels

__all__ = ["PROGRAMS"]

CE = "CrossEntropyLoss"
THROWN_AWAY = {"zero 3": "which is thrown away", "site": "no forward runs where the weights are"}
BY_SAMPLES = "max_norm"


class HeldDown(nn.Linear):
    """EEGNet's layer: each row's norm is at most `most`."""

    def __init__(self, *sizes, most=0.4):
        super().__init__(*sizes)
        self.most = most

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=self.most)
        return super().forward(x)


class Normalised(nn.Linear):
    """EDM2's layer: weights are made of length 1 before each use."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight, dim=1))
        return super().forward(x)


class Shrinking(nn.Linear):
    """Changed a second time, it is another one."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


class Noisy(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.add_(torch.randn_like(self.weight), alpha=0.01)
        return super().forward(x)


def ending_in(layer):
    return nn.Sequential(nn.Linear(5, 8), nn.ELU(), nn.Linear(8, 8), nn.ELU(), layer(8, 3))


def eeg():
    return ending_in(HeldDown)


def normalised():
    return ending_in(Normalised)


def shrinking():
    return ending_in(Shrinking)


def noisy():
    return ending_in(Noisy)


def plain_layers():
    return ending_in(nn.Linear)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


def clamped_step(model, batch):
    """WGAN's critic."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)
    return F.cross_entropy(model(batch[0]), batch[1])


def adversarial_step(model, batch):
    """FGM: weights are moved, used, and put back."""
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    kept = model[0].weight.data.clone()
    model[0].weight.data.add_(0.01 * kept.sign())
    loss = loss + F.cross_entropy(model(x.detach()), y)
    model[0].weight.data = kept
    return loss


def classified():
    return batches(draw(17, 5), labels(3, 17))


def texts():
    return batches(labels(20, 16, 4), labels(3, 16))


SGD = {"lr": 0.3, "momentum": 0.9}

PROGRAMS = [
    Program(name="max norm in the forward", model=eeg, data=classified, criterion=CE, optimizer_args=SGD, refused=THROWN_AWAY),
    Program(name="unit weights in the forward", model=normalised, data=classified, criterion=CE, refused=THROWN_AWAY),
    Program(name="clamp at the start of the step", model=plain_layers, data=classified, step=clamped_step, optimizer="RMSprop",
            optimizer_args={"lr": 0.05}, refused={"site": THROWN_AWAY["site"]}),
    Program(name="shrunk in the forward", model=shrinking, data=classified, criterion=CE,
            refused={**THROWN_AWAY, "pipeline": "changes parameter '4.weight'"}),
    Program(name="noise on weights", model=noisy, data=classified, criterion=CE, modes=("data", "relay", "zero 1", "site"),
            refused={"*": "draws its own random numbers", **THROWN_AWAY}),
    Program(name="embedding with max_norm", model=Words, data=texts, criterion=CE, optimizer_args=SGD,
            refused={**THROWN_AWAY, **dict.fromkeys(("data", "relay", "site", "zero 1"), BY_SAMPLES),
                     "pipeline": "runs it for each micro-batch"}),
    Program(name="moved and put back", model=plain_layers, data=classified, step=adversarial_step,
            refused={"zero 3": "which is thrown away", "tensor": "is read outside its layer"}),
]  # fmt: skip
