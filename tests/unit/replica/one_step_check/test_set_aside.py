"""What a check may use and must leave as it was."""

import torch
from torch import nn

from guava_nb.replica.one_step_check.set_aside import copying, set_aside


def test_gradients_and_buffers_go_back_where_the_model_was_used() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model(torch.randn(4, 2)).sum().backward()
    gradients, mean = [p.grad for p in model.parameters()], model[1].running_mean.clone()
    with set_aside(model) as is_touched:
        assert not is_touched()
        model(torch.randn(4, 2)).sum().backward()
        assert is_touched()
    assert all(p.grad is one for p, one in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(model[1].running_mean, mean)


def test_modules_are_found_as_copies_and_all_else_as_it_is() -> None:
    module = nn.Linear(2, 2)
    assert copying(lambda name: module)("loss") is not module
    assert copying(lambda name: len)("step") is len
