"""Sessions and runs as text."""

from __future__ import annotations

import re
from dataclasses import replace

from guava_nb.render import (
    run_view,
    session_view,
    summary_view,
    to_html,
    to_text,
)
from guava_nb.status import RunStatus, Status, WireBytes
from tests.unit.render.status_cases import RUN, STATUS, WORKER


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
    assert "5 after 46 done before, now at epoch 3 of 3, 320 samples" in to_text(summary_view(resumed))
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


def test_time_left_is_told_while_it_is_known() -> None:
    assert "s left" not in run_view(replace(RUN, state="done")).headline
    assert "left" not in run_view(replace(RUN, total_steps=None)).headline + run_view(replace(RUN, step=0)).headline
    assert run_view(replace(RUN, total_steps=10_000)).headline.endswith("500 samples/s, 21 min 19 s left")


def test_energy_is_told_per_sample_and_epoch() -> None:
    measured = replace(RUN, joules=64.0)
    assert "64 J, 0.2 J per sample, 294 J per epoch" in to_text(run_view(measured))
    assert "per epoch" not in to_text(run_view(replace(measured, steps_before=5)))


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


def test_what_must_be_done_for_the_tunnel_stands_in_the_session() -> None:
    assert "run ssh first" in to_text(session_view(replace(STATUS, tunnel_note="run ssh first")))


def test_a_run_that_waits_for_workers_counts_down() -> None:
    waits = replace(RUN, state="waiting", waits_s=271.2)
    shown = to_text(run_view(waits, (replace(WORKER, state="lost"),)))
    assert shown.startswith("waiting: for workers, up to 4 min 31 s more, epoch 1/3") and "samples/s" not in shown
    assert "more" not in to_text(run_view(RUN, (WORKER,))).splitlines()[0]


def test_what_would_be_lost_now_is_always_told_for_a_kill_and_for_a_lost_disk() -> None:
    alone = replace(RUN, at_risk_steps=300, at_risk_s=95.0, at_risk_killed_steps=12, at_risk_killed_s=4.2)
    for view in (run_view(alone), session_view(replace(STATUS, run=alone))):
        text = to_text(view)
        assert "4 s of work (12 steps) if the process that has the state were killed now" in text
        assert "1 min 35 s of work (300 steps) if its disk were lost, too" in text
    young = replace(alone, at_risk_steps=23, at_risk_s=0.3, at_risk_killed_steps=0, at_risk_killed_s=0.0)
    told = "nothing if the process that has the state were killed now, less than 1 s of work (23 steps) if its disk"
    assert told in to_text(run_view(young))
    assert "nothing: several workers, or the orchestrator, hold the newest state" in to_text(run_view(RUN))
    assert "at risk" not in to_text(run_view(replace(alone, state="done")))


def test_approximate_weights_are_told_after_the_end_too() -> None:
    run = replace(RUN, approximate="it goes on from approximate weights after step 9")
    for state in ("training", "done"):
        assert "approximate weights after step 9" in to_text(run_view(replace(run, state=state)))
    assert "approximate weights after step 9" in to_text(summary_view(replace(run, state="done")))


def test_the_chosen_mode_and_that_of_a_run_that_goes_on_are_both_told() -> None:
    going = replace(STATUS, mode="pipeline", run=replace(RUN, mode="data", state="training"))
    assert "mode     data; pipeline from the next run on" in re.sub(r" {2,}", "     ", to_text(session_view(going)))
    ended = replace(going, run=replace(going.run, state="done"))
    assert "from the next run on" not in to_text(session_view(ended))


def test_more_workers_than_expected_are_no_part_of_them() -> None:
    assert "1 ready, 0 expected" in to_text(session_view(replace(STATUS, expected_workers=0)))


def test_after_its_end_a_run_has_one_speed_everywhere() -> None:
    ended = replace(RUN, state="done", samples=1000, elapsed_s=10.0, samples_per_s=777.0)
    for text in (to_text(session_view(replace(STATUS, run=ended))), to_text(summary_view(ended, (WORKER,)))):
        assert "100 samples/s" in text and "777" not in text


def test_rows_of_workers_stand_in_the_order_of_their_names() -> None:
    workers = tuple(replace(WORKER, name=name, rank=k) for k, name in enumerate(("local-10", "local-2", "colab")))
    text = to_text(session_view(replace(STATUS, workers=workers)))
    assert text.index("colab") < text.index("local-2") < text.index("local-10")


def test_figures_stay_with_their_units_where_a_page_wraps() -> None:
    html = to_html(
        session_view(replace(STATUS, notes=("9.0 MB of 12 % in 3 ms by --local 2 on 3 workers",))), as_of="--web"
    )
    assert (
        "9.0\N{NO-BREAK SPACE}MB of 12\N{NO-BREAK SPACE}% in 3\N{NO-BREAK SPACE}ms" in html and "on 3 workers" in html
    )
    assert (
        '<span style="white-space:nowrap">--local</span> 2' in html
        and '<span style="white-space:nowrap">--web</span>' in html
    )
