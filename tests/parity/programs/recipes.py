"""Modules, optimizers, schedules and loaders of all kinds."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.parity.programs.program import COUPLED, READ, Program, batches, draw, labels


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(8, 3)

    def forward(self, pair):
        return self.head(torch.cat([self.a(pair[0]), self.b(pair[1])], 1).relu())


class DictOut(Mlp):
    def forward(self, x):
        return {"logits": self.net(x), "features": x}


def dict_loss(outputs, targets):
    return F.cross_entropy(outputs["logits"], targets) + 0.01 * outputs["logits"].pow(2).mean()


class Checkpointed(Mlp):
    def forward(self, x):
        return self.net[4](checkpoint(self.net[:4], x, use_reentrant=False))


class CheckpointedBlocks(nn.Module):
    """Residual blocks under the checkpoint of older code."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return self.last(x)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Binary(Mlp):
    def forward(self, x):
        return self.net[2:](Straight.apply(self.net[0](x)))


class Clamped(Mlp):
    """Values that the sum over workers reaches, and their parts do not."""

    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def clamping(named):
    """Its hooks come with the optimizer, and see what the sum over workers is."""
    parameters = [p for _, p in named]
    for p in parameters:
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return torch.optim.SGD(parameters, lr=0.5)


def signs(parameter):
    parameter.grad = parameter.grad.sign() * 0.1


class Signs(Mlp):
    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(signs)


class Watched(Mlp):
    def __init__(self):
        super().__init__()
        self.seen = []
        for p in self.parameters():
            p.register_hook(lambda gradient: self.seen.append(float(gradient.norm())))


class HookedLayer(Mlp):
    def __init__(self):
        super().__init__()
        self.net[2].register_forward_hook(lambda module, args, output: output * 1.5)
        self.net[4].register_full_backward_hook(lambda module, given, taken: tuple(0.5 * g for g in given))


class Normalising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 0.1 * grad / (grad.norm(dim=1, keepdim=True) + 1e-3)


class PerSample(Mlp):
    def forward(self, x):
        return self.net[2:](Normalising.apply(self.net[:2](x)))


class Teacher(Mlp):
    def forward(self, x):
        h = self.net[:2](x)
        with torch.no_grad():
            stopped = self.net[2:4](h)
        return self.net[4](h + stopped)


class WithoutTrained(Mlp):
    def state_dict(self, *args, **kwargs):
        return {
            name: value for name, value in super().state_dict(*args, **kwargs).items() if not name.startswith("net.0.")
        }


class WithoutFrozen(WithoutTrained):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


class Growing(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 5))

    def forward(self, x):
        self.bank = torch.cat([self.bank, x.detach()])[-64:]
        return super().forward(x)


class SparseBuffer(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(5).to_sparse())


class Spectral(Mlp):
    def __init__(self):
        super().__init__()
        self.net[0] = parametrizations.spectral_norm(self.net[0])  # moves its vectors in every forward


class Weighted(Mlp):
    def __init__(self):
        super().__init__()
        self.net[0], self.net[2] = (parametrizations.weight_norm(self.net[k]) for k in (0, 2))


class Experts(nn.Module):
    """The best expert of each sample only: a replica may leave an expert out."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class SoftExperts(Experts):
    def forward(self, x):
        return torch.einsum("be,ebc->bc", self.gate(x).softmax(-1), torch.stack([one(x) for one in self.experts]))


class EarlyExit(nn.Module):
    """Stops after one or two blocks, as the first sample says."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        for block in self.blocks[: 1 + int(x[0, 0] > 0) + int(x[0, 1] > 0)]:
            x = block(x)
        return self.head(x)


class MultiTask(nn.Module):
    """Kendall's learned weights of the losses."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.body(x).relu()
        return self.a(h), self.b(h).squeeze(1)


def multi_task_step(model, batch):
    x, y, z = batch
    a, b = model(x)
    losses = torch.stack([F.cross_entropy(a, y), F.mse_loss(b, z)])
    return (losses * (-model.logs).exp() + model.logs).sum()


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(8, 5) * 0.3).t())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head((x @ self.weight).relu())


# --------------------------------------------------------------------------------------------- optimizers, schedules


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                    p.add_(average.sign(), alpha=-group["lr"])


class Sam(torch.optim.Optimizer):
    """Needs two gradients for each step: its step wants a closure."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"


def lion(named, lr):
    return Lion([p for _, p in named], lr)


def sam(named):
    return Sam([p for _, p in named])


class Lamb(torch.optim.Optimizer):
    """Each parameter's update in proportion to its norm."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(m * (p.norm() / (m.norm() + 1e-6)), alpha=group["lr"])


def lamb(named, lr):
    return Lamb([p for _, p in named], lr)


def clipping_hook(named, lr):
    parameters = [p for _, p in named]
    made = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 0.1) and None)
    return made


def no_decay_on_biases(named, lr):
    named = list(named)
    groups = [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def warmup(optimizer, steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def warmup_then_cosine(optimizer):
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [2])


# ------------------------------------------------------------------------------------------------------------ batches


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


Named = collections.namedtuple("Named", ["x", "y"])


def as_dataclass(samples):
    return Sample(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


def as_named(samples):
    return Named(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


def as_arrays(samples):
    return np.stack([x.numpy() for x, _ in samples]), np.array([int(y) for _, y in samples])


def from_arrays(batch):
    return tuple(torch.as_tensor(part) for part in batch)


def attribute_step(model, batch):
    return F.cross_entropy(model(batch.x), batch.y)


def dict_step(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


class Dicts(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        return {"x": draw(5, seed=index), "y": index % 3, "id": f"sample {index}"}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(draw(5, seed=k), k % 3) for k in range(22)])


def tensors():
    return TensorDataset(draw(22, 5), labels(3, 22))


def classified():
    return batches(draw(22, 5), labels(3, 22))


def equal_batches():
    return batches(draw(24, 5), labels(3, 24))


def ready_batches():
    """Batches that the data set makes: no automatic batching."""
    x, y = draw(24, 5), labels(3, 24)
    return DataLoader([(x[k : k + 8], y[k : k + 8]) for k in range(0, 24, 8)], batch_size=None)


def weighted():
    sampler = WeightedRandomSampler([1.0] * 11 + [5.0] * 11, 24, generator=torch.Generator().manual_seed(4))
    return DataLoader(tensors(), 8, sampler=sampler)


def collated(collate):
    return batches(tensors(), collate_fn=collate)


def two_inputs():
    class Pairs(Dataset):
        def __len__(self):
            return 22

        def __getitem__(self, index):
            return (draw(5, seed=index), draw(4, seed=50 + index)), index % 3

    return batches(Pairs())


def own_dictionaries():
    return DataLoader(Dicts(), 8)


def one_tuple():
    """A user gives (X, y) instead of a loader."""
    return draw(22, 5), labels(3, 22)


def l2_step(model, batch):
    """A penalty on all weights, in the loss."""
    x, y = batch
    return F.cross_entropy(model(x), y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def l1_first_step(model, batch):
    """A penalty on one layer, from before the forward."""
    x, y = batch
    penalty = model.net[0].weight.abs().mean()
    return F.cross_entropy(model(x), y) + 0.1 * penalty


class Orthogonal(Mlp):
    """Returns a penalty beside its outputs."""

    def forward(self, x):
        w = self.net[2].weight
        return self.net(x), ((w @ w.T - torch.eye(8)) ** 2).sum()


def penalised(outputs, targets):
    return F.cross_entropy(outputs[0], targets) + 0.01 * outputs[1]


class Functional(Mlp):
    """Calls a layer's weight as a function."""

    def forward(self, x):
        hidden = F.linear(x, self.net[0].weight, self.net[0].bias).relu()
        return self.net[4](F.linear(hidden, self.net[2].weight * 0.5, self.net[2].bias).relu())


def method_step(model, batch):
    """Calls a method of the model beside its forward."""
    x, y = batch
    return F.cross_entropy(model.features(x), y)


class Methods(Mlp):
    def features(self, x):
        return self.net(x)


def functional_step(model, batch):
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return F.cross_entropy(torch.func.functional_call(model, given, (batch[0],)), batch[1])


def anchored_step(model, batch):
    if not hasattr(model, "first"):
        model.first = {name: p.detach().clone() for name, p in model.named_parameters()}
    far = sum((p - model.first[name]).pow(2).sum() for name, p in model.named_parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 0.5 * far


def twice_step(model, batch):
    """Two forwards of one batch, as consistency training has them."""
    x, y = batch
    a, b = model(x), model(x + 0.1)
    return F.cross_entropy(a, y) + F.mse_loss(b, a)


def sub_step(model, batch):
    x, y = batch
    return F.cross_entropy(model.net[4](model.net[:4](x)), y)


def eval_target_step(model, batch):
    """Pseudo targets from a forward without gradients."""
    x, y = batch
    with torch.no_grad():
        soft = model(x).softmax(1)
    return F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(x * 0.9), soft)


class Recurrent(nn.Module):
    """One cell, called again and again."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(1, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = x.new_zeros(len(x), 6)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t, None], h)
        return self.head(h)


class Unused(Mlp):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(5, 3)


class BatchNormed(Mlp):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


class FrozenNorm(BatchNormed):
    """Batch statistics that stay as they are."""

    def train(self, mode=True):
        super().train(mode)
        self.net[1].eval()
        return self


class HalfBuffers(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True, True, True]))
        self.register_buffer("table", torch.arange(8, dtype=torch.int32), persistent=False)

    def forward(self, x):
        return self.net[4]((self.net[2](self.net[0](x).relu()) * self.mask + self.table * 0.01).relu())


def maxed(outputs, targets):
    """The hardest sample only."""
    return F.cross_entropy(outputs, targets, reduction="none").max()


def top_half(outputs, targets):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.mean()


def summed(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum") / 8


CE = "CrossEntropyLoss"


def mlp(name, **words):
    return Program(name=name, **{"model": Mlp, "data": classified, "criterion": CE, **words})


PROGRAMS = [
    mlp("one cycle", scheduler="OneCycleLR", scheduler_args={"max_lr": 0.3, "total_steps": 6}),
    mlp("one cycle, too short", scheduler="OneCycleLR", scheduler_args={"max_lr": 0.3, "total_steps": 4},
        refused={"*": "fails after optimizer step"}),
    mlp("warm-up function", scheduler=warmup, scheduler_args={"steps": 4}),
    mlp("warm-up, then cosine", scheduler=warmup_then_cosine),
    mlp("cosine each epoch", scheduler="CosineAnnealingLR", scheduler_args={"T_max": 2},
        options={"scheduler_interval": "epoch"}),
    mlp("clipping", options={"max_grad_norm": 0.1}),
    mlp("accumulation", data=equal_batches, options={"accumulation_steps": 3}),
    mlp("adamw without decay on biases", optimizer=no_decay_on_biases, optimizer_args={"lr": 0.01}),
    mlp("lion", optimizer=lion, optimizer_args={"lr": 0.01}),
    mlp("sam", optimizer=sam, optimizer_args={}, refused={"*": "closure"}),
    mlp("lbfgs", optimizer="LBFGS", optimizer_args={"lr": 0.1}, refused={"*": "steps once per gradient"}),
    mlp("muon-like: adafactor", optimizer="Adafactor", optimizer_args={"lr": 0.01},
        refused=dict.fromkeys(("zero 3", "tensor"), "parameters of which each worker holds some rows")),
    mlp("lamb", optimizer=lamb, refused={"tensor": "looks at whole parameters"}),
    mlp("clipping by a hook", optimizer=clipping_hook,
        refused=dict.fromkeys(("tensor", "pipeline"), "SGD with its hooks looks at whole parameters")),
    mlp("rmsprop, momentum", optimizer="RMSprop", optimizer_args={"lr": 0.01, "momentum": 0.9}),
    mlp("adam, amsgrad", optimizer="Adam", optimizer_args={"lr": 0.01, "amsgrad": True}),
    mlp("sgd, nesterov and decay", optimizer_args={"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    mlp("checkpointed module", model=Checkpointed),
    mlp("checkpointed blocks, reentrant", model=CheckpointedBlocks, modes=("data", "zero 1", "zero 3"),
        refused={"zero 3": "Give use_reentrant=False"}),
    mlp("checkpointed blocks, reentrant, zero 2", model=CheckpointedBlocks, settings={"zero_stage": 2}, modes=("zero 1",),
        refused={"zero 1": "Give use_reentrant=False"}),
    mlp("own autograd function", model=Binary),
    mlp("spectral norm", model=Spectral, told={"pipeline": "micro-batch"}),
    mlp("gradients clamped by hooks", model=Clamped,
        refused=dict.fromkeys(("zero 3", "tensor"), "a hook changes the gradient of")),
    mlp("gradients clamped by hooks of the optimizer", optimizer=clamping, optimizer_args={},
        refused=dict.fromkeys(("zero 1", "zero 3", "tensor", "pipeline"), "puts a hook on the gradient of")),
    mlp("signs of gradients by hooks", model=Signs,
        refused=dict.fromkeys(("zero 3", "tensor"), "a hook changes the gradient of")),
    mlp("gradients watched by hooks", model=Watched, options={"max_grad_norm": 0.1}),
    mlp("hooks on a layer", model=HookedLayer),
    mlp("backward that normalises each sample", model=PerSample),
    mlp("gradients switched off in the forward", model=Teacher, refused={"pipeline": "switches gradients or autocast"}),
    mlp("frozen layer left out of the state dict", model=WithoutFrozen),
    mlp("trained layer left out of the state dict", model=WithoutTrained,
        refused={"*": "leaves out 'net.0.weight', which is trained"}),
    mlp("buffer that grows", model=Growing, refused={"*": "changed its shape from (0, 5)"}),
    mlp("sparse buffer", model=SparseBuffer, refused={"*": "buffer 'graph' is sparse"}),
    mlp("weight norm", model=Weighted),
    mlp("experts, best one", model=Experts),
    mlp("experts, all", model=SoftExperts),
    mlp("early exit", model=EarlyExit, told={"*": COUPLED}),
    mlp("transposed parameter", model=Transposed),
    mlp("penalty on the weights", criterion=None, step=l2_step, refused=READ),
    mlp("penalty on the first layer", criterion=None, step=l1_first_step, refused=READ),
    mlp("penalty from the forward", model=Orthogonal, criterion=penalised, refused=READ),
    mlp("layers called as functions", model=Functional, refused=READ),
    mlp("step calls a method", model=Methods, criterion=None, step=method_step, refused=READ),
    mlp("step calls submodules", criterion=None, step=sub_step, refused=READ),
    mlp("functional call", criterion=None, step=functional_step, refused={"zero 3": "torch.func.functional_call gives"}),
    mlp("distance from the first weights", criterion=None, step=anchored_step, refused=READ),
    mlp("two forwards", criterion=None, step=twice_step),
    mlp("targets without gradients", criterion=None, step=eval_target_step),
    mlp("one cell again and again", model=Recurrent),
    mlp("unused layer", model=Unused, optimizer="Adam", optimizer_args={"lr": 0.01, "weight_decay": 0.1}),
    mlp("frozen batch norm", model=FrozenNorm),
    mlp("buffers of whole numbers", model=HalfBuffers),
    mlp("hardest sample", criterion=maxed, told={"*": COUPLED}),
    mlp("hardest half", criterion=top_half, told={"*": COUPLED}),
    mlp("sum over a fixed size", criterion=summed, told={"*": COUPLED}),
    mlp("two inputs", model=TwoInputs, data=two_inputs),
    mlp("outputs as dict", model=DictOut, criterion=dict_loss),
    Program(name="several tasks, learned weights", model=MultiTask, step=multi_task_step,
            data=lambda: batches(draw(22, 5), labels(3, 22), draw(22, seed=2))),
    Program(name="dataclass batches", model=Mlp, step=attribute_step, data=lambda: collated(as_dataclass)),
    Program(name="named tuple batches", model=Mlp, step=attribute_step, data=lambda: collated(as_named)),
    mlp("named tuple (x, y)", data=lambda: collated(as_named)),
    Program(name="dict batches with words", model=Mlp, step=dict_step, data=own_dictionaries),
    mlp("numpy collate", data=lambda: collated(as_arrays), options={"preprocess": from_arrays}),
    mlp("stream", data=lambda: DataLoader(Stream(), 8)),
    mlp("batches ready made", data=ready_batches),
    mlp("a list of batches", data=lambda: list(equal_batches())),
    mlp("weighted sampler", data=weighted),
    mlp("dropping the last", data=lambda: batches(tensors(), drop_last=True)),
    mlp("loader workers", data=lambda: batches(tensors(), num_workers=1), epochs=1),
    mlp("(X, y) for a loader", data=one_tuple, refused={"*": "loader"}),
]  # fmt: skip
