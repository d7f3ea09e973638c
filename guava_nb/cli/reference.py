"""The oracle of `guava demo --check`: the same training as a plain PyTorch loop in one process.

Knows nothing of workers. A reader who doubts the demo can check this file instead of the rooms that train.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from guava_nb.data.split import share_ranges

__all__ = ["Parity", "evaluate", "largest_difference", "measure_parity", "train_local", "train_plain"]

Batches = Iterable[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Parity:
    """How far two trainings are apart.

    Attributes:
        max_abs_diff: largest difference of any final weight.
        max_loss_diff: largest difference of the training loss at any step.
        precision: "fp64" is judged by its weights, "fp32" by its losses: Adam amplifies rounding in weights.
        steps: optimizer steps compared.
    """

    max_abs_diff: float
    max_loss_diff: float
    precision: str
    steps: int

    @property
    def limit(self) -> float:
        """What the judged difference may be."""
        return 1e-9 if self.precision == "fp64" else 1e-5

    @property
    def ok(self) -> bool:
        """Whether the two trainings count as equal."""
        return (self.max_abs_diff if self.precision == "fp64" else self.max_loss_diff) <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """For the report."""
        return {
            "max_abs_diff": self.max_abs_diff,
            "max_loss_diff": self.max_loss_diff,
            "precision": self.precision,
            "steps": self.steps,
            "limit": self.limit,
            "ok": self.ok,
        }


def train_plain(model: nn.Module, loader: Batches, num_epochs: int, learning_rate: float) -> list[float]:
    """Train in place with Adam and cross-entropy; return the mean loss of every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    criterion = nn.CrossEntropyLoss()
    losses = []
    model.train()
    for images, labels in itertools.chain.from_iterable(itertools.repeat(loader, num_epochs)):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_local(
    model: nn.Module, loader: Batches, num_epochs: int, learning_rate: float, shares: Sequence[float], every: int
) -> list[float]:
    """Train in place by local SGD (arXiv 1805.09767): rounds that end with the mean of the weights.

    All workers take their steps in turn, each with a row range of each batch.

    Args:
        shares: relative share of each worker.
        every: local steps of a round; an epoch ends one.

    Returns:
        The mean loss of every round.
    """
    replicas = [copy.deepcopy(model) for _ in shares]
    inner = [torch.optim.Adam(replica.parameters(), lr=learning_rate) for replica in replicas]
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    losses = []
    for _ in range(num_epochs):
        batches = iter(loader)
        while batch := list(itertools.islice(batches, every)):
            loss_sum, seen = 0.0, [0] * len(replicas)
            for images, labels in batch:
                for worker, (first, last) in enumerate(share_ranges(len(labels), shares)):
                    if last > first:
                        inner[worker].zero_grad()
                        loss = criterion(replicas[worker](images[first:last]), labels[first:last])
                        (loss / (last - first)).backward()
                        inner[worker].step()
                        loss_sum, seen[worker] = loss_sum + float(loss.detach()), seen[worker] + last - first
            losses.append(loss_sum / sum(seen))
            _take_outer_step(model, outer, replicas, seen)
    return losses


@torch.no_grad()
def _take_outer_step(
    model: nn.Module, outer: torch.optim.Optimizer, replicas: Sequence[nn.Module], seen: Sequence[int]
) -> None:
    ends = zip(*(replica.parameters() for replica in replicas), strict=True)
    for start, of_workers in zip(model.parameters(), ends, strict=True):
        moved = [(start - end) * (rows / sum(seen)) for end, rows in zip(of_workers, seen, strict=True)]
        start.grad = torch.stack(moved).sum(0)
    outer.step()
    for replica in replicas:
        replica.load_state_dict(model.state_dict())


@torch.no_grad()
def evaluate(model: nn.Module, loader: Batches) -> tuple[float, float, int]:
    """Return mean loss, accuracy (0 to 1) and number of samples."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    loss_sum, correct, samples = 0.0, 0, 0
    model.eval()
    for images, labels in loader:
        scores = model(images)
        loss_sum += float(criterion(scores, labels))
        correct += int((scores.argmax(dim=1) == labels).sum())
        samples += len(labels)
    return loss_sum / samples, correct / samples, samples


def measure_parity(
    trained: nn.Module, losses: Sequence[float], plain: nn.Module, plain_losses: Sequence[float], precision: str
) -> Parity:
    """Compare a training with the plain one of the same batches.

    Raises:
        ValueError: the two did not make the same number of steps.
    """
    loss_diff = max(abs(ours - theirs) for ours, theirs in zip(losses, plain_losses, strict=True))
    weight_diff = largest_difference(trained.state_dict(), plain.state_dict())
    return Parity(weight_diff, loss_diff, precision, len(plain_losses))


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two state dicts of the same names, judged in double precision."""
    assert ours.keys() == theirs.keys(), "both models come from the same factory"
    return max(
        float((ours[name].to(torch.complex128) - theirs[name].to(torch.complex128)).abs().max()) for name in ours
    )
