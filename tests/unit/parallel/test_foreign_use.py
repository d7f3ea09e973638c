"""A part of a parameter that is read outside its layer is named; inside it, and where parts meet parts alone, it may be used.

What FSDP2 gathers is proven by the programs of tests/parity.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from guava_nb.errors import ConfigError
from guava_nb.parallel.foreign_use import PartsInUse, writes


class Part(nn.Linear):
    """Stands for a layer that holds a part: it has `layouts`."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.layouts = {"weight": None}


class Net(nn.Module):
    def __init__(self, extra: Callable[[Net], object] = lambda net: None) -> None:
        super().__init__()
        self.first, self.second, self.target, self.extra = Part(), nn.Linear(3, 3), Part(), extra
        self.register_buffer("mean", torch.zeros(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.extra(self)
        return self.second(self.first(x))


def run(net: Net) -> None:
    watcher = PartsInUse(net)
    with watcher.watched():
        net(torch.ones(2, 3))
    with watcher.watched():  # the second time nothing is looked at
        torch.linalg.vector_norm(net.first.weight)


@pytest.mark.parametrize(
    "extra",
    [
        lambda net: None,
        lambda net: net.second.weight.pow(2).sum(),
        lambda net: (net.first.weight.device, net.first.weight.dtype, net.first.weight.requires_grad, net.first.bias.sum()),
        lambda net: net.target.weight.lerp_(net.first.weight, 0.1),
        lambda net: net.first.weight.data.clamp_(-1, 1),
        lambda net: net.target.weight.data.mul_(0.9).add_(net.first.weight.data, alpha=0.1),
        lambda net: net.target.weight.copy_(0.9 * net.target.weight + 0.1 * net.first.weight.detach()),
    ],
)  # fmt: skip
def test_a_layer_uses_its_own_part_and_parts_may_meet_parts(extra: Callable[[Net], object]) -> None:
    run(Net(extra))


@pytest.mark.parametrize(
    ("extra", "by"),
    [
        (lambda net: net.first.weight.pow(2).sum(), "pow"),
        (lambda net: sum(p.abs().sum() for p in net.parameters()), "abs"),
        (lambda net: torch._foreach_norm(list(net.parameters())), "_foreach_norm"),
        (lambda net: functional.linear(torch.ones(2, 3), net.first.weight), "linear"),
        (lambda net: functional.linear(torch.ones(2, 3), weight=net.first.weight.data), "linear"),
        (lambda net: net.first.weight.shape[0], "shape"),
        (lambda net: net.mean.lerp_(net.first.weight.detach(), 0.1), "lerp_"),
        (lambda net: (net.first.weight * 0.5).sum(), "sum"),
    ],
)  # fmt: skip
def test_a_part_that_is_read_as_the_whole_is_named(extra: Callable[[Net], object], by: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"'first.weight' is read outside its layer, by {by}, .*\"first\": \"replicate\""
    ):
        run(Net(extra))


def test_what_an_optimizer_can_do_instead_is_said_of_an_l2_penalty_only() -> None:
    with pytest.raises(ConfigError, match=r"another mode\. An L2 penalty, for example, can be weight_decay of SGD"):
        run(Net(lambda net: net.first.weight.abs().sum()))


def test_evaluation_is_looked_at_too() -> None:
    net = Net(lambda net: None if net.training else net.first.weight.sum())
    watcher = PartsInUse(net)
    with watcher.watched():
        net(torch.ones(2, 3))
    net.eval()
    with pytest.raises(ConfigError, match="read outside its layer"), watcher.watched():
        net(torch.ones(2, 3))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_what_begins_with_a_later_pass_is_found_at_the_next_that_is_watched() -> None:
    net = Net()
    watcher = PartsInUse(net)
    for number in range(1, 9):
        if number == 5:
            net.extra = lambda net: net.first.weight.sum()
        refused = pytest.raises(ConfigError, match="read outside") if number == 8 else contextlib.nullcontext()
        with refused, watcher.watched():
            net(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("function", "words", "expected"),
    [
        (torch.Tensor.clamp_, {}, True), (torch.Tensor.__setitem__, {}, True), (torch.Tensor.__iadd__, {}, True),
        (torch._foreach_mul_, {}, True), (torch.clamp, {"out": 1}, True), (torch.Tensor.data.__set__, {}, True),
        (torch.Tensor.data.__get__, {}, False), (torch.clamp, {}, False), (torch.Tensor.requires_grad_, {}, False),
        (torch.Tensor.__invert__, {}, False), (torch.Tensor.__add__, {}, False),
    ],
)  # fmt: skip
def test_which_functions_write(function: Callable[..., object], words: dict[str, object], expected: bool) -> None:
    assert writes(function, words) is expected
