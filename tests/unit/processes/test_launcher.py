from __future__ import annotations

import pytest

from guava_nb.processes.launcher import WorkerHandle
from guava_nb.status import OwnFigures
from guava_nb.worker.process import MARK


@pytest.mark.parametrize(
    "record",
    [
        "{}", "[]", "7", "not json", '{"state": "ready"}', '{"state": 1, "step": [], "detail": 0}', '{"figures": 1}',
        '{"figures": {"samples": "many"}}',
    ],
)  # fmt: skip
def test_a_state_that_is_none_does_not_end_the_watch(record: str) -> None:
    """A watcher that dies reads no more, and a worker that prints then waits for ever."""
    handle = WorkerHandle.__new__(WorkerHandle)
    handle._last, handle._name, handle._partial = {"state": "working", "step": 3, "detail": "w1"}, "w1", ""
    handle._figures = OwnFigures(samples=3)
    handle._listens = object()  # of whose first lines the code is read
    handle._on_line(MARK + record, None)
    assert handle._last == {"state": "working", "step": 3, "detail": "w1"} and handle._name == "w1"
    assert handle._figures == OwnFigures(samples=3)
    handle._on_line(MARK + '{"figures": {"samples": 4, "step_s": 0.5, "busy": null}}', None)
    assert handle._figures == OwnFigures(samples=4, step_s=0.5)
