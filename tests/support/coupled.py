"""Losses that couple the samples of a batch, gathered over the workers, and plain PyTorch's answer to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from guava_nb import gather_batch
from guava_nb.data.split import share_ranges
from guava_nb.protocol.messages import Commit, Factory, ParallelSpec, RunSpec
from guava_nb.replica.group_replica import GroupReplica
from guava_nb.replica.shard import ShardWork
from guava_nb.spec.cells import resolve

HERE = __name__


class Encoder(nn.Module):
    """Two layers and a learned temperature, which is used after the gather."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 6)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def views(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    x = batch[0]
    return tuple(functional.normalize(model(one), dim=1) for one in (x, x.roll(1, dims=1) * 0.9))  # type: ignore[return-value]


def info_nce(model: Any, batch: Sequence[Tensor]) -> Tensor:
    a, b = map(gather_batch, views(model, batch))
    return functional.cross_entropy(a @ b.T / model.temperature, torch.arange(len(a)))


def clip_loss(model: Any, batch: Sequence[Tensor]) -> Tensor:
    """Each worker compares its own rows with all rows, which is the cheaper half of the work."""
    a, b = views(model, batch)
    rows = gather_batch(torch.arange(len(a), dtype=torch.float64)[:, None] * 0 + batch[0][:, :1])  # finds our place
    first = int((rows[:, 0] == batch[0][0, 0]).nonzero()[0]) if len(rows) else 0
    return functional.cross_entropy(a @ gather_batch(b).T / model.temperature, first + torch.arange(len(a)))


def nt_xent(model: Any, batch: Sequence[Tensor]) -> Tensor:
    a, b = map(gather_batch, views(model, batch))
    z = torch.cat([a, b])
    alike = (z @ z.T / model.temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return functional.cross_entropy(alike, torch.arange(len(z)).roll(len(a)))


def dice(model: Any, batch: Sequence[Tensor]) -> Tensor:
    p, t = gather_batch(torch.sigmoid(model(batch[0]))), gather_batch(batch[1][:, None] == torch.arange(6)).double()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def dice_sum(model: Any, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The same as sum and count, of the whole batch on every worker."""
    return dice(model, batch) * 7, 7


def barlow_twins(model: Any, batch: Sequence[Tensor]) -> Tensor:
    a, b = map(gather_batch, views(model, batch))
    a, b = ((z - z.mean(0)) / (z.std(0, correction=0) + 0.1) for z in (a, b))
    return ((a.T @ b / len(a) - torch.eye(6, dtype=a.dtype)) ** 2).sum()


LOSSES = {"info_nce": info_nce, "nt_xent": nt_xent, "dice": dice, "dice_sum": dice_sum, "barlow_twins": barlow_twins,
          "clip_loss": clip_loss}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is trained over how many replicas; the batches have so many rows."""

    loss: str
    replicas: int
    zero_stage: int = 0
    rows: tuple[int, ...] = (8, 8, 7, 8, 2)

    @property
    def spec(self) -> RunSpec:
        mode = "zero" if self.zero_stage else "data"
        return RunSpec(
            model=Factory(f"{HERE}:Encoder"), criterion=None, step=Factory(f"{HERE}:{self.loss}"),
            optimizer=Factory("AdamW", {"lr": 0.01}), scheduler=None, precision="fp64", bucket_bytes=1024,
            hash_every_steps=0,
            parallel=ParallelSpec(mode=mode, dp=self.replicas, zero_stage=self.zero_stage, gather=True),
        )  # fmt: skip

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(5)
        return [
            (torch.randn(rows, 10, generator=g, dtype=torch.float64), torch.randint(0, 6, (rows,), generator=g))
            for rows in self.rows
        ]


def encoder() -> Encoder:
    """As the run's factory makes it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder().double()


def plain(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """Train on whole batches: nothing of ours but the weights that it begins with."""
    model, losses = encoder(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in case.batches():
        found = LOSSES[case.loss](model, batch)
        loss = found[0] / found[1] if isinstance(found, tuple) else found
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return dict(model.state_dict()), losses


def shared(case: Case) -> dict[str, Any]:
    """Train on this rank's share of each batch, as a worker does."""
    import torch.distributed as dist

    replica = GroupReplica(case.spec, lambda name: resolve(name, None), torch.device("cpu"))
    replica.spread(case.replicas)
    rank, losses, looked = dist.get_rank(), [], []
    for step, (x, y) in enumerate(case.batches()):
        first, end = share_ranges(len(x), [1.0] * case.replicas)[rank]
        own = slice(first, end) if end > first else slice(0, 1)
        sums = replica.evaluate((x[own], y[own]), end - first)
        result = replica.run_shard(ShardWork(step, rank, [(x[own], y[own])], end - first, len(x), (end - first,)))
        total = torch.tensor([result.loss_sum, result.count, sums.loss_sum, sums.count], dtype=torch.float64)
        dist.all_reduce(total)
        replica.apply(None, Commit(len(x) / float(total[1]), False))
        losses.append(float(total[0] / total[1]))
        looked.append(float(total[2] / total[3]))
    return {"losses": losses, "validated": looked, "pieces": replica.state(optimizer=False)["model"]}
