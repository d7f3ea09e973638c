"""Text and HTML of the same views."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.errors import ConfigError, RemoteError
from guava_nb.render import (
    Progress,
    Table,
    View,
    error_html,
    error_text,
    redact,
    run_view,
    session_view,
    summary_view,
    to_html,
    to_text,
    worker_view,
)
from guava_nb.render.text import WIDTH, table_text
from guava_nb.render.values import (
    short_rate,
    show_bytes,
    show_bytes_pair,
    show_float,
    show_percent,
    show_rate,
    show_seconds,
)
from guava_nb.render.workers import glance
from guava_nb.status import OwnFigures, RunStatus, Status, WireBytes, WorkerStatus
from tests.support.fake_session import FakeWorkerStatus

CODE = "guava1:c2VjcmV0LXNlY3JldC1zZWNyZXQ"
WORKER = WorkerStatus("gpu <1>", 0, "working", "cuda:0", "T4 & co", "host", 0.5, 0.0123, None, None, 320, 1_000_000, 12)
RUN = RunStatus(
    "r", "training", "data", 1, 3, 5, 69, 320, 12.3, 500.0, 0.25, ((1, 2.3), (5, 0.25)), ((5, 0.3, 0.91),), 1e-3,
    "waits for <worker>", WireBytes(10_000_000, 1_000_000, 5_000_000, 100, 2_000),
)  # fmt: skip
STATUS = Status("open", "127.0.0.1:4242", "data", 2, (WORKER,), RUN, ("model",), ("a note",))


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_bytes(None), "not measured"),
        (show_bytes(0), "0 B"),
        (show_bytes(999), "999 B"),
        (show_bytes(1500), "1.5 kB"),
        (show_bytes(999_999), "1.0 MB"),
        (show_bytes(2**40), "1.1 TB"),
        (show_seconds(None), "not measured"),
        (show_seconds(0.00034), "340 µs"),
        (show_seconds(0.0123), "12.3 ms"),
        (show_seconds(0.99999), "1 s"),
        (show_seconds(59.99), "1 min 00 s"),
        (show_seconds(185), "3 min 05 s"),
        (show_seconds(7260), "2 h 01 min"),
        (show_rate(None, "samples"), "not measured"),
        (show_rate(12.345, "samples"), "12.3 samples/s"),
        (show_rate(12_345, "samples"), "12,345 samples/s"),
        (show_float(None), "not measured"),
        (show_float(0.123456), "0.1235"),
        (show_percent(1 / 3), "33 %"),
        (show_percent(None), "not measured"),
    ],
)
def test_values(shown: str, text: str) -> None:
    assert shown == text


def test_what_workers_exchange_directly_is_said_to_be_uncounted() -> None:
    direct = replace(RUN, wire=WireBytes(90, 10, 50, None, None))
    for view in (run_view(direct), summary_view(direct)):
        assert (
            "90 B out, 10 B in (samples 50 B); gradients and activations are exchanged directly between the workers: "
            "not counted"
        ) in to_text(view)


def test_the_budget_stands_beside_what_is_used_of_it() -> None:
    limited = replace(RUN, budget_bytes=44_000_000)
    for view in (run_view(limited), summary_view(limited), session_view(replace(STATUS, run=limited))):
        assert "11.0 MB of 44.0 MB used, 25 %" in to_text(view)
    assert "budget" not in to_text(run_view(RUN)) + to_text(session_view(STATUS))
    assert "10.0 MB out, 1.0 MB in (samples 5.0 MB" in to_text(session_view(STATUS))


def test_steps_since_a_resume_are_not_mixed_with_epochs_from_the_beginning() -> None:
    resumed = replace(RUN, epoch=3, steps_before=46)
    assert run_view(resumed).headline.startswith("epoch 3/3, step 5/69 since step 46, loss")
    assert "5 after the 46 of the checkpoint, now at epoch 3 of 3, 320 samples" in to_text(summary_view(resumed))
    assert "5 in 1 of 3 epochs, 320 samples" in to_text(summary_view(RUN))


def test_session_text() -> None:
    text = to_text(session_view(STATUS))
    assert text.splitlines()[0] == "session: open at 127.0.0.1:4242"
    assert "1 ready of 2 expected" in text
    assert "worker   device          state    share  step time\n" in text
    assert "gpu <1>  cuda:0 T4 & co  working  50 %   12.3 ms\n" in text
    assert "gpu <1>  320      1.0 MB  12 B\n" in text
    assert text.endswith("a note\nwaits for <worker>")


def test_a_closed_empty_session_is_short() -> None:
    assert to_text(session_view(Status("closed", "", "data", 1))) == (
        "session: closed\n  mode     data\n  workers  0 ready of 1 expected"
    )


def test_run_and_summary() -> None:
    assert (
        run_view(RUN).headline == "epoch 1/3, step 5/69, loss 0.25, val loss 0.3 accuracy 0.91, 500 samples/s, 8 s left"
    )
    text = to_text(summary_view(RUN, [WORKER]))
    assert "2.3 at the start, 0.25 at the end" in text
    assert "10.0 MB out, 1.0 MB in (samples 5.0 MB, gradients 100 B, activations 2.0 kB)" in text
    fresh = RunStatus("r", "preparing", "data", 0, 3, 0, None, 0, 0.0)
    assert run_view(fresh).headline == "epoch 0/3, step 0"
    assert "not measured" in to_text(summary_view(fresh))


def test_every_worker_has_one_row_without_columns_that_nobody_has() -> None:
    gpu = replace(
        WORKER, name="gpu", device_name="NVIDIA A100-SXM4-80GB", busy=0.98, memory_used_bytes=61_200_000_000,
        memory_bytes=85_900_000_000, power_w=312.4, joules=45_678.0, rate_out_bytes_s=1_230_000.0,
        rate_in_bytes_s=480_000.0, round_trip_s=0.041, worker_waits=0.04, data_waits=0.3,
    )  # fmt: skip
    cpu = replace(WORKER, name="cpu", device="cpu", device_name="Intel(R) Xeon(R) CPU @ 2.50GHz", busy=0.5)
    both = glance([gpu, cpu])
    assert both.columns == (
        "worker", "device", "state", "share", "step time", "busy", "memory", "power", "energy", "link to",
        "link from", "round trip", "waits",
    )  # fmt: skip
    assert both.rows == (
        ("gpu", "cuda:0 A100-SXM4-80GB", "working", "50 %", "12.3 ms", "98 %", "61.2/85.9 GB", "312 W", "45.7 kJ",
         "1.23 MB/s", "480 kB/s", "41 ms", "4 %"),
        ("cpu", "cpu Intel Xeon", "working", "50 %", "12.3 ms", "50 %", "-", "-", "-", "-", "-", "-", "-"),
    )  # fmt: skip
    assert glance([cpu]).columns == ("worker", "device", "state", "share", "step time", "busy")
    gone, away = (replace(gpu, state=state) for state in ("lost", "suspect"))
    told = glance([gpu, gone, away])
    assert told.faint == {1}
    for row in told.rows[1:]:
        assert row[8] == "45.7 kJ" and set(row[4:8] + row[9:]) == {"-"}, "what was measured then says nothing of now"


def test_what_is_said_of_a_worker_is_not_said_twice() -> None:
    lost = replace(WORKER, state="lost", detail="its process ended")
    assert to_text(run_view(RUN, [lost], ["gpu <1> was lost: its process ended"])).count("its process ended") == 1
    assert "gpu <1>: its process ended" in to_text(run_view(RUN, [lost]))


@given(
    st.lists(st.lists(st.text("ab 数", max_size=40), min_size=12, max_size=12), min_size=1, max_size=4),
    st.integers(2, 12),
)
@settings(max_examples=60, deadline=None)
def test_a_wide_table_is_set_in_pieces_and_loses_nothing(cells: list[list[str]], columns: int) -> None:
    rows = tuple(tuple(f"r{k}c{n}{cell}" for n, cell in enumerate(row[:columns])) for k, row in enumerate(cells))
    text = table_text(Table(tuple(f"column{n}" for n in range(columns)), rows))
    for row in rows:
        assert all(" ".join(cell.split()) in text for cell in row)
    assert text.count("column0") == text.count("r0c0") >= 1
    for line in text.splitlines():
        width = sum(2 if letter == "数" else 1 for letter in line)
        assert width <= WIDTH or len(re.findall(r"r\dc\d+|column\d+", line)) in (0, 2), (
            "two columns fit or nothing does"
        )


def test_time_left_is_told_while_it_is_known() -> None:
    assert "s left" not in run_view(replace(RUN, state="done")).headline
    assert "left" not in run_view(replace(RUN, total_steps=None)).headline + run_view(replace(RUN, step=0)).headline
    assert run_view(replace(RUN, total_steps=10_000)).headline.endswith("500 samples/s, 21 min 19 s left")


def test_energy_is_told_per_sample_and_epoch() -> None:
    measured = replace(RUN, joules=64.0)
    assert "64 J, 0.2 J per sample, 294 J per epoch" in to_text(run_view(measured))
    assert "per epoch" not in to_text(run_view(replace(measured, steps_before=5)))


def test_sizes_in_pairs() -> None:
    pairs = [(5.1e9, 25.3e9), (12.0, 3.0), (999_600.0, 0.0), (1e3, 3e9), (123.4e6, 999.4e6)]
    assert [show_bytes_pair(*pair) for pair in pairs] == [
        "5.1/25.3 GB",
        "12/3 B",
        "1/0 MB",
        "<0.01/3 GB",
        "123/999 MB",
    ]
    assert [short_rate(rate) for rate in (0, 21.4, 999.6, 480_000.0, 3e20)] == [
        "0 B/s", "21.4 B/s", "1 kB/s", "480 kB/s", "300000 PB/s",
    ]  # fmt: skip


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
    away, ended = (to_text(worker_view(replace(worker, state=state))) for state in ("reconnecting", "left"))
    assert "link" not in away and "busy" in away
    assert "link" not in ended and "busy" not in ended and "2602 samples" in ended and "1.23 kJ" in ended
    assert "0" not in to_text(worker_view(replace(worker, figures=OwnFigures(), step=1, address="a"))).replace(
        "cuda:0", ""
    )


def test_worker() -> None:
    shown = worker_view(FakeWorkerStatus("joining", "w", None, "cpu", "127.0.0.1:1", "the hub is away"))
    assert to_text(shown) == "worker w: joining on cpu for 127.0.0.1:1, no step yet\nthe hub is away"


@given(st.text(), st.text(), st.text())
@settings(max_examples=60, deadline=None)
def test_html_escapes_everything_that_came_from_outside(title: str, cell: str, line: str) -> None:
    mark = "<script>&'\""
    made = View(title + mark, mark, Progress(1, 2, mark), (Table((mark,), ((cell + mark,),), mark),), (mark,))
    page = to_html(made, [line + mark])
    assert "<script" not in page
    assert page.count("&lt;script&gt;&amp;&#x27;&quot;") == 8


def test_html_and_text_say_the_same() -> None:
    for made in (session_view(STATUS), summary_view(RUN, [WORKER]), run_view(RUN, [WORKER])):
        words = set(re.findall(r"\w+", html.unescape(re.sub(r"<[^>]*>", " ", to_html(made)))))
        assert set(re.findall(r"\w+", to_text(made))) <= words


def test_html_is_neutral_and_needs_nothing() -> None:
    page = to_html(run_view(RUN, [WORKER]), ["x"])
    assert not re.search(r"<(script|style|link|img)|(?<![-\w])color:|background:(?!transparent|rgba)", page)


def test_progress_never_leaves_the_bar() -> None:
    assert Progress(3, None).fraction is None
    assert Progress(0, 0).fraction is None
    assert Progress(12, 10).fraction == 1.0
    assert "?" in to_html(View("x", progress=Progress(3, None)))


def test_wide_characters_keep_columns_straight() -> None:
    table = Table(("name", "n"), (("数据", "1"), ("ab", "2"), ("two\nlines", "3")))
    lines = to_text(View("x", tables=(table,))).splitlines()[1:]
    assert lines[2] == "  数据       1"
    assert lines[4] == "  two lines  3"


def test_secrets_are_taken_out_everywhere() -> None:
    made = View(CODE, CODE, None, (Table((CODE,), ((CODE,),), CODE),), (CODE,))
    for text in (to_text(made), to_html(made, [CODE]), redact(f"a '{CODE}' b"), error_text(ConfigError(CODE))):
        assert CODE.split(":")[1] not in text
    assert redact(f"a '{CODE}' b") == "a 'guava1:<hidden>' b"
    assert redact("guava1: is how a code begins") == "guava1: is how a code begins"


def test_errors() -> None:
    assert error_text(ConfigError("bad\nport")) == "ConfigError: bad port"
    remote = RemoteError("w0", "ValueError", "no <net>", "Traceback:\n  line 3\nValueError: no <net>")
    assert error_text(remote).splitlines()[0] == "RemoteError: worker w0 raised ValueError: no <net>"
    assert error_text(remote).splitlines()[2:4] == ["Traceback on w0:", "Traceback:"]
    assert "no &lt;net&gt;" in error_html(remote)


def test_a_run_whose_only_worker_is_away_waits_for_it() -> None:
    away = replace(WORKER, state="suspect", name="vm", awaited_s=280.4)
    for state in ("training", "stopping"):
        shown = to_text(run_view(replace(RUN, state=state), (away,)))
        assert (
            shown.startswith("waiting: for vm to come back, up to 4 min 40 s more, epoch 1/3")
            and "samples/s" not in shown
        )
        assert "  away  " in shown and "suspect" not in shown
    assert "500 samples/s" in to_text(run_view(RUN, (away, WORKER))), "somebody else is at work"
    assert to_text(run_view(replace(RUN, state="done"), (away,))).startswith("done")
    assert "waiting, for vm" in to_text(session_view(replace(STATUS, workers=(away,))))


def test_workers_that_left_before_the_run_are_not_shown_and_gone_ones_have_no_device() -> None:
    fresh = replace(WORKER, name="vm", memory_bytes=1000, busy=0.5)
    idle = replace(fresh, state="left", detail="an old one", samples=0, out_bytes=0)
    worked = replace(fresh, state="left", detail="did a part")
    shown = to_text(session_view(replace(STATUS, workers=(idle, worked, fresh))))
    assert "an old one" not in shown and "did a part" in shown and shown.count("50 %") == 3, shown
    before = to_text(
        session_view(replace(STATUS, run=None, workers=(worked, replace(fresh, state="lost", detail="lost it"))))
    )
    assert "did a part" not in before and "lost it" in before


def test_what_must_be_done_for_the_tunnel_stands_in_the_session() -> None:
    assert "run ssh first" in to_text(session_view(replace(STATUS, tunnel_note="run ssh first")))


def test_a_run_that_waits_for_workers_counts_down() -> None:
    waits = replace(RUN, state="waiting", waits_s=271.2)
    shown = to_text(run_view(waits, (replace(WORKER, state="lost"),)))
    assert shown.startswith("waiting: for workers, up to 4 min 31 s more, epoch 1/3") and "samples/s" not in shown
    assert "more" not in to_text(run_view(RUN, (WORKER,))).splitlines()[0]
