"""What a module that is sharded hands out, and where its calls stand in a backward; with FSDP2's hooks played by others."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from guava_nb.nested import leaves
from guava_nb.parallel.replicas.call_order import Habit
from guava_nb.parallel.replicas.shared_units import SharedUnits

Pair = namedtuple("Pair", "first second")


@pytest.fixture(scope="module")
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Hooks:
    """As FSDP2: a call in forward, one when its outputs get gradients, one when its inputs have theirs."""

    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def shard(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.seen.append(f"gather {self.name}")
        for tensor in leaves(kwargs) if torch.is_grad_enabled() else ():
            tensor.register_hook(lambda gradient: self.seen.append(f"reduce {self.name}"))
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        for tensor in leaves(output):
            if tensor.requires_grad and not tensor.ndim:
                tensor.register_hook(lambda gradient: self.seen.append(f"again {self.name}"))
        return output


def units_of(group: dist.ProcessGroup, **modules: nn.Module) -> tuple[SharedUnits, list[str]]:
    units, seen = SharedUnits(group, torch.device("cpu"), Habit()), []
    for name, module in modules.items():
        own = {local: f"{name}.{local}" for local, _ in module.named_parameters()}
        units.add(module, name, own, lambda: Hooks(seen, name).shard(module))  # noqa: B023 - called at once
    return units, seen


class Handing(nn.Module):
    """Hands out a view, a tensor of its own and what has no gradient, in some form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.inner, self.form = nn.Linear(3, 4), form

    def forward(self, x: Tensor) -> Any:
        whole = self.inner(x)
        return self.form(whole.flatten(), whole * 2, x.flatten())


FORMS = {
    "tensor": lambda view, own, flat: view,
    "tuple": lambda view, own, flat: (view, own, flat),
    "list": lambda view, own, flat: [view, [own, flat]],
    "named": lambda view, own, flat: Pair(view, (own, 3)),
    "dict": lambda view, own, flat: {"a": view, "b": {"c": view}, "n": None},
}


@pytest.mark.parametrize("form", FORMS)
def test_no_output_with_a_gradient_is_a_view(alone: dist.ProcessGroup, form: str) -> None:
    plain = Handing(FORMS[form])
    watched = Handing(FORMS[form])
    watched.load_state_dict(plain.state_dict())
    units_of(alone, block=watched)
    x = torch.randn(2, 5, 3)
    theirs, ours = plain(x), watched(x)
    assert type(ours) is type(theirs)
    assert any(t._base is not None for t in leaves(theirs) if t.requires_grad)
    assert not any(t._base is not None for t in leaves(ours) if t.requires_grad)
    for a, b in zip(leaves(theirs), leaves(ours), strict=True):
        assert torch.equal(a, b)


def test_what_is_no_view_is_not_copied(alone: dist.ProcessGroup) -> None:
    module = nn.Linear(3, 4)
    handed: list[Tensor] = []
    module.register_forward_hook(lambda m, args, output: handed.append(output))
    units_of(alone, block=module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module(torch.ones(2, 3)) is handed[0]
        with torch.no_grad():
            assert module(torch.ones(2, 5, 3)) is handed[1]


def test_backward_takes_the_calls_in_reverse_whatever_becomes_of_their_outputs(alone: dist.ProcessGroup) -> None:
    """The second block's output is thrown away, the third has inputs without gradient."""
    first, second, third = (nn.Linear(3, 3) for _ in range(3))
    units, seen = units_of(alone, a=first, b=second, c=third)
    x = torch.ones(2, 3)
    units.begin("training")
    h = first(x)
    second(h)
    units.end_forward((h + third(x)).sum()).backward()
    forward = ["gather a", "gather b", "gather c"]
    assert seen == [*forward, "again c", "reduce c", "again b", "reduce b", "again a", "reduce a"]
    assert units.used == {"a.weight", "a.bias", "c.weight", "c.bias"}
    assert second.weight.grad is not None and not second.weight.grad.any()
    assert torch.equal(third.weight.grad, torch.full((3, 3), 2.0))


def test_a_pass_without_a_backward_only_gathers(alone: dist.ProcessGroup) -> None:
    block = nn.Linear(3, 3)
    units, seen = units_of(alone, a=block)
    units.begin("evaluation")
    with torch.no_grad():
        block(torch.ones(2, 3))
    units.end_evaluation()
    assert seen == ["gather a"]
    assert not units.used
