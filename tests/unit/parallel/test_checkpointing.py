"""Activation checkpointing changes no number, of buffers that a block moves neither."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from guava_nb.parallel.checkpointing import checkpoint_activations


class Block(nn.Module):
    """Counts its forwards, in place and not, keeps a queue, and its forward depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.long))
        self.register_buffer("queue", torch.zeros(300, 4))
        self.register_buffer("fixed", torch.ones(300, 4))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 / (1.0 + self.calls + self.replaced + self.times)
        seen = (self.queue.clone() * self.fixed).mean(0)
        self.calls += 1
        self.times += 1
        self.replaced = self.replaced + 1
        y = torch.tanh(self.norm(self.layer(x)) * scale + seen)
        with torch.no_grad():
            self.queue[: len(x)] = y + self.queue[0]
        return y


@pytest.mark.parametrize("uses", [1, 2])  # of each block in a step
def test_what_a_block_keeps_in_buffers_moves_once(uses: int) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(Block(), Block()).double()
    again = copy.deepcopy(plain)
    assert checkpoint_activations(again, ["*"]) == ["0", "1"]
    for step in range(4):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for model in (plain, again):
            model.zero_grad()
            y = x
            for _ in range(uses):
                y = model(y)
            y.square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad
        for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), name
        for name, value in plain.state_dict().items():
            assert torch.equal(value, again.state_dict()[name]), name
        assert plain[0].times == again[0].times
