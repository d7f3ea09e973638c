"""Cross entropy on split logits against torch's, with threads for ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from guava_nb.parallel.state.shard_layout import even_bounds
from guava_nb.parallel.tensor.vocab_loss import SplitLogits


class Threads:
    """Ranks that are threads; see `tensor_ops.Ranks`."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any], sent: list[int]) -> None:
        self.rank, self.size, self._barrier, self._slots, self._sent = rank, size, barrier, slots, sent

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._meet(tensor)).sum(0)

    def collect(self, tensor: Tensor, lengths: Any) -> list[Tensor]:
        return self._meet(tensor)

    def _meet(self, tensor: Tensor) -> list[Tensor]:
        self._sent[self.rank] += tensor.numel()
        self._slots[self.rank] = tensor.detach()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


def on_ranks(whole: Tensor, size: int, loss: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor, list[int]]:
    """Return each rank's loss, the gradient put together, and how many elements each rank sent."""
    barrier, slots, sent = threading.Barrier(size, timeout=20), [None] * size, [0] * size
    losses: list[Any] = [None] * size
    parts: list[Any] = [None] * size
    bounds = [even_bounds(whole.shape[-1], size, rank) for rank in range(size)]

    def one(rank: int) -> None:
        local = whole[..., slice(*bounds[rank])].clone().requires_grad_()
        ranks = Threads(rank, size, barrier, slots, sent)
        losses[rank] = loss(SplitLogits(local, [b - a for a, b in bounds], ranks))
        losses[rank].sum().backward()
        parts[rank] = local.grad

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [value.detach() for value in losses], torch.cat(parts, dim=-1), sent


def targets(rows: int, classes: int) -> Tensor:
    y = torch.randint(0, classes, (rows,))
    y[::3] = -100
    return y


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda x, y, w: functional.cross_entropy(x, y),
    "sum": lambda x, y, w: functional.cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y, w: functional.cross_entropy(x, y, reduction="none"),
    "weights": lambda x, y, w: functional.cross_entropy(x, y, weight=w),
    "module": lambda x, y, w: torch.nn.CrossEntropyLoss(weight=w, ignore_index=1, reduction="sum")(x, y.clamp(min=0)),
    "view": lambda x, y, w: functional.cross_entropy(x[None].view(-1, x.shape[-1]), y),
    "smooth": lambda x, y, w: functional.cross_entropy(x, y, label_smoothing=0.1),
    "arithmetic": lambda x, y, w: (x * 2).logsumexp(-1).sum() - torch.softmax(x, dim=-1)[:, 0].sum(),
}


@pytest.mark.parametrize("classes", [2, 7, 12])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_torchs(name: str, size: int, classes: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(8, classes, dtype=torch.float64) * 30
    y, w = targets(8, classes), torch.rand(classes, dtype=torch.float64)
    leaf = whole.clone().requires_grad_()
    expected = LOSSES[name](leaf, y, w)
    expected.sum().backward()
    losses, gradient, _ = on_ranks(whole, size, lambda x: LOSSES[name](x, y, w))
    assert all(torch.allclose(found, expected.detach(), rtol=1e-12, atol=1e-12) for found in losses)
    assert torch.allclose(gradient, leaf.grad, rtol=1e-12, atol=1e-12)


def test_logits_do_not_travel() -> None:
    x, y = torch.randn(2, 4, 1000), targets(8, 1000)
    reshaped = (
        lambda z: functional.cross_entropy(z.view(-1, 1000), y),
        lambda z: functional.cross_entropy(z.flatten(0, 1).float(), y),
        lambda z: functional.cross_entropy(z.reshape(8, -1), y),
    )
    for loss in reshaped:
        _, _, sent = on_ranks(x, 2, loss)
        assert sent == [24, 24]


def test_looking_costs_nothing_and_whole_logits_are_gathered_once() -> None:
    seen: list[Any] = []

    def loss(x: Tensor) -> Tensor:
        seen.append((tuple(x.shape), x.ndim, x.dtype, x.size(-1), x.numel(), len(x), x.requires_grad))
        return x.argmax(-1).sum() * 0.0 + x.sum() + x[0, 0]

    _, gradient, sent = on_ranks(torch.ones(3, 4), 2, loss)
    assert set(seen) == {((3, 4), 2, torch.float32, 4, 12, 3, True)}
    assert sent == [6, 6]
    assert gradient[0, 0] == 2 and gradient.sum() == 13


def test_a_target_outside_the_classes_is_an_error() -> None:
    with pytest.raises(IndexError, match="target out of bounds: 0 to 9 of 4 classes"):
        functional.cross_entropy(
            SplitLogits(torch.ones(2, 4), [4], Threads(0, 1, threading.Barrier(1), [None], [0])), torch.tensor([0, 9])
        )
