"""Programs that keep something from step to step: queues and their positions, state in Python."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F

from guava_nb import gather_batch
from tests.parity.programs.program import COUPLED, NOISY, READ, Program, batches, draw, labels


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6))


class MoCo(nn.Module):
    """A queue of keys with a position that goes round, as in the published code, decorators included."""

    def __init__(self, size=16):
        super().__init__()
        self.query = mlp()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(draw(6, size, seed=5), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def move(self):
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    @torch.no_grad()
    def enqueue(self, keys):
        size, start = self.queue.shape[1], int(self.queue_ptr)
        places = (start + torch.arange(len(keys))) % size
        self.queue[:, places] = keys.T
        self.queue_ptr[0] = (start + len(keys)) % size

    def forward(self, pair):
        q = F.normalize(self.query(pair[0]), dim=1)
        with torch.no_grad():
            self.move()
            k = F.normalize(self.key(pair[1]), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone()], 1) / 0.2
        self.enqueue(k)
        return scores


class GatheringMoCo(MoCo):
    @torch.no_grad()
    def enqueue(self, keys):
        super().enqueue(gather_batch(keys))


def moco_step(model, batch):
    scores = model(batch)
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


class Position(nn.Module):
    """Nothing but a position that counts samples and goes round."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.position[0] = (self.position[0] + len(x)) % 24
        return self.net(x)


class Constrained(nn.Linear):
    """EEGNet's layer: its weight is normalised in each forward."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


def constrained():
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), Constrained(8, 3))


def clipped_step(model, batch):
    """The weight clipping of WGAN."""
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)
    return (model(batch[0]).mean(1) * batch[1].sign().mean(1)).mean()


class Renormalised(nn.Module):
    """An embedding that writes into the rows that are looked up."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Embedding(30, 6, max_norm=0.5), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.rows(ids).mean(1))


def hardest(outputs, targets):
    """The mean of a fixed number of losses: it couples nothing in eight samples."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.topk(min(12, len(losses)))[0].mean()


def large_only(model, batch):
    """A term that only large batches have."""
    z = model(batch[0])
    loss = F.cross_entropy(z, batch[1])
    return loss + (z @ z.T).square().mean() if len(z) >= 14 else loss


def neighbours_step(model, batch):
    """Anchor, positive, anchor, positive: neighbours belong together."""
    z = F.normalize(model(batch[0]), dim=1)
    return (1 - (z[0::2] * z[1::2]).sum(1)).mean()


class Periodic(nn.Module):
    """A term over the batch, in each tenth step."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        z = self.net(x)
        if self.training:
            self.steps += 1
        return z + z.mean(0).square() if int(self.steps) % 10 == 0 else z


class Replacing(nn.Module):
    """Buffers that a forward replaces instead of writing into them: a counter, a running mean."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            self.steps = self.steps + 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.net(x) / (1 + self.steps)


class Infinities(nn.Module):
    """A constant mask of infinities, and the least and greatest value seen, which begin at infinity."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
        self.register_buffer("least", torch.tensor(float("inf")))
        self.register_buffer("greatest", torch.tensor(float("-inf")))

    def forward(self, x):
        z = self.net(x)
        if self.training:
            least, greatest = torch.aminmax(z.detach())
            self.least = torch.minimum(self.least, least)
            self.greatest.copy_(torch.maximum(self.greatest, greatest))
        return torch.softmax(z[:, :, None] + self.mask, -1).sum(1)


class Sentinel(nn.Module):
    """The least norm of the weights so far, which begins at a very large number."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("best", torch.tensor(1e12))

    def forward(self, x):
        outputs = self.net(x) * (1 + 0.1 * self.best.clamp(max=5))
        if self.training:
            self.best = torch.minimum(self.best, self.net[0].weight.detach().norm())
        return outputs


class Congruential(nn.Module):
    """Noise of an own generator of 64 bits, kept in a buffer."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("state", torch.tensor([12345]))

    def forward(self, x):
        if self.training:
            self.state = self.state * 6364136223846793005 + 1442695040888963407
        return self.net(x) * (1 + (self.state % 1000) / 1000)


class MaskedNorm(nn.Module):
    """A batch norm over the rows that count, of which a worker's part may have none."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x):
        counts, z = x[:, 0] > 0, x.clone()
        z[counts] = self.norm(x[counts])
        return self.head(z)


def objects_only(model, batch):
    """The mean over the samples that hold an object, as of a detector; a part of the batch may have none."""
    has = batch[0][:, 0] > 0
    if not has.any():
        return torch.zeros(()), 0
    return F.cross_entropy(model(batch[0][has]), batch[1][has], reduction="sum"), int(has.sum())


def objects_only_advised(model, batch):
    """The same as ZeRO asks for it: a part without an object goes backward too."""
    has, outputs = batch[0][:, 0] > 0, model(batch[0])
    if not has.any():
        return (outputs * 0).sum(), 0
    return F.cross_entropy(outputs[has], batch[1][has], reduction="sum"), int(has.sum())


class DrawnScale(nn.Module):
    """Draws a plain attribute as it is built."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(), float(torch.rand(()))

    def forward(self, x):
        return self.net(x) * self.scale


def masked_rows():
    x = draw(16, 5)
    x[:, 0] = -x[:, 0].abs()
    x[:2, 0] = x[8:11, 0] = 1  # in the first half of each batch
    return batches(x, labels(3, 16))


class Switching(nn.Module):
    """Freezes a layer in one forward and frees it in a later one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.steps += 1
            if self.steps == 2:
                self.layer.weight.requires_grad_(False)
            if self.steps == 5:
                self.layer.weight.requires_grad_(True)
        return x + F.relu(self.layer(x))


def switching():
    return nn.Sequential(nn.Linear(5, 6), Switching(), nn.ReLU(), Switching(), nn.Linear(6, 3))


def switched_step(model, batch):
    """Frozen before the forward in every other step, as the critic of a GAN is."""
    model[1].steps += 1
    model[0].requires_grad_(bool(model[1].steps % 2))
    return F.cross_entropy(model(batch[0]), batch[1])


class StepCounting(nn.Sequential):
    """An MLP with a count of its steps."""

    def __init__(self):
        super().__init__(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))


class ExtraState(nn.Module):
    """A count of steps that only `get_extra_state` carries."""

    def __init__(self):
        super().__init__()
        self.net, self.steps = mlp(), 0

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]

    def forward(self, x):
        self.steps += self.training
        return self.net(x) / (1 + self.steps)


class HiddenTeacher(nn.Module):
    """A mean teacher in a list, so that no state dict has it, copied in the first forward."""

    def __init__(self):
        super().__init__()
        self.net, self.teacher = mlp(), []

    def forward(self, x):
        if not self.training:
            return self.net(x)
        if not self.teacher:
            self.teacher.append(copy.deepcopy(self.net).requires_grad_(False))
        with torch.no_grad():
            for kept, new in zip(self.teacher[0].parameters(), self.net.parameters(), strict=True):
                kept.mul_(0.9).add_(new, alpha=0.1)
        outputs = self.net(x)
        return outputs + 0.5 * (outputs - self.teacher[0](x))


class Curriculum(nn.Module):
    """A counter in Python that matters from a later step on."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = mlp(), 0

    def forward(self, x):
        self.seen += self.training
        outputs = self.net(x)
        return outputs if self.seen < 6 else torch.tanh(outputs)


class Observed(nn.Module):
    """Quantisation-aware training: an observer whose least and greatest value begin at infinity."""

    def __init__(self):
        super().__init__()
        self.net, self.head = mlp(), nn.Linear(6, 3)
        self.quantised = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x):
        return self.head(self.quantised(self.net(x).float()).to(x))


def frozen_after_step(model, batch):
    """Switched between forward and backward, and only in steps that have one sample."""
    model.steps += 1
    loss = F.cross_entropy(model(batch[0]), batch[1])
    model[0].requires_grad_(bool(model.steps % 4))
    return loss


class FrozenByHook(StepCounting):
    """Switched while backward runs."""

    def forward(self, x):
        if self.training:
            self.steps += 1
        outputs = super().forward(x)
        if outputs.requires_grad and self.training:
            outputs.register_hook(self.switch)
        return outputs

    def switch(self, _):
        self[0].requires_grad_(bool(self.steps % 4))


def frozen_by_samples_step(model, batch):
    model[0].requires_grad_(bool(batch[0].mean() > 0))
    return F.cross_entropy(model(batch[0]), batch[1])


def mixed_step(model, batch):
    """Mixup's weight, from a distribution."""
    weight = torch.distributions.Beta(0.4, 0.4).sample()
    outputs = model(batch[0])
    return weight * F.cross_entropy(outputs, batch[1]) + (1 - weight) * outputs.square().mean()


def forced_step(model, batch):
    """Teacher forcing: a coin of Python's decides for the whole batch."""
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) if random.random() < 0.5 else outputs.square().mean()


class OwnNoise(nn.Module):
    """Noise of a stream of the model's own."""

    def __init__(self):
        super().__init__()
        self.net, self.rng = mlp(), np.random.default_rng(0)

    def forward(self, x):
        return self.net(x + torch.from_numpy(0.1 * self.rng.standard_normal(x.shape)))


class OwnGenerator(OwnNoise):
    """The same, of torch's."""

    def __init__(self):
        super().__init__()
        self.rng = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.net(x + 0.1 * torch.randn(x.shape, generator=self.rng, dtype=x.dtype))


def classified(rows=30, size=8):
    return batches(draw(rows, 5), labels(3, rows), size=size)


def views():
    return batches(draw(30, 5), draw(30, 5, seed=2))


def square_step(model, batch):
    return model(batch[0]).square().mean()


MOVED = {"zero 3": "writes into"}
WRITES = dict.fromkeys(("site", "zero 3"), "the forward itself changes parameter")
PARTED = {f"{mode}/3": "a piece cannot be computed" for mode in ("data", "relay", "site", "zero 1", "zero 3")}
LOST = "buffer 'best' goes from values of 1e+12 to values of"
IDLE = {"*": "those without a sample make no forward"}
PROGRAMS = [
    Program(name="moco", model=MoCo, data=views, step=moco_step, told={"*": "queue"}, refused=MOVED),
    Program(name="moco, gathered", model=GatheringMoCo, data=views, step=moco_step, refused={**MOVED, "site": "gather_batch"},
            options={"buffers": "queue_ptr=first"}),
    Program(name="moco on one worker", model=MoCo, data=views, step=moco_step, options={"shares": [1, 0]},
            modes=("data", "relay", "site"), refused={f"{mode}/3": "2 numbers for 3" for mode in ("data", "relay", "site")}),
    Program(name="position that goes round", model=Position, data=views, step=square_step, told={"*": "position"}),
    Program(name="weight constraint", model=constrained, data=classified, criterion="CrossEntropyLoss", refused=WRITES),
    Program(name="weight constraint, a last batch of one", model=constrained, data=lambda: classified(25),
            criterion="CrossEntropyLoss", epochs=3, refused=WRITES, told=IDLE),
    Program(name="weight clipping", model=mlp, data=views, step=clipped_step, optimizer="RMSprop",
            refused={**WRITES, "tensor": "is read outside its layer"},
            optimizer_args={"lr": 0.05}),
    Program(name="embedding with a largest norm", model=Renormalised, criterion="CrossEntropyLoss",
            data=lambda: batches(labels(30, 32, 5), labels(3, 32)),
            refused={"*": "by the samples that it sees", **WRITES, "pipeline": "runs it for each micro-batch"}),
    Program(name="hardest of a batch", model=mlp, data=lambda: classified(64, 32), criterion=hardest, told={"*": COUPLED}),
    Program(name="term of large batches", model=mlp, data=lambda: classified(64, 32), step=large_only, told={"*": COUPLED}),
    Program(name="pairs of neighbours, odd shares", model=mlp, data=lambda: batches(draw(30, 5), labels(3, 30), size=6),
            step=neighbours_step, told={"*": COUPLED}),
    Program(name="pairs of neighbours, odd shares at last", model=mlp, data=lambda: batches(draw(38, 5), labels(3, 38), size=16),
            step=neighbours_step, told={"*": COUPLED}, refused=PARTED),
    Program(name="term of each tenth step", model=Periodic, data=lambda: batches(draw(40, 5), labels(3, 40)), epochs=2,
            criterion="CrossEntropyLoss", told={"*": COUPLED}),
    Program(name="buffers that are replaced", model=Replacing, data=classified, criterion="CrossEntropyLoss"),
    Program(name="infinities in buffers", model=Infinities, data=classified, criterion="CrossEntropyLoss",
            told={"*": "least"}),
    Program(name="infinities in buffers, zero 2", model=Infinities, data=classified, criterion="CrossEntropyLoss",
            settings={"zero_stage": 2}, modes=("zero 1",), told={"*": "least"}),
    Program(name="a buffer that leaves a very large number", model=Sentinel, data=classified, criterion="CrossEntropyLoss",
            refused={**READ, "zero 3": LOST, "*": LOST}),
    Program(name="a buffer that leaves a very large number, one worker a batch", model=Sentinel, data=classified,
            criterion="CrossEntropyLoss", options={"shares": [1, 0]}, modes=("data",),
            refused={"data/3": "shares (--shares) has 2 numbers", "*": LOST}),
    Program(name="whole numbers that change by more than a float64 has digits", model=Congruential, data=classified,
            criterion="CrossEntropyLoss", modes=("data", "site"), refused={"*": "'state' of whole numbers changes by"}),
    Program(name="parts without an object", model=mlp, data=masked_rows, step=objects_only, modes=("data", "relay", "site")),
    Program(name="parts without an object, zero 1", model=mlp, data=masked_rows, step=objects_only, modes=("zero 1",),
            refused={"*": "nothing that counts"}),
    Program(name="parts without an object, as advised", model=mlp, data=masked_rows, step=objects_only_advised,
            modes=("data", "zero 1", "zero 3", "tensor")),
    Program(name="an instance drawn under the run's seed", model=DrawnScale, data=classified, criterion="CrossEntropyLoss",
            instance=True, modes=("data", "site", "zero 1", "zero 3")),
    Program(name="an instance drawn under another seed", model=DrawnScale, data=classified, criterion="CrossEntropyLoss",
            instance=True, options={"seed": 5}, modes=("data", "zero 1"), refused={"*": "torch.manual_seed(N) just before"}),
    Program(name="synced norm of rows that a part has none of", model=MaskedNorm, data=masked_rows, epochs=1,
            criterion="CrossEntropyLoss", settings={"sync_batchnorm": True}, modes=("data", "zero 1", "zero 3")),
    Program(name="teacher in a list, a last batch of one", model=HiddenTeacher, data=lambda: classified(25), epochs=3,
            criterion="CrossEntropyLoss", told=IDLE, modes=("data", "relay", "site", "zero 1", "zero 3"),
            refused=MOVED),
    Program(name="counter of a curriculum, a last batch of one", model=Curriculum, data=lambda: classified(25), epochs=3,
            criterion="CrossEntropyLoss", told=IDLE, modes=("data", "relay", "site", "zero 1", "zero 3")),
    Program(name="counter of a curriculum, a share without samples", model=Curriculum, data=lambda: classified(27), epochs=3,
            criterion="CrossEntropyLoss", options={"shares": [10, 1]}, told=IDLE, modes=("data", "zero 1"),
            refused={f"{mode}/3": "2 numbers for 3" for mode in ("data", "zero 1")}),
    Program(name="observer of quantisation", model=Observed, data=classified, criterion="CrossEntropyLoss",
            told={"*": "min_val"}, modes=("data", "relay", "site", "zero 1", "zero 3")),
    Program(name="frozen for some steps by the forward", model=switching, data=classified, criterion="CrossEntropyLoss",
            optimizer_args={"lr": 0.1, "momentum": 0.9}, told={"pipeline": "The forward changes the buffers"}),
    Program(name="frozen for some steps by the forward, zero 2", model=switching, data=lambda: classified(25), epochs=3,
            criterion="CrossEntropyLoss", settings={"zero_stage": 2}, modes=("zero 1",)),
    Program(name="frozen in every other step", model=switching, data=classified, step=switched_step),
    Program(name="frozen after the forward of a step with one sample", model=StepCounting, data=lambda: classified(25),
            step=frozen_after_step, epochs=3, optimizer_args={"lr": 0.1, "momentum": 0.9}),
    Program(name="frozen by a hook in a step with one sample", model=FrozenByHook, data=lambda: classified(25), epochs=3,
            criterion="CrossEntropyLoss", optimizer_args={"lr": 0.1, "momentum": 0.9}, modes=("data", "site", "zero 1", "zero 3"),
            refused={"zero 3": "a hook switches requires_grad"}),
    Program(name="frozen by the samples, unchecked", model=StepCounting, data=classified, step=frozen_by_samples_step,
            options={"check": "off"}, refused={"*": "without gradients on w"}, modes=("data", "site", "zero 1", "zero 3")),
    Program(name="extra state", model=ExtraState, data=lambda: classified(24), criterion="CrossEntropyLoss",
            refused={"site": "use optimizer_site='workers'", "pipeline": "stages of a pipeline have tensors only"}),
    Program(name="a weight drawn from a Beta distribution", model=mlp, data=classified, step=mixed_step, told={"*": NOISY},
            modes=("data", "site", "zero 1", "zero 3")),
    Program(name="teacher forcing", model=mlp, data=classified, step=forced_step, told={"*": NOISY}),
    Program(name="noise of numpy's own stream", model=OwnNoise, data=classified, criterion="CrossEntropyLoss",
            told={"*": "not drawn by torch's own functions (model.rng)"}),
    Program(name="noise of numpy's own stream, tensor", model=OwnNoise, data=classified, criterion="CrossEntropyLoss",
            modes=("tensor",)),
    Program(name="noise of torch's own stream, tensor", model=OwnGenerator, data=classified, criterion="CrossEntropyLoss",
            modes=("tensor",)),
    Program(name="noise of torch's own stream", model=OwnGenerator, data=classified, criterion="CrossEntropyLoss",
            told={"*": NOISY}),
]  # fmt: skip
