"""A stand-in's one row goes through batch norms, and leaves nothing in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from guava_nb.parallel.replicas.batch_norm import taking_one_row


@pytest.mark.parametrize("settings", [{}, {"track_running_stats": False}, {"affine": False, "momentum": None}])
def test_one_row_passes_batch_norms_and_leaves_them_as_they_were(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    asleep = nn.BatchNorm1d(4, track_running_stats=False).eval()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **settings), asleep, nn.InstanceNorm1d(4)).double()  # type: ignore[arg-type]
    row = torch.randn(1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model[:3](row)
    before = {name: value.clone() for name, value in model[:3].state_dict().items()}
    with pytest.raises(RuntimeError, match="inside"), taking_one_row(model):
        model[:3](row).sum().backward()
        raise RuntimeError("inside")
    assert all(torch.equal(value, before[name]) for name, value in model[:3].state_dict().items())
    assert before.keys() == model[:3].state_dict().keys()
    assert [module.training for module in model] == [True, True, False, True]
    assert model[0].weight.grad is not None
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model[:3](row)
