from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from guava_nb.processes.local_workers import WorkerHandle, lines_of
from guava_nb.processes.nursery import worker_environment
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
    handle._vitals = SimpleNamespace(heard=lambda: None)
    handle._listens = object()  # of whose first lines the code is read
    handle._on_line(MARK + record, None)
    assert handle._last == {"state": "working", "step": 3, "detail": "w1"} and handle._name == "w1"
    assert handle._figures == OwnFigures(samples=3)
    handle._on_line(MARK + '{"figures": {"samples": 4, "step_s": 0.5, "busy": null}}', None)
    assert handle._figures == OwnFigures(samples=4, step_s=0.5)


def flooded(data: bytes) -> list[str]:
    return [line for lines in lines_of(io.TextIOWrapper(io.BytesIO(data))) for line in lines]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\r\nc", ["a", "b", "c"]),
        (b"1 %\r2 %\r3 %\ndone\n", ["3 %", "done"]),
        (b"1 %\r2 %\r", ["2 %"]),
        (b"\n\n", ["", ""]),
        ("nä\n".encode(), ["nä"]),
        (b"", []),
    ],
)
def test_lines_come_as_on_a_terminal(data: bytes, lines: list[str]) -> None:
    assert flooded(data) == lines


def test_a_flood_without_an_end_of_line_is_read_in_bounded_memory() -> None:
    assert len(flooded(b"x" * (8 << 20))[0]) == 64 << 10
    assert len(flooded(b"x\r" * (1 << 20))) <= 64


def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    made = worker_environment(None)
    assert made["GOMP_SPINCOUNT"] == "1000" and "OMP_NUM_THREADS" not in made
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    made = worker_environment(None)
    assert "GOMP_SPINCOUNT" not in made and made["OMP_NUM_THREADS"] == "7"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert worker_environment(None)["GOMP_SPINCOUNT"] == "5"
