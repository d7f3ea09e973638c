"""What an exchange tells of parameters that take gradients again, and what steps that are only counted lead to."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from guava_nb.config.mesh import Mesh
from guava_nb.errors import TrainingError
from guava_nb.sync.exchange import StepExchange
from guava_nb.sync.step_in_flight import StepInFlight
from guava_nb.sync.step_machine import ShardTask, StepMachine


class Switches:
    """An exchange of two workers, as far as it compares switches of requires_grad."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._switches: dict[str, Any] = {}
        self._replicas = SimpleNamespace(kind_of=lambda rank: "cpu")
        self._job = SimpleNamespace(cluster=SimpleNamespace(name=lambda rank: f"w{rank}", notice=self.told.append))

    def step(self, number: int, generation: int, *frozen: set[str]) -> None:
        in_flight: Any = SimpleNamespace(frozen={}, machine=SimpleNamespace(step=number, generation=generation))
        for rank, names in enumerate(frozen):
            StepExchange._compare_switches(self, in_flight, rank, frozenset(names))  # type: ignore[arg-type]


def test_what_is_trained_again_by_new_models_is_told() -> None:
    run = Switches()
    run.step(0, 1, set(), set())
    run.step(1, 1, {"a.weight", "b.weight"}, {"a.weight", "b.weight"})
    run.step(2, 1, {"a.weight"}, {"a.weight"})  # the user's schedule
    run.step(3, 2, {"a.weight"}, {"a.weight"})  # a membership that changed nothing
    assert run.told == []
    run.step(4, 3, set(), set())
    assert len(run.told) == 1 and run.told[0].startswith("a.weight took no gradient") and "step 5" in run.told[0]
    run.step(5, 3, set(), set())
    assert len(run.told) == 1


def test_workers_that_differ_within_a_step_are_refused() -> None:
    with pytest.raises(TrainingError, match="leaves parameter 'a' without gradients on w1"):
        Switches().step(0, 1, set(), {"a"})


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
