from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from guava_nb.errors import TrainingError
from guava_nb.protocol.messages import ParameterChange
from guava_nb.replica.model.forward_writes import ForwardWrites


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))


def shard(writes: ForwardWrites, change: Callable[[], object]) -> ParameterChange | None:
    writes.begin()
    with writes.watched():
        change()
    return writes.end()


def _by_hand(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def _by_data(model: Any) -> None:
    model[0].weight.data.clamp_(-0.1, 0.1)


def _by_new_data(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.clamp(-0.1, 0.1)


def _by_view(model: Any) -> None:
    model[0].weight.data[:, 0] *= 0.5


def _by_out(model: Any) -> None:
    torch.clamp(model[0].weight.detach(), -0.1, 0.1, out=model[0].weight.data)


def _by_several(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([model[0].weight.data], 0.5)


WAYS = [_by_hand, _by_data, _by_new_data, _by_view, _by_out, _by_several]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("begins", [0, 1])
def test_a_change_is_told_and_a_second_shard_of_a_step_tells_the_same(way: Callable[[Any], None], begins: int) -> None:
    model = net()
    writes = ForwardWrites(model, always=begins > 0)
    for _ in range(begins):
        assert shard(writes, lambda: None) is None and not writes
        writes.forget()
    found = shard(writes, lambda: way(model))
    assert found is not None and found.name == "0.weight" and writes
    assert found.norm == pytest.approx(float(model[0].weight.detach().norm()))
    assert shard(writes, lambda: None) == found
    writes.forget()
    assert shard(writes, lambda: None) is None


def test_what_changes_nothing_yet_is_known_from_the_first_shard_on() -> None:
    model = net()
    writes = ForwardWrites(model)
    assert shard(writes, lambda: model[0].weight.data.clamp_(-9, 9)) is None and writes
    writes.forget()
    model[0].weight.data.fill_(10.0)  # a step of the optimizer
    found = shard(writes, lambda: model[0].weight.data.clamp_(-9, 9))
    assert found is not None and found.name == "0.weight"


def test_what_is_put_back_or_takes_no_gradient_is_no_change() -> None:
    model = net()

    def there_and_back() -> None:
        kept = model[0].weight.data.clone()
        model[0].weight.data.add_(1.0)
        model[0].weight.data = kept
        model[2].weight.data.mul_(2.0)

    assert shard(ForwardWrites(model), there_and_back) is None


def test_equal_changes_are_equal_and_others_are_not() -> None:
    found = []
    for bound in (0.1, 0.1, 0.05):
        model = net()
        found.append(
            shard(ForwardWrites(model), lambda model=model, bound=bound: model[0].weight.data.clamp_(-bound, bound))
        )
    assert found[0] == found[1] != found[2]


def test_several_forwards_of_a_batch_may_repeat_a_change_and_not_go_further() -> None:
    model = net()
    model.append(nn.Embedding(4, 3, max_norm=0.1))
    writes = ForwardWrites(model)
    writes.piece()  # a validation
    writes.begin()
    for row in (0, 1):  # max_norm goes by the rows that are looked up, in one forward or in several
        model[3](torch.tensor([row]))
        _by_hand(model)
        with torch.no_grad():
            model[1].weight.copy_(nn.functional.normalize(model[1].weight, dim=1))  # the second time it only rounds
        writes.piece()
    with pytest.raises(TrainingError, match=r"each forward changes parameter '1\.weight' further"), torch.no_grad():
        for _ in range(2):
            model[1].weight.mul_(0.9)
            writes.piece()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float64])
def test_parameters_of_all_dtypes_have_figures(dtype: torch.dtype) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype))])
    change = shard(ForwardWrites(model), lambda: model[0].data.mul_(2))
    assert change is not None and change.name == "0" and change.norm == pytest.approx(2 * 2**0.5)
