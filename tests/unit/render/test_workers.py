"""Tables of workers."""

from __future__ import annotations

from dataclasses import replace

from guava_nb.render import (
    run_view,
    session_view,
    to_text,
)
from guava_nb.render.workers import by_name, glance, workers_at_the_end
from tests.unit.render.status_cases import RUN, STATUS, WORKER


def test_every_worker_has_one_row_without_columns_that_nobody_has() -> None:
    gpu = replace(
        WORKER, name="gpu", device_name="NVIDIA A100-SXM4-80GB", busy=0.98, memory_used_bytes=61_200_000_000,
        memory_bytes=85_900_000_000, power_w=312.4, joules=45_678.0, rate_out_bytes_s=1_230_000.0,
        rate_in_bytes_s=480_000.0, round_trip_s=0.041, worker_waits=0.04, data_waits=0.3,
    )  # fmt: skip
    cpu = replace(WORKER, name="cpu", device="cpu", device_name="Intel(R) Xeon(R) CPU @ 2.50GHz", busy=0.5)
    both = glance([gpu, cpu])
    assert both.columns == (
        "worker", "device", "state", "share", "step time", "GPU busy", "GPU memory", "CPU busy", "power", "energy",
        "link to", "link from", "round trip", "waits",
    )  # fmt: skip
    assert both.rows == (
        ("gpu", "cuda:0 A100-SXM4-80GB", "working", "50 %", "12.3 ms", "98 %", "61.2/85.9 GB", "-", "312 W", "45.7 kJ",
         "1.23 MB/s", "480 kB/s", "41 ms", "4 %"),
        ("cpu", "cpu Intel Xeon", "working", "50 %", "12.3 ms", "-", "-", "50 %", "-", "-", "-", "-", "-", "-"),
    )  # fmt: skip
    assert glance([cpu]).columns == ("worker", "device", "state", "share", "step time", "CPU busy")
    machine = replace(cpu, memory_used_bytes=5_100_000_000, memory_bytes=25_300_000_000)
    assert glance([machine]).columns[-1] == "RAM in use" and glance([machine]).rows[0][-1] == "5.1/25.3 GB"
    gone, away = (replace(gpu, state=state) for state in ("lost", "suspect"))
    told = glance([gpu, gone, away])
    assert told.faint == {1}
    for row in told.rows[1:]:
        assert row[8] == "45.7 kJ" and set(row[4:8] + row[9:]) == {"-"}, "what was measured then says nothing of now"


def test_what_is_said_of_a_worker_is_not_said_twice() -> None:
    lost = replace(WORKER, state="lost", detail="its process ended")
    assert to_text(run_view(RUN, [lost], ["gpu <1> was lost: its process ended"])).count("its process ended") == 1
    assert "gpu <1>: its process ended" in to_text(run_view(RUN, [lost]))


def test_workers_that_left_before_the_run_are_not_shown_and_gone_ones_have_no_device() -> None:
    fresh = replace(WORKER, name="vm", memory_bytes=1000, busy=0.5)
    idle = replace(fresh, state="left", detail="an old one", samples=0, out_bytes=0)
    worked = replace(fresh, name="other", state="left", detail="did a part")
    shown = to_text(session_view(replace(STATUS, workers=(idle, worked, fresh))))
    assert "an old one" not in shown and "did a part" in shown and shown.count("50 %") == 3, shown
    before = to_text(
        session_view(replace(STATUS, run=None, workers=(worked, replace(fresh, state="lost", detail="lost it"))))
    )
    assert "did a part" not in before and "lost it" in before


def test_a_worker_that_was_lost_and_came_back_is_one_row_with_all_it_did() -> None:
    lost = replace(WORKER, state="lost", samples=100, joules=5.0, out_bytes=10, in_bytes=1)
    back = replace(WORKER, rank=3, state="working", samples=20, joules=2.0, out_bytes=5, in_bytes=1)
    for workers in ((lost, back), (back, lost)):
        (row,) = by_name(workers)
        assert (row.state, row.samples, row.joules, row.out_bytes, row.in_bytes) == ("working", 120, 7.0, 15, 2)
    assert by_name((lost, lost))[0].state == "lost"
    table = workers_at_the_end(by_name((lost, back, replace(lost, name="other"))))
    assert [row[0] for row in table.rows] == [WORKER.name, "other"]
