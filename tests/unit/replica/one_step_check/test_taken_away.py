"""Causes that are taken away come back, and what has none is told."""

import pytest
import torch
from torch import nn

from guava_nb.replica.one_step_check.taken_away import WithoutFrequencies, fixed_statistics


def gradient(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer.zero_grad()
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.clone()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_count_no_index_meanwhile(kind: type[nn.Module]) -> None:
    x, plain, scaled = torch.tensor([[0, 0, 1]]), kind(3, 2), kind(3, 2, scale_grad_by_freq=True)
    wanted, before = gradient(plain, x), gradient(scaled, x)
    with WithoutFrequencies() as evenly:
        assert torch.equal(gradient(scaled, x), wanted) and evenly.found
    assert torch.equal(gradient(scaled, x), before) and not torch.equal(before, wanted)
    with WithoutFrequencies() as evenly:
        assert torch.equal(gradient(plain, x), wanted) and not evenly.found


def test_batch_norms_use_fixed_statistics_meanwhile() -> None:
    x, norms = torch.randn(5, 2), [nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)]
    before = [norm(x) for norm in norms]
    with fixed_statistics(norms, x) as some:
        assert some and all(torch.allclose(norm(x)[:2], norm(x[:2])) for norm in norms)
    assert all(torch.allclose(norm(x), value) for norm, value in zip(norms, before, strict=True))
    with fixed_statistics([], x) as some:
        assert not some
