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
from guava_nb.wire_formats.top_k import TopK

__all__ = ["OuterLoop", "Parity", "evaluate", "largest_difference", "measure_parity", "train_local", "train_plain"]

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


class OuterLoop:
    """The end of a round, as the papers have it: the model's parameters and each worker's pseudo-gradient become new ones."""

    def __init__(self, model: nn.Module, method: str, workers: int, step: float = 1.0) -> None:
        """Prepare for "average" (arXiv 1805.09767), "nesterov" (2311.08105), "sparse" (SparseLoCo, 2508.15706), or "partial".

        `step` is the length of the outer step of the last one, with several workers.
        """
        is_nesterov, self._method = method == "nesterov", method
        self._model, self._owed = model, [torch.zeros(())] * (workers + 1)  # the last is the hub's
        self._optimizer = torch.optim.SGD(
            model.parameters(),
            lr=0.7 if is_nesterov else step if workers > 1 else 1.0,
            momentum=0.9 if is_nesterov else 0.0,
            nesterov=is_nesterov,
        )

    @torch.no_grad()
    def step(self, replicas: Sequence[nn.Module], seen: Sequence[int]) -> None:
        """Take the step; `seen` are the samples of each replica in the round."""
        begun = _flat(self._model)
        ways = [begun - _flat(one) for one in replicas]
        parts = {worker: rows / sum(seen) for worker, rows in enumerate(seen) if rows}
        if self._method == "partial" and len(replicas) > 1:
            mean = self._mean_of_senders({worker: ways[worker] for worker in parts})
        elif self._method == "sparse" and len(replicas) > 1:
            mean = self._sparse_sum({worker: ways[worker] * part for worker, part in parts.items()})
        else:
            mean = torch.stack([ways[worker] * part for worker, part in parts.items()]).sum(0)
        for parameter, gradient in zip(*_parts(self._model, mean), strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for worker, one in enumerate(replicas):
            one.load_state_dict(self._model.state_dict())
            if self._method == "partial":  # each goes on with what it did not send of its pseudo-gradient
                _put(one, _flat(one) - self._owed[worker])

    def _mean_of_senders(self, ways: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return of each element the mean of the workers that send it; what was kept so far is in their ways."""
        arrived = torch.stack([self._sent(TopK(64, 4096, bits=2), worker, way, 0.0) for worker, way in ways.items()])
        return arrived.sum(0) / (arrived != 0).sum(0).clamp(min=1)

    def _sparse_sum(self, ways: dict[int, torch.Tensor]) -> torch.Tensor:
        """Return what arrives: of two workers the messages, of more the sum, made sparse once more."""
        one = TopK(64, 4096, bits=2)
        total = torch.stack([self._sent(one, worker, way, 0.95) for worker, way in ways.items()]).sum(0)
        return total if len(ways) <= 2 else self._sent(one, -1, total, 1.0)

    def _sent(self, wire_format: TopK, sender: int, flat: torch.Tensor, decay: float) -> torch.Tensor:
        flat = flat + self._owed[sender] * decay
        arrived = wire_format.decode(wire_format.encode(flat), flat.numel(), flat.dtype)
        self._owed[sender] = flat - arrived
        return arrived


@torch.no_grad()
def _flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one tensor, the last one first: so do gradients become ready, and so they travel."""
    return nn.utils.parameters_to_vector(reversed(list(model.parameters())))


def _parts(model: nn.Module, flat: torch.Tensor) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    parameters = list(reversed(list(model.parameters())))
    parts = flat.split([one.numel() for one in parameters])  # type: ignore[no-untyped-call]
    return parameters, [part.view_as(one) for one, part in zip(parameters, parts, strict=True)]


@torch.no_grad()
def _put(model: nn.Module, flat: torch.Tensor) -> None:
    for parameter, value in zip(*_parts(model, flat), strict=True):
        parameter.copy_(value)


def train_local(
    model: nn.Module,
    loader: Batches,
    num_epochs: int,
    learning_rate: float,
    shares: Sequence[float],
    every: int,
    outer: OuterLoop,
    delay: int = 0,
) -> list[float]:
    """Train in place by rounds of local steps, each of which ends with a step of `outer`.

    All workers take their steps in turn, each with a row range of each batch.

    Args:
        shares: relative share of each worker.
        every: local steps of a round; an epoch ends one.
        delay: local steps of the next round that begin where this one ended at each worker (arXiv 2006.00441); what they came to
            is added to the common weights after them.

    Returns:
        The mean loss of every round.
    """
    replicas = [copy.deepcopy(model) for _ in shares]
    inner = [torch.optim.Adam(replica.parameters(), lr=learning_rate) for replica in replicas]
    criterion = nn.CrossEntropyLoss(reduction="sum")
    losses, delay = [], delay if len(replicas) > 1 else 0
    sent: dict[int, torch.Tensor] = {}  # where the round before ended, by worker
    for _ in range(num_epochs):
        batches = iter(loader)
        while batch := list(itertools.islice(batches, every)):
            loss_sum, seen, common = 0.0, [0] * len(replicas), [_flat(one) for one in replicas]
            for worker, end in sent.items():
                _put(replicas[worker], end)
            for number, (images, labels) in enumerate(batch):
                for worker, end in sent.items() if number == min(delay, len(batch) - 1) else ():
                    _put(replicas[worker], common[worker] + _flat(replicas[worker]) - end)
                for worker, (first, last) in enumerate(share_ranges(len(labels), shares)):
                    if last > first:
                        inner[worker].zero_grad()
                        loss = criterion(replicas[worker](images[first:last]), labels[first:last])
                        (loss / (last - first)).backward()
                        inner[worker].step()
                        loss_sum, seen[worker] = loss_sum + float(loss.detach()), seen[worker] + last - first
            losses.append(loss_sum / sum(seen))
            sent = {worker: _flat(replicas[worker]) for worker, rows in enumerate(seen) if rows and delay}
            outer.step(replicas, seen)
    return losses


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
