"""Embeddings that are told apart, and states beside the weights: averages of weights, code books, teachers."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.programs.program import COUPLED, NOISY, READ, Program, batches, draw, labels


class Encoder(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, width))

    def forward(self, x):
        return self.net(x)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(5, 6), nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch):
        return F.normalize(self.image(batch[0])), F.normalize(self.text(batch[1])), self.scale.exp()


def clip_step(model, batch):
    a, b, scale = model(batch)
    scores = scale * a @ b.T
    y = torch.arange(len(a))
    return (F.cross_entropy(scores, y) + F.cross_entropy(scores.T, y)) / 2


def info_nce(model, batch):
    a, b = F.normalize(model(batch[0])), F.normalize(model(batch[1]))
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def nt_xent(model, batch):
    z = F.normalize(torch.cat([model(batch[0]), model(batch[1])]))
    n = len(z) // 2
    scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(scores, torch.arange(2 * n).roll(n))


def barlow(model, batch):
    a, b = model(batch[0]), model(batch[1])
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.T @ b / len(a)
    return ((c.diagonal() - 1) ** 2).sum() + 0.005 * (c - torch.diag(c.diagonal())).pow(2).sum()


def triplet(model, batch):
    return F.triplet_margin_loss(*(model(part) for part in batch), margin=1.0)


def cosine(model, batch):
    a, b, y = batch
    return F.cosine_embedding_loss(model(a), model(b), y * 2 - 1, margin=0.1)


def supervised(model, batch):
    x, y = batch
    z = F.normalize(model(x))
    scores = z @ z.T - 1e9 * torch.eye(len(z), dtype=z.dtype)
    same = (y[:, None] == y).double() - torch.eye(len(z), dtype=z.dtype)
    return -((scores.log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def pairs():
    return batches(draw(24, 5), draw(24, 5, seed=2))


# ------------------------------------------------------------------------------------------------ states beside weights


class Vq(nn.Module):
    """A code book moved by exponential averages in forward."""

    def __init__(self, codes=3):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 4), nn.Linear(4, 5)
        self.register_buffer("codebook", torch.randn(codes, 4))
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, x):
        z = self.encoder(x)
        code = torch.cdist(z, self.codebook).argmin(1)
        if self.training:
            hot = F.one_hot(code, len(self.sizes)).to(z.dtype)
            self.sizes.mul_(0.9).add_(hot.sum(0).detach(), alpha=0.1)
            self.sums.mul_(0.9).add_((hot.T @ z).detach(), alpha=0.1)
            self.codebook.copy_(self.sums / self.sizes[:, None])
        q = self.codebook[code]
        return self.decoder(z + (q - z).detach()), z, q


def vq_step(model, batch):
    out, z, q = model(batch[0])
    return F.mse_loss(out, batch[0]) + 0.25 * F.mse_loss(z, q.detach())


class LearnedVq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.codes = nn.Linear(5, 4), nn.Linear(4, 5), nn.Embedding(3, 4)

    def forward(self, x):
        z = self.encoder(x)
        q = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        return self.decoder(z + (q - z).detach()), z, q


def learned_vq_step(model, batch):
    out, z, q = model(batch[0])
    return F.mse_loss(out, batch[0]) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


class Byol(nn.Module):
    """A target network without gradients, moved towards the online one in forward."""

    def __init__(self):
        super().__init__()
        self.online, self.predictor = Encoder(), nn.Linear(6, 6)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, batch):
        if self.training:
            with torch.no_grad():
                for mine, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    mine.lerp_(other, 0.1)
        a, b = batch
        return self.predictor(self.online(a)), self.target(b)


def byol_step(model, batch):
    a, b = model(batch)
    return (2 - 2 * F.cosine_similarity(a, b.detach())).mean()


class MeanTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Encoder(3)
        for name, value in self.student.named_parameters():
            self.register_buffer("ema_" + name.replace(".", "_"), value.detach().clone())

    def forward(self, x):
        if self.training:
            for name, value in self.student.named_parameters():
                self.get_buffer("ema_" + name.replace(".", "_")).lerp_(value.detach(), 0.05)
        return self.student(x)


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = nn.Linear(5, 3).requires_grad_(False), Encoder(3)

    def forward(self, x):
        with torch.no_grad():
            wise = self.teacher(x)
        return self.student(x), wise


def distil(outputs, targets):
    student, teacher = outputs
    soft = F.kl_div(F.log_softmax(student / 2, 1), F.softmax(teacher / 2, 1), reduction="batchmean")
    return 4 * soft + F.cross_entropy(student, targets)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Encoder(3).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.body(x) + self.up(self.down(x))


class Net3(Encoder):
    def __init__(self):
        super().__init__(3)


def frozen_instance():
    """A user freezes the body of a built model: only its head shall learn."""
    net = Net3()
    net.net[0].requires_grad_(False)
    return net


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder(3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen += len(x)
        return self.encoder(x)


class Unfreezing(nn.Module):
    """The body begins to learn after two steps."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(5, 8).requires_grad_(False), nn.Linear(8, 3), 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == 3:
                self.body.requires_grad_(True)
        return self.head(F.relu(self.body(x)))


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.compile(nn.Linear(5, 8), backend="eager"), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


# ------------------------------------------------------------------------------------------------------- generative


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 6), nn.Linear(3, 5)

    def forward(self, x):
        mean, log = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log


def vae_step(model, batch):
    out, mean, log = model(batch[0])
    kl = -0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()
    return F.mse_loss(out, batch[0]) + kl


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.net = nn.Embedding(10, 5), nn.Sequential(nn.Linear(10, 12), nn.SiLU(), nn.Linear(12, 5))

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


def _noisy(x, t, noise):
    kept = (1 - t / 10.0)[:, None]
    return kept.sqrt() * x + (1 - kept).sqrt() * noise


def diffusion_step(model, batch):
    x, t, noise = batch
    return F.mse_loss(model(_noisy(x, t, noise), t), noise)


def drawing_diffusion_step(model, batch):
    x = batch[0]
    t, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
    return F.mse_loss(model(_noisy(x, t, noise), t), noise)


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        a, b = x[:, :2], x[:, 2:]
        scale, shift = self.net(a).chunk(2, 1)
        return torch.cat([a, b * scale.tanh().exp() + shift], 1), scale.tanh().sum(1)


def flow_step(model, batch):
    z, log_det = model(batch[0])
    return (0.5 * (z**2).sum(1) - log_det).mean()


def penalty_step(model, batch):
    """A critic with the gradient penalty of WGAN-GP: backward through backward."""
    real, fake = batch
    middle = ((real + fake) / 2).requires_grad_(True)
    (slope,) = torch.autograd.grad(model(middle).sum(), middle, create_graph=True)
    return model(fake).mean() - model(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def critic():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def classified():
    return batches(draw(22, 5), labels(3, 22))


CE, SPREAD = "CrossEntropyLoss", {"*": COUPLED}
PROGRAMS = [
    Program(name="clip", model=Clip, data=lambda: batches(draw(24, 5), draw(24, 4, seed=2)), step=clip_step, told=SPREAD),
    Program(name="info nce", model=Encoder, data=pairs, step=info_nce, told=SPREAD),
    Program(name="info nce on one worker", model=Encoder, data=pairs, step=info_nce, options={"shares": [1, 0]},
            modes=("data", "relay", "site"),
            refused={f"{mode}/3": "shares (--shares) has 2 numbers for 3 workers" for mode in ("data", "relay", "site")}),
    Program(name="nt-xent", model=Encoder, data=pairs, step=nt_xent, told=SPREAD),
    Program(name="barlow twins", model=Encoder, data=pairs, step=barlow, told=SPREAD),
    Program(name="supervised contrast", model=Encoder, data=classified, step=supervised, told=SPREAD),
    Program(name="triplets", model=Encoder, data=lambda: batches(*(draw(22, 5, seed=k) for k in range(3))), step=triplet),
    Program(name="cosine pairs", model=Encoder, step=cosine,
            data=lambda: batches(draw(22, 5), draw(22, 5, seed=2), labels(2, 22))),
    Program(name="vq, averaged code book", model=Vq, data=pairs, step=vq_step, told={"*": "codebook"}),
    Program(name="vq, learned code book", model=LearnedVq, data=pairs, step=learned_vq_step, refused=READ),
    Program(name="byol", model=Byol, data=pairs, step=byol_step, refused={"zero 3": "writes into"}),
    Program(name="mean teacher in buffers", model=MeanTeacher, data=classified, criterion=CE, refused=READ),
    Program(name="distillation", model=Distilled, data=classified, criterion=distil,
            refused={"pipeline": "switches gradients or autocast on or off"}),
    Program(name="lora", model=Lora, data=classified, criterion=CE),
    Program(name="frozen instance", model=frozen_instance, instance=True, data=classified, criterion=CE),
    Program(name="counting samples", model=Counting, data=classified, criterion=CE, told={"*": "seen"}),
    Program(name="gradual unfreezing", model=Unfreezing, data=classified, criterion=CE,
            refused={"*": "requires_grad", "pipeline": "changes self.calls"}),
    Program(name="compiled submodule", model=Compiled, data=classified, criterion=CE),
    Program(name="vae", model=Vae, data=pairs, step=vae_step, told={"*": NOISY}),
    Program(name="diffusion, noise in the batch", model=Denoiser, step=diffusion_step,
            data=lambda: batches(draw(22, 5), labels(10, 22), draw(22, 5, seed=4))),
    Program(name="diffusion, noise in the step", model=Denoiser, data=pairs, step=drawing_diffusion_step, told={"*": NOISY}),
    Program(name="normalising flow", model=Coupling, data=pairs, step=flow_step, optimizer_args={"lr": 0.01}),
    Program(name="critic with gradient penalty", model=critic, data=pairs, step=penalty_step, optimizer_args={"lr": 0.01},
            refused={"zero 3": "needs them once more"}),
]  # fmt: skip
