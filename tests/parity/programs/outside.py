"""Programs whose layers and losses read what others keep outside their outputs: attributes, hooks, globals, shared objects."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.programs.program import COUPLED, READ, Program, batches, draw, labels

#: Where a sentence must stand when a part of a model misses what another part keeps.
APART = "one part, or the loss, takes what another one keeps outside its outputs"
#: Where one must stand when stages share what one of them changes.
SHARED = "which layers of several stages share"


class Penalised(nn.Module):
    """An activity penalty: the step reads what the forward, a layer inside or a hook has kept of hidden activations."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.one, self.act, self.two = nn.Linear(6, 8), Tapped(way == "layer"), nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)
        self.kept = []
        if way == "hook":
            self.act.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def forward(self, x):
        self.kept.clear()
        h = self.act(self.one(x))
        if self.way == "attribute":
            self.kept.append(h)
        return self.out(torch.tanh(self.two(h)))

    def penalty(self):
        return self.act.seen if self.way == "layer" else sum(h.pow(2).mean() for h in self.kept)


class Tapped(nn.Tanh):
    def __init__(self, taps):
        super().__init__()
        self.taps = taps

    def forward(self, x):
        h = super().forward(x)
        if self.taps:
            self.seen = h.pow(2).mean()
        return h


def by_attribute():
    return Penalised("attribute")


def by_layer():
    return Penalised("layer")


def by_hook():
    return Penalised("hook")


def penalised_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]) + 0.5 * model.penalty()


class ByWidth(nn.Module):
    """Divides by the width that its layer tells, as attention does by that of its heads."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.one(x)) / self.one.out_features**0.5
        h = h - h.mean(-1, keepdim=True)
        return self.out(torch.tanh(self.two(h)) * self.two.in_features)


SKIPPED = []


class Leaves(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        SKIPPED[:] = [y]
        return y


class Takes(nn.Linear):
    def forward(self, x):
        return super().forward(x + (SKIPPED[0] if SKIPPED else 0))


def skip_through_a_global():
    return nn.Sequential(Leaves(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Takes(8, 3))


class Ticking(nn.Linear):
    """Counts calls in an object that it shares with another layer, which warms up by it."""

    def __init__(self, width, wide, clock):
        super().__init__(width, wide)
        self.clock = clock

    def forward(self, x):
        if self.training:
            self.clock["ticks"] += 1
        return super().forward(x) * min(1.0, 0.2 + 0.05 * self.clock["ticks"])


def shared_clock():
    clock = {"ticks": 0}
    return nn.Sequential(Ticking(6, 8, clock), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Ticking(8, 3, clock))


BUILT = []


def regularised():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    BUILT[:] = [model]
    return model


def decayed(outputs, targets):
    return F.cross_entropy(outputs, targets) + 0.05 * sum(p.pow(2).sum() for p in BUILT[-1].parameters())


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow the fast ones every third step, as in the published code."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                if self.steps % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))


def lookahead(named, lr):
    return Lookahead([p for _, p in named], lr)


class Unit(torch.autograd.Function):
    """Passes a gradient of length one on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.norm() + 1e-8)


class UnitGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(Unit.apply(torch.tanh(self.one(x))))


def of_one_class(model, batch):
    """The mean over one class, of which a batch may have none."""
    losses, counts = F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[1] == 1
    return (losses * counts).sum(), counts.sum().clamp(min=1)


class Rare(nn.Module):
    """A table whose rare rows learn as fast as common ones."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(6, 8, scale_grad_by_freq=True), nn.Linear(8, 3)

    def forward(self, words):
        return self.out(torch.tanh(self.table(words).mean(1)))


def words():
    return batches(labels(6, 40, 4), labels(3, 40, seed=2))


def data():
    return batches(draw(40, 6), labels(3, 40))


_STEP = {"data": data, "step": penalised_step}
_LOSS = {"data": data, "criterion": "CrossEntropyLoss"}


class ReadByHook(nn.Module):
    """A hook on the last layer takes what one on the first layer has kept."""

    def __init__(self):
        super().__init__()
        kept = {}
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 3))
        self.layers[0].register_forward_hook(lambda module, args, output: kept.update(first=output))
        self.layers[5].register_forward_hook(lambda module, args, output: output + kept["first"][:, :3])

    def forward(self, x):
        return self.layers(x)


PROGRAMS = [
    Program(
        name="hook that reads what another keeps",
        model=ReadByHook,
        refused={"pipeline": "KeyError: 'first' in a layer, a hook or the loss of stage"},
        **_LOSS,
    ),
    Program(name="activity penalty, kept in an attribute", model=by_attribute, **_STEP),
    Program(name="activity penalty, kept by a layer inside", model=by_layer, **_STEP),
    Program(name="activity penalty, kept by a hook", model=by_hook, **_STEP),
    Program(name="divided by the width of a layer", model=ByWidth, **_LOSS),
    Program(name="skip through a global", model=skip_through_a_global, told={"pipeline": APART}, **_LOSS),
    Program(
        name="skip through a global, strict",
        model=skip_through_a_global,
        options={"check": "strict"},
        modes=("pipeline",),
        refused={"pipeline": "That step is kept"},
        **_LOSS,
    ),
    Program(name="clock shared by two layers", model=shared_clock, refused={"pipeline": SHARED}, **_LOSS),
    Program(
        name="loss that decays all weights",
        model=regularised,
        data=data,
        criterion=decayed,
        refused=READ,
        told={"pipeline": APART},
    ),
    Program(
        name="mean over one class, its count clamped",
        model=regularised,
        data=data,
        step=of_one_class,
        told={"*": "do not add up to that of the whole batch"},
    ),
    Program(
        name="rows by frequency",
        model=Rare,
        data=words,
        criterion="CrossEntropyLoss",
        told={"*": "leave scale_grad_by_freq out"},
    ),
    Program(name="lookahead", model=regularised, optimizer=lookahead, **_LOSS),
    Program(name="gradient of length one", model=UnitGradient, told={"*": COUPLED}, **_LOSS),
]
