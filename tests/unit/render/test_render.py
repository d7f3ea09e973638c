"""Text and HTML of the same views."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.engine.status import RunStatus, Status, WireBytes, WorkerStatus
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
from guava_nb.render.values import show_bytes, show_float, show_percent, show_rate, show_seconds
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
    assert "worker   device         state    share  step time\n" in text
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
