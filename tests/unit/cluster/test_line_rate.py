"""Lines that are measured before a run, of which some break meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.line_rate import measure_lines
from guava_nb.protocol.messages import LineMeasured, MeasureLine
from tests.support.direct import DirectWorker, make_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


class Measured(DirectWorker):
    """Answers one question after the other with these errors, and then with rates; `away`: its answers are kept back so long."""

    def __init__(self, cluster: Cluster, name: str, errors: Sequence[str] = (), away_s: float = 0.0) -> None:
        super().__init__(cluster, name)
        self.errors, self.away_s, self.num_asked = list(errors), away_s, 0

    def take(self, message: Any, payload: memoryview) -> None:
        if not isinstance(message, MeasureLine):
            super().take(message, payload)
            return
        self.num_asked += 1
        if self.away_s:
            self.go_away()
            threading.Timer(self.away_s, self.come_back).start()
        error = self.errors.pop(0) if self.errors else ""
        self._send(LineMeasured(message.measuring_id, *((0.0, 0.0, 0) if error else (1e6, 4e6, 1000)), error=error), ())


@pytest.mark.parametrize(
    ("errors", "away_s", "asked", "told"),
    [
        ([], 0.0, 1, ""),
        ([], 0.2, 1, ""),
        (["its line broke"], 0.0, 2, ""),
        (["its line broke"] * 3, 0.0, 2, "The line to w1 is not in these rates: its line broke."),
    ],
    ids=["steady", "away for a moment", "broken once", "broken twice"],
)
def test_a_visit_that_broke_is_made_once_more_and_a_worker_that_is_away_is_waited_for(
    cluster: Cluster, errors: list[str], away_s: float, asked: int, told: str
) -> None:
    workers = [Measured(cluster, "w0").start(), Measured(cluster, "w1", errors, away_s).start()]
    cluster.wait_for(2, 10)
    sentences = measure_lines(cluster)
    assert [worker.num_asked for worker in workers] == [1, asked]  # type: ignore[attr-defined]
    assert cluster.rates(0) == (4e6, 1e6) and (cluster.rates(1) == (None, None)) == bool(told)
    assert sentences[1:] == ([told] if told else []) and ("2.0 kB" in sentences[0]) != bool(told)
