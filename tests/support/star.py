"""The star exchange in one process: a reference for what the hub does to buckets, and steps over several replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from guava_nb.protocol.messages import Commit, Factory, RunSpec
from guava_nb.replica.buckets import BUFFERS
from guava_nb.replica.replica import Replica
from guava_nb.replica.shard import ShardResult, ShardWork

Handed = dict[int, tuple[bytes, Tensor]]


@dataclass
class Contribution:
    """What one shard handed over, copied as the wire would, and in which order."""

    rows: int
    buckets: Handed = field(default_factory=dict)

    def __call__(self, bucket: int, present: bytes, tensor: Tensor) -> None:
        assert bucket not in self.buckets, f"bucket {bucket} was handed over twice"
        assert tensor.device.type == "cpu" and tensor.ndim == 1 and tensor.is_contiguous()
        self.buckets[bucket] = (present, tensor.clone())


def sum_shards(contributions: Sequence[Contribution]) -> Handed:
    """Add gradient buckets in shard order; average the buffers by rows."""
    total: Handed = {}
    all_rows = sum(c.rows for c in contributions)
    for contribution in contributions:
        for bucket, (present, tensor) in contribution.buckets.items():
            if bucket == BUFFERS:
                if contribution.rows == 0:
                    continue
                tensor = tensor * (contribution.rows / all_rows)
            if bucket not in total:
                total[bucket] = (present, tensor.clone())
                continue
            before, value = total[bucket]
            bits = int.from_bytes(before, "little") | int.from_bytes(present, "little")
            total[bucket] = (bits.to_bytes(len(present), "little"), value + tensor)
    return total


def cloned(means: Handed) -> Handed:
    """Return what each worker receives: its own memory."""
    return {bucket: (present, tensor.clone()) for bucket, (present, tensor) in means.items()}


def commit_of(results: Sequence[ShardResult], skip: bool = False) -> Commit:
    rows = sum(r.rows for r in results)
    count = sum(r.count for r in results)
    return Commit(scale=rows / count if count else 0.0, skip=skip)


def all_finite(means: Handed) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for _, tensor in means.values())


def cut(batch: tuple[Tensor, Tensor], ranges: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    return [(batch[0][a:b], batch[1][a:b]) for a, b in ranges]


def ranges_of(shares: Sequence[int]) -> list[tuple[int, int]]:
    out, start = [], 0
    for share in shares:
        out.append((start, start + share))
        start += share
    return out


def star_step(
    replicas: Sequence[Replica],
    step: int,
    batches: Sequence[tuple[Tensor, Tensor]],
    shares: Callable[[int], Sequence[int]],
    scaled: bool = False,
) -> float:
    """One step of all loader batches (more than one: accumulation), each cut into as many shares as there are replicas.

    Returns the mean loss.
    """
    pieces = [cut(batch, ranges_of(shares(len(batch[0])))) for batch in batches]
    global_rows = sum(len(batch[0]) for batch in batches)
    contributions, results = [], []
    for shard, replica in enumerate(replicas):
        parts = [piece[shard] for piece in pieces]
        rows = sum(len(part[0]) for part in parts)
        contribution = Contribution(rows)
        part_rows = [len(part[0]) for part in parts]
        results.append(replica.run_shard(ShardWork(step, shard, parts, rows, global_rows, part_rows), contribution))
        assert set(contribution.buckets) == set(replica.layout.numbers)
        contributions.append(contribution)
    means = sum_shards(contributions)
    commit = commit_of(results, skip=scaled and not all_finite(means))
    for replica in replicas:
        replica.apply(cloned(means), commit)
    count = sum(r.count for r in results)
    return sum(r.loss_sum for r in results) / count if count else float("nan")


def solo_step(replica: Replica, step: int, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    rows = [len(batch[0]) for batch in batches]
    result = replica.run_shard(ShardWork(step, 0, list(batches), sum(rows), sum(rows), rows))
    replica.apply(None, commit_of([result], skip=not result.finite))
    return result.loss_sum / result.count


def spec(**changes: object) -> RunSpec:
    fields: dict[str, object] = {
        "model": Factory("Net"),
        "criterion": Factory("CrossEntropyLoss"),
        "step": None,
        "optimizer": Factory("SGD", {"lr": 0.1}),
        "scheduler": None,
    }
    return RunSpec(**{**fields, **changes})  # type: ignore[arg-type]


def resolver(**names: object) -> Callable[[str], object]:
    def resolve(name: str) -> object:
        if name not in names:
            raise LookupError(f"no shared cell defines {name!r}")
        return names[name]

    return resolve


CPU = torch.device("cpu")


def replica(net: object, run: RunSpec, device: torch.device = CPU, **names: object) -> Replica:
    return Replica(run, resolver(Net=net, **names), device)
