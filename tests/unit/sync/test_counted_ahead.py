"""Steps that workers applied by themselves and whose reports are lost: counted, and no order to others."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

from guava_nb.config.mesh import Mesh
from guava_nb.sync.exchange import StepExchange
from guava_nb.sync.step_in_flight import StepInFlight
from guava_nb.sync.step_machine import ShardTask, StepMachine


def test_a_step_that_is_only_counted_is_no_order_to_a_rank_that_has_not_applied_it() -> None:
    machine = StepMachine(3, 1, [ShardTask(0, 4, 0), ShardTask(1, 4, 1)], (), mesh=Mesh(2, 1, 1), voted=True)
    sent: list[Any] = []
    losses: list[float] = []
    exchange: Any = SimpleNamespace(
        in_flight={3: StepInFlight(machine, 0, (0, 1), [], 1)},
        _job=SimpleNamespace(cluster=SimpleNamespace(send_all=lambda ranks, message: sent.append(message))),
        _replicas=SimpleNamespace(run_id="run-1", at={0: 3, 1: 2}, step=2),
        _credit=SimpleNamespace(worked=lambda *shard: None, committed=lambda now: None),
        _on_commit=lambda in_flight, commit, loss_sum, count: losses.append(loss_sum),
    )
    exchange._commit = functools.partial(StepExchange._commit, exchange)
    StepExchange._count_ahead(exchange, 3)
    assert sent == [] and exchange._replicas.step == 3 and exchange.in_flight == {}
    assert len(losses) == 1 and math.isnan(losses[0])
