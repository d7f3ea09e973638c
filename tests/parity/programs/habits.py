"""What functions of plain loops return and call, modules with the names of torch's own attributes, parts of torch.jit."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from tests.parity.programs.program import POSITIONS, Program, batches, draw, labels
from tests.parity.programs.recipes import Mlp, classified


class Named(nn.Module):
    """Its modules have the names of what torch.fx keeps in a module of its own."""

    def __init__(self):
        super().__init__()
        self.code, self.meta, self.recompile = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.graph = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        x = self.code(x)
        for block in self.graph:
            x = x + block(x).tanh()
        return self.recompile(self.meta(x))


class Centring(nn.Module):
    """Writes into the batch that it is given, as a loop whose loader makes new tensors may."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        x.sub_(x.mean(1, keepdim=True) / 2).mul_(1.5)  # done twice it would give other numbers
        return self.body(x)


class Uneven(nn.Module):
    """Complex numbers, in lengths that neither two workers nor three share evenly."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7, dtype=torch.cdouble))
        self.bias = nn.Parameter(torch.zeros(7, dtype=torch.cdouble))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight + self.bias).abs()


class Codebook(nn.Module):
    """A quantiser whose forward reads the codes beside calling them."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.code = nn.Linear(5, 4), nn.Linear(4, 3), nn.Embedding(6, 4)

    def forward(self, x):
        z = self.encoder(x)
        found = self.code(torch.cdist(z, self.code.weight).argmin(1))
        return self.decoder(z + (found - z).detach()), z, found


def quantised(outputs, targets):
    scores, z, found = outputs
    return F.cross_entropy(scores, targets) + F.mse_loss(found, z.detach()) + 0.25 * F.mse_loss(z, found.detach())


class Traced(nn.Module):
    """Blocks that torch.jit made, in double precision as the run is."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(2)]
        self.blocks = nn.ModuleList(torch.jit.trace(block, torch.zeros(1, 8, dtype=torch.float64)) for block in blocks)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.mean = AveragedModel(self.net).requires_grad_(False)

    def forward(self, x):
        return self.net(x)


def averaged_step(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    model.mean.update_parameters(model.net)
    return loss


def mean_and_count(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), len(batch[1])


def loss_and_accuracy(model, batch):
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]), 0.3 + 0.4 * (outputs.argmax(1) == batch[1]).double().mean()


def total_and_part(outputs, targets):
    loss = F.cross_entropy(outputs, targets)
    return loss + 0.1 * outputs.pow(2).mean(), loss


def kept_backward(model, batch):
    outputs = model(batch[0])
    outputs.pow(2).mean().backward(retain_graph=True)
    return F.cross_entropy(outputs, batch[1])


def popping_step(model, batch):
    targets = batch.pop("labels")
    batch["x"].mul_(2).clamp_(-1, 1)
    return F.cross_entropy(model(batch["x"]), targets)


def pseudo_labelled(model, batch):
    (x, y), unlabelled = batch
    with torch.no_grad():
        guessed = model(unlabelled).argmax(1)
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(unlabelled), guessed)


class Beside(torch.optim.SGD):
    """Counts in its state under a name that is no parameter."""

    def step(self, closure=None):
        self.state["all"] = {"n": self.state.get("all", {"n": 0})["n"] + 1}
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["all"]["n"]
        return super().step(closure)


def beside(named):
    return Beside([parameter for _, parameter in named], lr=0.1)


CE = "CrossEntropyLoss"
ONE = {"model": Mlp, "data": classified}
NO_PARAMETER = dict.fromkeys(("zero 1", "zero 3", "tensor", "pipeline"), "keeps state that belongs to no parameter")

PROGRAMS = [
    Program(name="modules called code, graph and meta", model=Named, data=classified, criterion=CE),
    Program(name="a forward that writes into its inputs", model=Centring, data=classified, criterion=CE),
    Program(name="complex numbers in uneven parts", model=Uneven, data=classified, criterion=CE,
            optimizer="Adam", optimizer_args={"lr": 0.01},
            modes=("data", "site", "zero 1", "zero 3"), refused={"zero 3": "takes complex numbers for pairs of real ones"}),
    Program(name="codes that are read and called", model=Codebook, data=classified, criterion=quantised,
            refused={"tensor": "is read outside its layer"}),
    Program(name="blocks of torch.jit", model=Traced, data=classified, criterion=CE),
    Program(name="averaged model inside", model=Averaged, data=classified, step=averaged_step,
            refused={"zero 3": "the forward writes into"}),
    Program(name="a mean with a count", **ONE, step=mean_and_count, refused={"*": "the first one is a mean already"}),
    Program(name="a loss with an accuracy", **ONE, step=loss_and_accuracy, refused={"*": "is no number of samples"}),
    Program(name="a loss with another", **ONE, criterion=total_and_part, refused={"*": "the second one has a gradient"}),
    Program(name="backward of another loss", **ONE, step=kept_backward, told={"*": "calls backward() by itself"},
            modes=("data", "site", "zero 1")),
    Program(name="a step that empties its batch", model=Mlp, step=popping_step, options={"cache": "memory"},
            data=lambda: batches([{"x": x, "labels": y} for x, y in zip(draw(22, 5), labels(3, 22), strict=True)])),
    Program(name="labelled and unlabelled, zipped", model=Mlp, step=pseudo_labelled, refused={"*": POSITIONS},
            data=lambda: [((draw(4, 5, seed=n), labels(3, 4, seed=n)), draw(12, 5, seed=n + 50)) for n in range(4)]),
    Program(name="state of no parameter", **ONE, criterion=CE, optimizer=beside, optimizer_args={},
            refused=NO_PARAMETER),
]  # fmt: skip
