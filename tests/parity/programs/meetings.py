"""Where pieces meet: accumulation, clipping, schedules, ragged last batches, counts, ignored targets, groups of parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from tests.parity.programs.program import (
    ACCUMULATED,
    COUPLED,
    POSITIONS,
    READ,
    STATISTICS,
    Program,
    batches,
    draw,
    labels,
)
from tests.parity.programs.recipes import Mlp

CE = "CrossEntropyLoss"
V, T = 7, 5


def rows(n=22, size=4):
    return lambda: batches(draw(n, 5), labels(3, n), size=size)


def short_first():
    """Batches of 1 and 4 samples by turns."""
    x, y = draw(20, 5), labels(3, 20)
    return [(x[i : i + n], y[i : i + n]) for i, n in ((0, 1), (1, 4), (5, 1), (6, 4), (10, 1), (11, 4))]


def ignored_rows():
    y = labels(3, 22)
    y[::3] = -100
    return batches(draw(22, 5), y, size=4)


def mostly_ignored():
    """Some shards have no target at all."""
    y = torch.full((24,), -100)
    y[::5] = labels(3, 5)
    return DataLoader(TensorDataset(draw(24, 5), y), 6)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(V, 8), nn.Linear(8, 8), nn.Linear(8, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        return self.head(h + torch.tanh(self.mix(h.cumsum(1) / 3)))


def words(n=22, size=4):
    def made():
        x, y = labels(V, n, T), labels(V, n, T, seed=2)
        lengths = labels(T - 1, n, seed=3) + 1
        y[torch.arange(T) >= lengths[:, None]] = -100
        return batches(x, y, size=size)

    return made


def word_sum(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y, reduction="sum"), (y != -100).sum()


def word_mean(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).transpose(1, 2), y)


def smoothed_sum(outputs, y):
    flat, y = outputs.flatten(0, 1), y.flatten()
    return F.cross_entropy(flat, y, label_smoothing=0.1, reduction="sum"), (y != -100).sum()


def own_weights(outputs, batch_targets):
    """A mean over the samples' own weights: its count is no number of samples."""
    y, w = batch_targets
    return (F.cross_entropy(outputs, y, reduction="none") * w).sum() / w.sum()


def own_weights_counted(outputs, batch_targets):
    y, w = batch_targets
    return (F.cross_entropy(outputs, y, reduction="none") * w).sum(), w.sum()


def weighted_rows():
    return batches([(x, (y, w)) for x, y, w in zip(draw(22, 5), labels(3, 22), draw(22, seed=4).abs() + 0.1,
                                                    strict=True)], size=4)  # fmt: skip


def positives(outputs, y):
    """As detectors do: the sum over all, by the number of positives."""
    target = F.one_hot(y, 3).to(outputs.dtype)
    return F.binary_cross_entropy_with_logits(outputs, target, reduction="sum") / (y > 0).sum().clamp(min=1)


def pair_mean(outputs, y):
    """All pairs of a batch with unlike labels."""
    margin = F.relu(1 + outputs[:, 0, None] - outputs[None, :, 0])
    valid = y[:, None] > y[None, :]
    return margin[valid].mean() if valid.any() else outputs.sum() * 0


def kl(outputs, y):
    return F.kl_div(outputs.log_softmax(1), F.one_hot(y, 3).to(outputs.dtype) * 0.7 + 0.1, reduction="batchmean")


def nan_mean(outputs, y):
    """Missing values in the targets do not count."""
    return (outputs[~y.isnan()] - y[~y.isnan()]).pow(2).mean()


def nan_sum(outputs, y):
    there = ~y.isnan()
    return (outputs[there] - y[there]).pow(2).sum(), there.sum()


def with_gaps():
    y = draw(22, 3, seed=6)
    y[labels(3, 22, seed=7) == 0, 1] = float("nan")
    return batches(draw(22, 5), y, size=4)


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)


class Average(Mlp):
    """Keeps a moving average of its weights in buffers, moved in each training forward."""

    def __init__(self):
        super().__init__()
        for k, p in enumerate(self.net.parameters()):
            self.register_buffer(f"ema{k}", p.detach().clone())

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                for k, p in enumerate(self.net.parameters()):
                    getattr(self, f"ema{k}").lerp_(p, 0.1)
        return self.net(x)


class Counting(Mlp):
    """Counts in buffers: columns, which its outputs go by, positives, classes, and sums of the inputs."""

    def __init__(self):
        super().__init__()
        for name, shape in (("columns", ()), ("positives", ()), ("classes", (3,))):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.long))
        self.register_buffer("sums", torch.zeros(5))

    def forward(self, x):
        out = self.net(x)
        if self.training:
            self.columns += x.shape[1] - 1
            self.positives += (x[:, 0] > 0).sum()
            self.classes += torch.bincount(out.argmax(1), minlength=3)
            self.sums += x.detach().sum(0)
        return out / (1 + 0.01 * self.columns)


class Annealed(Mlp):
    """Counts steps in a buffer; its loss changes with them, and layers thaw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.step += 1
        return self.net(x)


def annealed(model, batch):
    outputs = model(batch[0])
    return F.cross_entropy(outputs, batch[1]) + min(1.0, int(model.step) / 6) * 0.1 * outputs.pow(2).mean()


def compared_later(model, batch):
    outputs = model(batch[0])
    loss = F.cross_entropy(outputs, batch[1])
    return loss + (outputs.mean(0).pow(2).sum() if int(model.step) > 3 else 0.0)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x).relu()
        return self.a(h), self.b(h)


def chosen_head(outputs, y):
    """The second head is trained by batches that have a label 2 only."""
    a, b = outputs
    rest = y == 2
    loss = F.cross_entropy(a, y, reduction="sum")
    return (loss + F.cross_entropy(b[rest], y[rest], reduction="sum") if rest.any() else loss), len(y)


class Frequent(nn.Module):
    """Divides a row's gradient by how often the batch has it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 8, scale_grad_by_freq=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


class Whitened(Mlp):
    """Statistics of the batch without a batch norm."""

    def forward(self, x):
        return super().forward((x - x.mean(0)) / (x.std(0) + 1e-3))


class Ranked(Mlp):
    def forward(self, x):
        return super().forward(x * F.batch_norm(x, None, None, training=True))


class Sliced(nn.Module):
    """Layers used unequally often, a parameter used in two places, one used in none."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale, self.unused = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.first(x) * self.scale
        for _ in range(3):
            x = x + torch.tanh(self.again(x))
        return self.last(x * self.scale)


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.layer(self.first(x)).mean(1))


def penalised(model, batch):
    x, y = batch
    x = x.detach().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return F.cross_entropy(outputs, y) + 0.1 * slope.pow(2).sum(1).mean()


def decayed_by_hand(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


def grouped(named, lr=0.05):
    flat = [p for name, p in named if name.endswith("bias")]
    rest = [p for name, p in named if not name.endswith("bias")]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 2 * lr}], lr=lr
    )


class ClipsItself(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm().clamp(min=0.05) * 20)
        return super().step(closure)


def clips_itself(named):
    return ClipsItself([p for _, p in named], lr=0.1, momentum=0.9)


class Sign(torch.optim.Optimizer):
    """Lion, as written by hand."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(torch.sign(m * group["beta"] + p.grad * (1 - group["beta"])), alpha=-group["lr"])
                m.lerp_(p.grad, 0.01)


def sign(named):
    return Sign([p for _, p in named])


def warm_cosine(optimizer):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 8)], [3])


def by_group(optimizer):
    return LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)][: len(optimizer.param_groups)])


def drawn_by_weight():
    data = TensorDataset(draw(21, 5), labels(3, 21))
    weights = torch.linspace(0.1, 2, 21)
    return DataLoader(data, 4, sampler=WeightedRandomSampler(weights, 22, generator=torch.Generator().manual_seed(4)))


def ragged_lists():
    """Samples of unlike lengths as lists."""

    def collate(samples):
        return [x for x, _ in samples], torch.stack([y for _, y in samples])

    data = [(draw(2 + n % 3, 5, seed=n), labels(3, seed=n)) for n in range(14)]
    return batches(data, size=4, collate_fn=collate)


def of_lists(model, batch):
    xs, y = batch
    return F.cross_entropy(torch.stack([model(x).mean(0) for x in xs]), y)


def bags():
    """Texts joined, with the place where each begins."""

    def collate(samples):
        texts = [x for x, _ in samples]
        offsets = torch.tensor([0, *map(len, texts[:-1])]).cumsum(0)
        return torch.cat(texts), offsets, torch.stack([y for _, y in samples])

    data = [(labels(V, 2 + n % 4, seed=n), labels(3, seed=n)) for n in range(14)]
    return batches(data, size=4, collate_fn=collate)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(V, 8), nn.Linear(8, 3)

    def forward(self, texts, offsets):
        return self.head(self.bag(texts, offsets))


def bag_step(model, batch):
    texts, offsets, y = batch
    return F.cross_entropy(model(texts, offsets), y)


CLIP = {"options": {"max_grad_norm": 0.3}}
TWO, THREE = ({"options": {"accumulation_steps": count}} for count in (2, 3))
TWO_CLIPPED, THREE_CLIPPED = ({"options": {"accumulation_steps": count, "max_grad_norm": 0.3}} for count in (2, 3))
COUNTED_IN_STAGES = {"pipeline": "to cut the model into stages"}
AVERAGED = {"tensor": "is read outside its layer", "pipeline": "switches gradients or autocast"}
SYNCED = {"relay": "sync_batchnorm", "site": "sync_batchnorm", "pipeline": "statistics"}
COUNTED = {"told": {"*": ACCUMULATED}}  # by targets, and not by samples
ADAM = {"optimizer": "AdamW", "optimizer_args": {"lr": 0.02, "weight_decay": 0.1}}
NET = {"model": Mlp, "data": rows(), "criterion": CE}

PROGRAMS = [
    Program(name="met: three batches a step, clipped, one cycle, ragged", **NET, **ADAM, **THREE_CLIPPED,
            scheduler="OneCycleLR", scheduler_args={"max_lr": 0.1, "total_steps": 8}, epochs=4),
    Program(name="met: ignored and weighted classes, accumulated", model=Mlp, data=ignored_rows, criterion=CE,
            criterion_args={"ignore_index": -100, "weight": [0.2, 1.0, 3.0]}, **TWO_CLIPPED, **COUNTED),
    Program(name="met: smoothed, ignored and weighted", model=Mlp, data=ignored_rows, criterion=CE, **THREE, **COUNTED,
            criterion_args={"label_smoothing": 0.2, "weight": [0.2, 1.0, 3.0]}, **ADAM),
    Program(name="met: shards without a target", model=Mlp, data=mostly_ignored, criterion=CE, **CLIP),
    Program(name="met: words, summed and counted, accumulated", model=Words, data=words(), step=word_sum, **ADAM,
            **TWO_CLIPPED),
    Program(name="met: words by name, accumulated", model=Words, data=words(), criterion=CE, **THREE_CLIPPED, **ADAM, **COUNTED),
    Program(name="met: words, a mean by hand", model=Words, data=words(), step=word_mean, told={"*": COUPLED}),
    Program(name="met: words, smoothed sum", model=Words, data=words(size=5), criterion=smoothed_sum, **TWO),
    Program(name="met: a mean over weights of samples", model=Mlp, data=weighted_rows, criterion=own_weights,
            told={"*": COUPLED}),
    Program(name="met: a sum over weights of samples, counted", model=Mlp, data=weighted_rows, criterion=own_weights_counted,
            **TWO),
    Program(name="met: by the number of positives", model=Mlp, data=rows(), criterion=positives, told={"*": COUPLED}),
    Program(name="met: pairs with unlike labels", model=Mlp, data=rows(size=6), criterion=pair_mean, told={"*": COUPLED}),
    Program(name="met: divergence, batchmean", model=Mlp, data=rows(), criterion=kl, **CLIP),
    Program(name="met: gaps in the targets, a mean", model=Mlp, data=with_gaps, criterion=nan_mean, told={"*": COUPLED}),
    Program(name="met: gaps in the targets, a sum", model=Mlp, data=with_gaps, criterion=nan_sum, **THREE_CLIPPED),
    Program(name="met: multi margin with weights", model=Mlp, data=rows(), criterion="MultiMarginLoss",
            criterion_args={"weight": [0.2, 1.0, 3.0]}, **TWO),
    Program(name="met: synced norms, accumulated and clipped", model=Norms, data=rows(24, 6), criterion=CE, **CLIP,
            settings={"sync_batchnorm": True}, **ADAM, scheduler="CosineAnnealingWarmRestarts", scheduler_args={"T_0": 3},
            refused=SYNCED),
    Program(name="met: norms of the batch, accumulated", model=Norms, data=rows(24, 6), criterion=CE, **TWO,
            told={"*": STATISTICS}, refused={"pipeline": "or a micro-batch, is that small"}),
    Program(name="met: average in buffers, clipped, ragged", model=Average, data=rows(), criterion=CE, **CLIP, **ADAM,
            refused=AVERAGED),
    Program(name="met: average in buffers, accumulated", model=Average, data=rows(), criterion=CE, **THREE,
            refused=AVERAGED),
    Program(name="met: counts in buffers", model=Counting, data=rows(24), criterion=CE, refused=COUNTED_IN_STAGES),
    Program(name="met: annealed by a buffer, a short batch first", model=Annealed, data=short_first, step=annealed, **TWO,
            told={"*": "is behind there for the later batches of that step"}),
    Program(name="met: annealed by a buffer, accumulated", model=Annealed, data=rows(), step=annealed, **TWO),
    Program(name="met: annealed by a buffer, few samples", model=Annealed, data=rows(12, 2), step=annealed, **TWO),
    Program(name="met: annealed by a buffer", model=Annealed, data=rows(), step=annealed, **CLIP, epochs=3),
    Program(name="met: compares samples later", model=Annealed, data=rows(24, 6), step=compared_later, epochs=3,
            told={"*": COUPLED}),
    Program(name="met: a head that some batches train", model=Heads, data=rows(), criterion=chosen_head, **ADAM, **CLIP),
    Program(name="met: rows by how often a batch has them", model=Frequent, data=lambda: batches(labels(V, 22, T), labels(3,
            22), size=4),
            criterion=CE, told={"*": COUPLED}),
    Program(name="met: whitened by the batch", model=Whitened, data=rows(24, 6), criterion=CE, told={"*": COUPLED},
            refused={"pipeline": "has too few samples for what model or loss computes over them"}),
    Program(name="met: functional batch norm", model=Ranked, data=rows(24, 6), criterion=CE, told={"*": COUPLED},
            refused={"pipeline": "a function that normalises over the batch got one value per channel"}),
    Program(name="met: a layer used three times, one unused", model=Sliced, data=rows(), criterion=CE, **TWO_CLIPPED,
            scheduler="ExponentialLR", scheduler_args={"gamma": 0.9}, **ADAM),
    Program(name="met: gru both ways, clipped", model=Gru, data=lambda: batches(draw(22, 6, 4), labels(3, 22), size=4),
            criterion=CE,
            **TWO_CLIPPED, optimizer="RMSprop", optimizer_args={"lr": 0.01, "momentum": 0.9, "centered": True}),
    Program(name="met: encoder layer, warm cosine, clipped", model=Attending, data=lambda: batches(draw(22, 6, 4), labels(3,
            22), size=4),
            criterion=CE, **CLIP, scheduler=warm_cosine, **ADAM),
    Program(name="met: slope of the input, accumulated", model=Mlp, data=rows(), step=penalised, **TWO_CLIPPED,
            refused={"tensor": "derivatives of derivatives", "zero 3": "a gradient of a gradient"}),
    Program(name="met: decay in the loss, accumulated", model=Mlp, data=rows(), step=decayed_by_hand, **TWO,
            refused=READ),
    Program(name="met: groups, rates by group, clipped", **NET, optimizer=grouped, optimizer_args={}, scheduler=by_group,
            **TWO_CLIPPED),
    Program(name="met: an optimizer that clips by itself", **NET, optimizer=clips_itself, optimizer_args={},
            refused={"tensor": "looks at whole parameters"}),
    Program(name="met: signs of a moving mean", **NET, optimizer=sign, optimizer_args={}, **CLIP),
    Program(name="met: nadam, cyclic rate and momentum", **NET, optimizer="SGD", optimizer_args={"lr": 0.1, "momentum": 0.9},
            scheduler="CyclicLR", scheduler_args={"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2}, **CLIP),
    Program(name="met: adagrad by epochs, two batches a step", **NET, optimizer="Adagrad", optimizer_args={"lr": 0.1,
            "lr_decay": 0.1},
            scheduler="MultiStepLR", scheduler_args={"milestones": [1, 2]}, epochs=3,
            options={**TWO["options"], "scheduler_interval": "epoch"}),
    Program(name="met: rprop, ragged", **NET, optimizer="Rprop", optimizer_args={"lr": 0.01},
            refused={"zero 3": "cannot step on parameters"}),
    Program(name="met: averaged sgd", **NET, optimizer="ASGD", optimizer_args={"lr": 0.05, "t0": 2}, **CLIP),
    Program(name="met: adafactor", **NET, optimizer="Adafactor", optimizer_args={"lr": 0.05}, **CLIP,
            refused={"tensor": "looks at whole parameters", "zero 3": "cannot step on parameters"}),
    Program(name="met: drawn by weight", model=Mlp, data=drawn_by_weight, criterion=CE, **THREE, **ADAM),
    Program(name="met: fewer samples than workers", model=Mlp, data=rows(5, 2), criterion=CE, **TWO_CLIPPED, epochs=3, **ADAM),
    Program(name="met: lists of unlike lengths", model=Mlp, data=ragged_lists, step=of_lists, **TWO_CLIPPED),
    Program(name="met: joined texts with offsets, accumulated", model=Bag, data=bags, step=bag_step, refused={"*": POSITIONS},
            **TWO),
    Program(name="met: validated between steps", **NET, **ADAM, scheduler="StepLR", scheduler_args={"step_size": 2},
            options={**TWO_CLIPPED["options"], "val_loader": [(draw(7, 5, seed=8), labels(3, 7, seed=9))], "val_interval": 2}),
]  # fmt: skip
