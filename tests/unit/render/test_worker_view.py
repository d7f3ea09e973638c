"""A worker as it sees itself."""

from __future__ import annotations

from dataclasses import replace

from guava_nb.render import (
    to_text,
    worker_view,
)
from guava_nb.status import OwnFigures
from tests.support.fake_session import FakeWorkerStatus


def test_a_worker_s_own_figures_and_nothing_that_was_not_measured() -> None:
    figures = OwnFigures(
        "Tesla T4", 2602, 0.33, 0.0179, 0.04, 0.98, 5_100_000_000, 15_800_000_000, 71.3, 1234.0, 479_600.0, 1_200_000.0,
        0.00147, 1_500_000, 1_200_000,
    )  # fmt: skip
    worker = FakeWorkerStatus("working", "w", 120, "cuda:0", "127.0.0.1:1", figures=figures)
    assert to_text(worker_view(worker)).splitlines() == [
        "worker w: working on cuda:0 for 127.0.0.1:1, step 120",
        "  work    2602 samples, 33 % of each batch, 17.9 ms a step, waits for data 4 % of the time",
        "  device  cuda:0 Tesla T4, 98 % busy, 5.1/15.8 GB of memory in use, 71.3 W",
        "  link    at least 480 kB/s up, 1.2 MB/s arriving, round trip 1.47 ms",
        "  energy  1.23 kJ in this run",
        "  wire    1.5 MB sent, 1.2 MB received",
    ]
    on_cpu = replace(worker, device="cpu", figures=replace(figures, threads=2, device_name="EPYC", power_w=None))
    assert (
        "  device  cpu EPYC, 2 threads, 98 % busy, 5.1/15.8 GB of RAM in use"
        in to_text(worker_view(on_cpu)).splitlines()
    )
    away, ended = (to_text(worker_view(replace(worker, state=state))) for state in ("reconnecting", "left"))
    assert "link" not in away and "busy" in away
    assert "link" not in ended and "busy" not in ended and "2602 samples" in ended and "1.23 kJ" in ended
    assert "0" not in to_text(worker_view(replace(worker, figures=OwnFigures(), step=1, address="a"))).replace(
        "cuda:0", ""
    )


def test_worker() -> None:
    shown = worker_view(FakeWorkerStatus("joining", "w", None, "cpu", "127.0.0.1:1", "the hub is away"))
    assert to_text(shown) == "worker w: joining on cpu for 127.0.0.1:1, no step yet\nthe hub is away"
