from __future__ import annotations

from typing import Any

import torch
from torch import nn

from guava_nb.replica.user_model.wrappers import is_compiled, plain_names, unwrapped


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


def test_wrappers_of_a_model_and_of_its_parts_come_off() -> None:
    model = net()
    model[1] = torch.compile(nn.DataParallel(model[1]), backend="eager")  # type: ignore[operator]
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    plain = unwrapped(wrapped)
    assert plain is model
    assert plain.state_dict().keys() == net().state_dict().keys()
    assert unwrapped(plain) is plain


def test_what_was_compiled_is_still_called_through_its_compiler() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = net()
    expected = model(torch.ones(1, 2))
    model[1] = torch.compile(model[1], backend=backend)  # type: ignore[operator]
    assert is_compiled(model) and not is_compiled(net())
    plain = unwrapped(model)
    assert is_compiled(plain)
    assert torch.equal(plain(torch.ones(1, 2)), expected)
    assert len(graphs) == 1


def test_the_user_s_own_compiled_object_goes_on_working() -> None:
    model = net()
    outer = torch.compile(model, backend="eager")
    unwrapped(outer)
    assert torch.equal(outer(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_names_of_wrappers_in_a_state_are_left_out_where_the_model_has_none() -> None:
    own = ["a.weight", "b.weight"]
    assert plain_names({"_orig_mod.a.weight": 1, "b.module.weight": 2, "other": 3}, own) == {
        "a.weight": 1,
        "b.weight": 2,
        "other": 3,
    }
    assert plain_names({"a.weight": 1}, ["_orig_mod.a.weight"]) == {"_orig_mod.a.weight": 1}


def test_a_model_that_has_a_part_called_module_keeps_its_names() -> None:
    both = {"module.weight": 1, "weight": 2}
    assert plain_names(both, list(both)) == both
    assert plain_names({"module.weight": 1}, ["module.weight"]) == {"module.weight": 1}
