"""Models, data, a small trainer of spread models, and the plain PyTorch loop they are measured against."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from guava_nb.config.mesh import Mesh
from guava_nb.errors import ConfigError
from guava_nb.parallel.loss_interface import Learning
from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.parallelize import parallelize
from guava_nb.parallel.state.full_state import assemble, assemble_optimizer
from guava_nb.parallel.state.shard_layout import even_bounds
from guava_nb.protocol.messages import ParallelSpec

VOCAB, WIDTH, LENGTH = 13, 8, 5
CPU = torch.device("cpu")


class Attention(nn.Module):
    """Separate projections, grouped keys, a norm inside the heads."""

    def __init__(self, width: int = WIDTH, heads: int = 4, key_heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.size = heads, key_heads, width // heads
        self.q_proj = nn.Linear(width, heads * self.size)
        self.k_proj = nn.Linear(width, key_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.size)
        self.norm = nn.LayerNorm(self.size)
        self.dropout = dropout
        self.o_proj = nn.Linear(heads * self.size, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.norm(self.q_proj(x).view(b, t, self.n_heads, self.size)).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_kv_heads, self.size).transpose(1, 2)
        k, v = (z.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for z in (k, v))
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class FusedAttention(nn.Module):
    """As in small GPTs: one weight for query, key and value."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (z.view(b, t, self.n_head, -1).transpose(1, 2) for z in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, self.n_embd))


class Gated(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 11) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, fused: bool, dropout: float) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = FusedAttention() if fused else Attention(dropout=dropout)
        self.mlp = (
            Gated()
            if fused
            else nn.Sequential(
                nn.Linear(WIDTH, 17), nn.GELU(), nn.Dropout(dropout), nn.Linear(17, WIDTH), nn.Dropout(dropout)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Language(nn.Module):
    """Tied embedding and head, a frozen layer, an unused one, a scalar."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=1)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block(bool(n % 2), dropout) for n in range(4)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position + self.offset
        for block in self.blocks:
            h = block(h)
        return self.head(self.frozen(h) * self.scale)


class Torch(nn.Module):
    """torch's own encoder layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 19, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=x == 2))


MODELS: dict[str, Any] = {"language": Language, "torch": Torch}


@dataclass(frozen=True)
class Measure:
    """A Loss: sum over labels that count."""

    value: Tensor
    weight: float
    count: Tensor
    scores: Tensor | None = None


def criterion(outputs: Tensor, targets: Tensor, rows: int) -> Measure:
    total = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return Measure(total, 1.0, (targets != -100).sum())


def objective(model: nn.Module, batch: Any, rows: int, want_scores: bool = False) -> Measure:
    return criterion(model(batch[0]), batch[1], rows)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, and how it is spread."""

    spec: ParallelSpec
    model: str = "language"
    double: bool = True
    machines: tuple[int, ...] = ()
    sync: bool = False
    steps: int = 20
    rows: int = 6
    accumulate: int = 1
    max_norm: float | None = None
    dropout: float = 0.0
    lr: float = 0.01
    groups: bool = False
    optimizer: str = "AdamW"
    start: int = 0
    model_state: dict[str, Tensor] | None = None
    optimizer_state: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def build(self) -> nn.Module:
        torch.manual_seed(3)
        made = MODELS[self.model](dropout=self.dropout)
        return made.double() if self.double else made.float()

    def make_optimizer(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        cls = getattr(torch.optim, self.optimizer)
        if not self.groups:
            return cls(list(named.values()), lr=self.lr)
        flat = [p for p in named.values() if p.ndim < 2]
        wide = [p for p in named.values() if p.ndim >= 2]
        return cls([{"params": flat, "weight_decay": 0.0}, {"params": wide, "weight_decay": 0.1}], lr=self.lr)

    def batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """One step's batches; the first rows have hardly any label that counts, the last batch is small."""
        g = torch.Generator().manual_seed(100 + step)
        out = []
        for number in range(self.accumulate):
            rows = self.rows if number + 1 < self.accumulate or step % 3 else 1
            x, y = (torch.randint(0, VOCAB, (rows, LENGTH), generator=g) for _ in range(2))
            if rows > 1:
                y[: rows // 2, 1:] = -100
            out.append((x, y))
        return out


def plain(case: Scenario) -> tuple[nn.Module, torch.optim.Optimizer, list[float], list[float]]:
    """Train in plain PyTorch on whole batches; returns also losses and norms before clipping."""
    model = case.build().train()
    optimizer = case.make_optimizer(dict(model.named_parameters()))
    if case.model_state is not None:
        model.load_state_dict(case.model_state)
    if case.optimizer_state is not None:
        optimizer.load_state_dict(case.optimizer_state)
    losses, norms = [], []
    for step in range(case.start, case.start + case.steps):
        torch.manual_seed(step)
        parts = [objective(model, batch, len(batch[0])) for batch in case.batches(step)]
        mean = sum(part.value for part in parts) / sum(part.count for part in parts)
        optimizer.zero_grad()
        mean.backward()
        limit = case.max_norm if case.max_norm is not None else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(float(mean.detach()))
    return model, optimizer, losses, norms


def spread(case: Scenario) -> dict[str, Any]:
    """Train the same over the default group; without the job and exchange of a run."""
    spec = case.spec
    axes = MeshAxes.build(Mesh(spec.dp, spec.pp, spec.tp), CPU, case.machines, inner="gloo")
    part = parallelize(
        case.build(), spec, axes, CPU, Learning(objective, case.make_optimizer, criterion),
        sync_batchnorm=case.sync,
    )  # fmt: skip
    if case.model_state is not None:
        part.load(case.model_state, case.optimizer_state)
    part.model.train()
    losses, norms = [], []
    for step in range(case.start, case.start + case.steps):
        loss, length = _step(case, part, axes, step)
        losses.append(loss)
        norms.append(length)
    return {
        "losses": losses,
        "norms": norms,
        "pieces": part.model_pieces(),
        "optimizer": part.optimizer_pieces(),
        "again": [name for name, m in part.model.named_modules() if "_guava_checkpointed" in m.__dict__],
        "none": [name for name, p in part.named.items() if p not in part.optimizer.state],
        "local": {
            name: tuple(p.to_local().shape if hasattr(p, "to_local") else p.shape) for name, p in part.named.items()
        },
    }


def _step(case: Scenario, part: Any, axes: MeshAxes, step: int) -> tuple[float, float]:
    torch.manual_seed(step)
    batches = case.batches(step)
    global_rows = sum(len(x) for x, _ in batches)
    seen = []
    for number, (x, y) in enumerate(batches):
        first, end = even_bounds(len(x), case.spec.dp, axes.dp)
        stand_in = first == end
        own = slice(0, 1) if stand_in else slice(first, end)
        batch = (x[own] if part.takes_inputs else None, y[own] if part.takes_targets else None)
        last = {"last": True} if case.spec.pp == 1 and number + 1 == len(batches) else {}
        seen.append(part.train_batch(batch, 1 if stand_in else end - first, 1 / global_rows, stand_in, **last))
    part.finish_gradients()
    counted = seen if part.reports else []
    sums = torch.tensor(
        [sum(float(m.loss_sum) for m in counted), sum(float(m.count or 0) for m in counted), part.gradient_square()],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    loss_sum, count, square = sums.tolist()
    assert part.nonfinite() == ""
    scale = global_rows / count
    norm = square**0.5 * scale
    clip = min(1.0, case.max_norm / (norm + 1e-6)) if case.max_norm is not None else 1.0
    part.scale_gradients(scale * clip)
    part.apply()
    part.drop_gradients()
    return loss_sum / count, norm


def whole_state(spec: ParallelSpec, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Put ranks' pieces together; where each replica has a whole state, all of them have the same one."""
    states = [assemble(rank["pieces"] for rank in replica) for replica in _replicas(spec, ranks)]
    assert all(state.keys() == states[0].keys() for state in states)
    assert all(torch.equal(value, states[0][name]) for state in states for name, value in state.items())
    return states[0]


def whole_optimizer(spec: ParallelSpec, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the pieces of the optimizer's state together, of the first replica that has all of it."""
    return assemble_optimizer([rank["optimizer"] for rank in _replicas(spec, ranks)[0]])


def _replicas(spec: ParallelSpec, ranks: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    """Group ranks by what has one whole state: a replica, or with ZeRO all together."""
    span = len(ranks) if spec.zero_stage else spec.pp * spec.tp
    return [ranks[first : first + span] for first in range(0, len(ranks), span)]


# ------------------------------------------------------------------------------------------------------ special models


class Choosy(nn.Module):
    """Which of its layers it uses depends on the rows: a row whose first token is even takes the left one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.left, self.right, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner = nn.ModuleList([Fork() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        even = x[:, :1, None] % 2 == 0
        if bool(even.any()):
            h = torch.where(even, h + self.left(h), h)
        if not bool(even.all()):
            h = torch.where(even, h, h + self.right(h))
        for fork in self.inner:
            h = fork(h, even)
        return self.head(h)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.odd, self.never = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, h: Tensor, even: Tensor) -> Tensor:
        h = h + self.both(h)
        return h if bool(even.all()) else torch.where(even, h, self.odd(h))


class Spectral(nn.Module):
    """Mixes positions in the frequency domain: complex parameters and a complex buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.ModuleList([Filter() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.mix:
            h = layer(h)
        return self.head(h)


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH, WIDTH, dtype=torch.complex128))
        self.register_buffer("turn", torch.exp(1j * torch.linspace(0, 3, LENGTH)).to(torch.complex128))

    def forward(self, h: Tensor) -> Tensor:
        turned = torch.fft.fft(h, dim=1) * self.weight * self.turn[:, None]
        return h + torch.fft.ifft(turned, dim=1).real.to(h.dtype)


class Counting(nn.Module):
    """Batch statistics, and layers of two dtypes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        return self.head(h + self.other(h.to(self.other.weight.dtype)).to(h.dtype))

    def double(self) -> nn.Module:
        super().double()
        self.other.float()
        return self


class Normed(nn.Module):
    """Batch norms of three kinds: with momentum, with a mean over all steps, without weights; over two and three axes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.BatchNorm1d(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.second = nn.BatchNorm1d(WIDTH, momentum=None, affine=False)
        self.third = nn.SyncBatchNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.embed(x).transpose(1, 2)).transpose(1, 2)
        h = self.inner(h).tanh()
        # Uneven over the rows, so that the mean of the replicas' statistics is not that of the batch.
        h = self.second((h + 5 * (x == 3)[..., None]).flatten(0, 1)).view_as(h)
        return self.head(self.third(h.transpose(1, 2)).transpose(1, 2))


class PlainNormed(Normed):
    """The same for a loop without a group."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.third.__class__ = nn.BatchNorm1d


class OwnNorm(nn.BatchNorm1d):
    """A batch norm that does it in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class OwnNormed(Normed):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.second = OwnNorm(WIDTH)


class Reused(nn.Module):
    """Modules under several names, and a layer in two modules."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        line = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(line, nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), line, nn.Softmax(dim=-1))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), nn.GELU(), nn.Dropout(dropout), nn.Linear(17, WIDTH))
        self.again = self.mlp
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.blocks(self.mlp(self.embed(x)))))


class Rare(nn.Module):
    """Looks at whole rows only where they are very long, as no try would see; but its weights are."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 17), Shortened(), nn.Linear(17, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)
        with torch.no_grad():
            self.embed.weight *= 1e4

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(x)))


class Shortened(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * torch.clamp(1e3 / h.norm(dim=-1, keepdim=True), max=1.0)


class RowNormed(nn.Module):
    """A batch norm that sees one value of each row."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.BatchNorm1d(LENGTH * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x).flatten(1)).view(len(x), LENGTH, WIDTH))


MODELS |= {"row normed": RowNormed}
MODELS |= {"reused": Reused, "rare": Rare}
MODELS |= {"normed": Normed, "plainly normed": PlainNormed, "own norm": OwnNormed}


class Viewing(nn.Module):
    """Blocks whose outputs are views, changed in place by the model, and outputs that are a view themselves."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            rest = h
            h = block(h)  # of three axes, so torch's linear returns a view
            h += rest
        return self.head(h)


MODELS |= {"choosy": Choosy, "counting": Counting, "viewing": Viewing, "spectral": Spectral}


class Routed(nn.Module):
    """Repeated blocks of which each row uses its own, by its first token; `route` runs them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.route(self.embed(x), x[:, 0]))

    def route(self, h: Tensor, first: Tensor) -> Tensor:
        """Mixture of experts: a block computes the rows that chose it."""
        for number, block in enumerate(self.blocks):
            if len(rows := (first % 4 == number).nonzero()[:, 0]):
                h = h.index_add(0, rows, block(h[rows]))
        return h


class Scaled(Routed):
    """Even rows leave out the blocks, and with them a scalar and a layer without elements."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is nothing to draw for it
            self.empty = nn.Sequential(nn.Linear(WIDTH, 0, bias=False), nn.Linear(0, WIDTH, bias=False))

    def route(self, h: Tensor, first: Tensor) -> Tensor:
        odd = (first % 2 == 1)[:, None, None]
        if bool(odd.any()):
            part = h
            for block in self.blocks:
                part = part + block(part)
            h = torch.where(odd, part * self.scale + self.empty(part), h)
        return h


class Emptied(Scaled):
    """All rows take the blocks; even ones leave out the layer without elements only."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        del self.scale

    def route(self, h: Tensor, first: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block(h)
        return h + self.empty(h) if bool((first % 2 == 1).any()) else h


class RawExperts(Routed):
    """Experts see what has no gradient, and their outputs are not in the loss of every row."""

    def route(self, h: Tensor, first: Tensor) -> Tensor:
        raw, kept = h.detach(), []
        for number, block in enumerate(self.blocks):
            if bool((first % 4 == number).any()):
                kept.append(torch.where((first % 4 == number)[:, None, None], block(raw), 0.0))
        return h + kept[0] * 0 + torch.stack(kept).sum(0)


class Exiting(Routed):
    """A row leaves after as many blocks as its token says; batches whose rows all left run no more."""

    def route(self, h: Tensor, first: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            here = (first % 5 > number)[:, None, None]
            if not bool(here.any()):
                break
            h = torch.where(here, h + block(h), h)
        return h


class Turning(Routed):
    """Odd rows take the blocks in the other order, and the first one twice more."""

    def route(self, h: Tensor, first: Tensor) -> Tensor:
        odd = (first % 2 == 1)[:, None, None]
        if not bool(odd.all()):
            for block in self.blocks:
                h = torch.where(odd, h, h + block(h))
        if bool(odd.any()):
            for block in [*reversed(self.blocks), self.blocks[0], self.blocks[0]]:
                h = torch.where(odd, h + block(h), h)
        return h


class Frozen(Exiting):
    """Blocks without trainable parameters on the way to one that learns."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks[1:].requires_grad_(False)


class Towers(nn.Module):
    """A row goes through the tower of its kind, whose inputs are whole numbers; part of a tower has another dtype."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.towers = nn.ModuleList(Tower() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h, kind = self.embed(x), x[:, 0] % 3
        for number, tower in enumerate(self.towers):
            if bool((kind == number).any()):
                h = h + torch.where((kind == number)[:, None, None], tower(x), 0.0)
        return self.head(h)

    def double(self) -> nn.Module:
        super().double()
        for tower in self.towers:
            tower.norm.float()
        return self


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.line, self.norm = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.line(self.table(x)).float()).to(self.line.weight.dtype)


class Late(Routed):
    """The first block is run once more for rows that begin with the last token."""

    def route(self, h: Tensor, first: Tensor) -> Tensor:
        for block in self.blocks:
            h = h + block(h)
        if bool((first == VOCAB - 1).any()):
            h = torch.where((first == VOCAB - 1)[:, None, None], self.blocks[0](h), h)
        return h


MODELS |= {
    "experts": Routed, "raw experts": RawExperts, "exiting": Exiting, "turning": Turning, "frozen": Frozen, "late": Late,
    "towers": Towers, "scaled": Scaled, "emptied": Emptied,
}  # fmt: skip


class Moving(nn.Module):
    """Moves a network without gradient, and counts steps, samples and labels, as users write it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.online, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rate", torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("tokens", torch.zeros(VOCAB, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    target.mul_(0.9).add_(online, alpha=0.1)
                self.steps += 1
                self.rate *= 0.9
                self.seen += len(x)
                self.tokens += torch.bincount(x.reshape(-1), minlength=VOCAB)
        h = torch.tanh(self.embed(x))
        return self.head(self.online(h) + self.target(h) * self.rate)


MODELS |= {"moving": Moving}


def buffers(case: Scenario) -> dict[str, Tensor]:
    """Train a little over the default group and return this rank's buffers."""
    axes = MeshAxes.build(Mesh(case.spec.dp, 1, 1), CPU)
    part = parallelize(case.build(), case.spec, axes, CPU, Learning(objective, case.make_optimizer))
    part.model.train()
    for step in range(case.steps):
        _step(case, part, axes, step)
    return {name: buffer.clone() for name, buffer in part.model.named_buffers()}


def error_before_a_forward(case: Scenario) -> tuple[str, float]:
    """Fail ahead of the model's first forward; return what came out, and the loss of a step after it."""
    axes = MeshAxes.build(Mesh(case.spec.dp, 1, case.spec.tp), CPU)
    faults = [ValueError("a strange batch")]

    def failing(model: nn.Module, batch: Any, rows: int, want_scores: bool = False) -> Measure:
        if faults:
            raise faults.pop()
        return objective(model, batch, rows)

    part = parallelize(case.build(), case.spec, axes, CPU, Learning(failing, case.make_optimizer))
    part.model.train()
    try:
        part.train_batch(case.batches(0)[0], case.rows, 1.0)
    except Exception as error:
        part.drop_gradients()
        return f"{type(error).__name__}: {error}", _step(case, part, axes, 0)[0]
    return "", 0.0


def refusal(case: Scenario, sizes: tuple[int, int, int]) -> str:
    """Return what parallelize says against a case."""
    try:
        axes = MeshAxes.build(Mesh(*sizes), CPU)
        parallelize(
            case.build(), case.spec, axes, CPU, Learning(objective, case.make_optimizer),
            sync_batchnorm=case.sync,
        )  # fmt: skip
    except ConfigError as error:
        return str(error)
    return ""


def patience(case: Scenario) -> float:
    """Seconds that a receive along the stages waits."""
    axes = MeshAxes.build(Mesh(1, 2, 1), CPU)
    return float(axes.group("pp")._get_backend(CPU).options._timeout.total_seconds())
