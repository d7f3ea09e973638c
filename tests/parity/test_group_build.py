"""How often a rank calls the user's factory: once for its first group, and once more for each group after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from guava_nb.protocol.messages import Factory
from guava_nb.replica.group_replica import GroupReplica
from guava_nb.spec.cells import resolve
from tests.support.coupled import Case, Encoder
from tests.support.parity_group import GroupPool, RankFailed, group_pool

HERE = __name__
_calls: list[int] = []


@pytest.fixture(scope="module")
def pool() -> Iterator[GroupPool]:
    with group_pool(2) as made:
        yield made


def counted() -> nn.Module:
    _calls.append(1)
    return Encoder()


class Own(torch.optim.SGD):
    """An optimizer of a user's own, which may change what it is given."""


class Hooking(torch.optim.SGD):
    """An optimizer of a user's own, which leaves a hook on each parameter."""

    def __init__(self, params: Any, **args: Any) -> None:
        params = list(params)
        super().__init__(params, **args)
        for parameter in params:
            parameter.register_hook(lambda gradient: gradient * 2)


def builds(optimizer: str) -> tuple[int, int, bool]:
    spec = msgspec.structs.replace(
        Case("info_nce", 2).spec, model=Factory(f"{HERE}:counted"), optimizer=Factory(optimizer, {"lr": 0.1})
    )
    _calls.clear()
    replica = GroupReplica(spec, lambda name: resolve(name, None), torch.device("cpu"))
    replica.wants_digest = True
    replica.spread(2)
    first, digest = len(_calls), replica.digest
    replica.spread(2)
    return first, len(_calls), digest == replica.digest


@pytest.mark.parametrize(("optimizer", "first"), [("AdamW", 1), (f"{HERE}:Own", 2)], ids=["torch's own", "a user's"])
def test_the_first_group_takes_the_model_that_was_built_to_be_checked(
    pool: GroupPool, optimizer: str, first: int
) -> None:
    assert pool.run(2, "gloo", builds, optimizer) == [(first, first + 1, True)] * 2


def test_an_optimizer_that_puts_hooks_on_gradients_is_refused_in_a_group(pool: GroupPool) -> None:
    with pytest.raises(RankFailed, match="Hooking' puts a hook on the gradient of 'temperature' when it is made"):
        pool.run(2, "gloo", builds, f"{HERE}:Hooking")
