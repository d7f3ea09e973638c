"""Losses that take derivatives by themselves, roots of means, and what goes by the order of things."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.parity.programs.program import Program, batches, draw, labels

__all__ = ["PROGRAMS"]

CE = "CrossEntropyLoss"
STAGED = {"pipeline": "switches gradients or autocast on or off"}
TRANSFORM = "inside a transform of torch.func"


class Heat(nn.Module):
    """Temperature at places and times, with a conductivity to be found."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
        self.conductivity = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, t):
        return self.layers(torch.cat([x, t], 1))


def derivative(of, by):
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


def residual_step(model, batch):
    x, t, measured = batch
    x, t = x.requires_grad_(), t.requires_grad_()
    u = model(x, t)
    residual = derivative(u, t) - model.conductivity * derivative(derivative(u, x), x)
    return residual.square().mean() + F.mse_loss(u, measured)


def jacobian_step(model, batch):
    x, t, measured = batch
    slopes = torch.func.vmap(torch.func.jacrev(lambda a, b: model(a[None], b[None])[0, 0]))(x, t)
    return F.mse_loss(model(x, t), measured) + slopes.square().mean()


def measured():
    return batches(draw(22, 1), draw(22, 1, seed=2), draw(22, 1, seed=3))


def classified():
    return batches(draw(26, 5), labels(3, 26))


def layers():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def by_place(named):
    """A smaller rate for earlier layers, by their place."""
    named = list(named)
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.8**place} for place, (_, p) in enumerate(reversed(named))])


class Late(nn.Module):
    """Makes a parameter when it sees the first batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(5, 8), nn.Linear(8, 3), None

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(8, dtype=x.dtype))
        return self.last(torch.tanh(self.first(x)) * self.scale)


class Centred(nn.Module):
    """Takes a moving mean off, after it was moved or before."""

    def __init__(self, moves_first=True):
        super().__init__()
        self.first, self.last, self.moves_first = nn.Linear(5, 8), nn.Linear(8, 3), moves_first
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x, mean = torch.tanh(self.first(x)), self.mean.clone()
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return self.last(x - (self.mean if self.moves_first else mean))


def reading_first():
    return Centred(moves_first=False)


def root_mean_square(outputs, targets):
    return F.mse_loss(outputs, targets).sqrt()


PROGRAMS = [
    Program(name="heat equation", model=Heat, data=measured, step=residual_step,
            refused={"zero 3": "needs them once more", "tensor": "derivatives of derivatives"}),
    Program(name="jacobians of each sample", model=Heat, data=measured, step=jacobian_step,
            refused={"zero 3": TRANSFORM, "tensor": TRANSFORM}),
    Program(name="rates by the place of a layer", model=layers, data=classified, criterion=CE, optimizer=by_place,
            optimizer_args={}, refused={"pipeline": "the function that makes SGD goes by the place"}),
    Program(name="a parameter of the first forward", model=Late, data=classified, criterion=CE,
            refused={"*": "'scale' was added during the run", "pipeline": "changes self.scale"}),
    Program(name="a mean that is moved and read", model=Centred, data=classified, criterion=CE,
            told={"*": "let the forward read them first"}, refused=STAGED),
    Program(name="a mean that is read and moved", model=reading_first, data=classified, criterion=CE, refused=STAGED),
    Program(name="root of a mean", model=layers, data=lambda: batches(draw(26, 5), draw(26, 3, seed=2)),
            criterion=root_mean_square, told={"*": "the root of a mean"}),
]  # fmt: skip
