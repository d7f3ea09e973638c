"""What a module that will be sharded hands out."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guava_nb.nested import leaves
from guava_nb.parallel.replicas.unused_parameters import UnusedParameters

Pair = namedtuple("Pair", "first second")


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
def test_no_output_with_a_gradient_is_a_view(form: str) -> None:
    plain = Handing(FORMS[form])
    watched = Handing(FORMS[form])
    watched.load_state_dict(plain.state_dict())
    UnusedParameters().watch(watched, {"inner.weight": "inner.weight", "inner.bias": "inner.bias"})
    x = torch.randn(2, 5, 3)
    theirs, ours = plain(x), watched(x)
    assert type(ours) is type(theirs)
    assert any(t._base is not None for t in leaves(theirs) if t.requires_grad)
    assert not any(t._base is not None for t in leaves(ours) if t.requires_grad)
    for a, b in zip(leaves(theirs), leaves(ours), strict=True):
        assert torch.equal(a, b)


def test_what_is_no_view_is_not_copied() -> None:
    module = nn.Linear(3, 4)
    handed: list[Tensor] = []
    module.register_forward_hook(lambda m, args, output: handed.append(output))
    UnusedParameters().watch(module, {"weight": "weight", "bias": "bias"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module(torch.ones(2, 3)) is handed[0]
        with torch.no_grad():
            assert module(torch.ones(2, 5, 3)) is handed[1]
