"""What is said of a value that is not finite names the rank where it came to be, or all that it may have been."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.config.mesh import Mesh
from guava_nb.sync.group_exchange import GroupExchange
from guava_nb.sync.step_machine import Halt, ShardTask


@pytest.mark.parametrize(
    ("mesh", "halt", "loss", "said"),
    [
        (Mesh(2, 1, 1), Halt(1, 1, None), float("nan"), "on w1"),
        (Mesh(1, 2, 1), Halt(1, 1, None), float("nan"), "on w1, or on a stage before it (w0)"),
        (Mesh(1, 2, 1), Halt(0, 0, None), 1.0, "on w0"),
        (Mesh(2, 1, 1), Halt(0, 0, None, (1,)), 1.0,
         "on w0 and w1 alike (what they computed was summed before, so which of them had it first cannot be told)"),
    ],
)  # fmt: skip
def test_the_words_are_true_of_sums_and_stages(mesh: Mesh, halt: Halt, loss: float, said: str) -> None:
    exchange: Any = SimpleNamespace(
        _job=SimpleNamespace(cluster=SimpleNamespace(name="w{}".format)), _replicas=SimpleNamespace(mesh=mesh)
    )
    machine = SimpleNamespace(
        report=lambda shard: SimpleNamespace(loss_sum=loss, count=1.0),
        tasks=[ShardTask(k, 2, k) for k in range(mesh.size)],
    )
    in_flight: Any = SimpleNamespace(machine=machine)
    assert GroupExchange._origin(exchange, in_flight, halt) == said
