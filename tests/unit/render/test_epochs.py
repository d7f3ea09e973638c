"""Tables over epochs and over runs."""

from __future__ import annotations

from dataclasses import replace

from guava_nb.render import run_view, runs_csv, runs_view, summary_view, to_html, to_text
from guava_nb.render.epochs import epoch_table
from guava_nb.status import DeviceUse, EpochFigures
from tests.unit.render.status_cases import RUN, WORKER

EPOCH = EpochFigures(1, 2.25, (("loss", 2.5), ("accuracy", 0.5)), 0.001, 33.2, 4012.0)
BEGAN = 1_700_000_000.0


def test_an_epoch_s_row_has_losses_metrics_rate_time_and_joules() -> None:
    table = epoch_table([EPOCH, EpochFigures(2, None)])
    assert table.columns == ("epoch", "loss", "val loss", "accuracy", "learning rate", "time", "energy")
    assert table.rows == (("1", "2.25", "2.5", "0.5", "0.001", "33.2 s", "4.01 kJ"), ("2", *"------"))
    assert "energy" not in epoch_table([replace(EPOCH, joules=None)]).columns


def test_the_panel_has_the_newest_epochs_and_the_end_more_of_them() -> None:
    run = replace(RUN, epochs=tuple(replace(EPOCH, epoch=n, loss=float(n)) for n in range(1, 41)))
    live, end = to_text(run_view(run)), to_text(summary_view(run, [WORKER]))
    assert "\n  40     40" in live and "\n  36     36" in live and "\n  35  " not in live
    assert "\n  11     11" in end and "\n  10  " not in end


def test_runs_are_compared_in_what_differs() -> None:
    used = DeviceUse("local-1", False, ((3, 0.5),), ((3, 7e9),))
    one = replace(
        RUN,
        devices=(used,),
        run_id="run-1",
        state="done",
        settings=(("model", "Net"), ("optimizer.lr", "0.1")),
        began_at=BEGAN,
    )
    other = replace(
        one, run_id="run-2", settings=(("model", "Net"), ("optimizer.lr", "0.01")), scores=(("f1", ((5, 0.8),)),)
    )
    table = runs_view([one, other]).tables[0]
    assert table.columns[:2] == ("run", "state") and "optimizer.lr" in table.columns and "model" not in table.columns
    assert table.rows[0][table.columns.index("f1")] == "-" and table.rows[1][table.columns.index("f1")] == "0.8"
    assert "run-1,CPU busy,,0.5,3,local-1" in runs_csv([one]) and "run-1,RAM in use bytes,,7000000000.0,3," in runs_csv(
        [one]
    )
    killed = runs_view([replace(other, state="killed"), one], "2 older")
    assert killed.tables[0].rows[0][4] == f"{RUN.step} or more" and killed.tables[0].rows[1][4] == str(RUN.step)
    assert killed.notes[0].startswith("Killed (run-2): the kernel ended while it trained") and killed.notes[1:] == (
        "2 older",
    )
    lines = runs_csv([one, other]).splitlines()
    assert (
        lines[0] == "run,figure,step,value,seconds,workers"
        and "run-1,loss,1,2.3,," in lines
        and "run-2,val f1,5,0.8,," in lines
    )


def test_the_end_says_from_when_to_when() -> None:
    ended = replace(RUN, state="done", began_at=BEGAN, ended_at=BEGAN + 61)
    assert " from " in to_text(summary_view(ended)) and " to " in to_text(summary_view(ended))


def test_a_wide_table_is_set_in_even_pieces_each_with_the_names() -> None:
    wide = replace(WORKER, power_w=70.0, joules=10.0, busy=0.9, memory_used_bytes=1, memory_bytes=2, worker_waits=0.1)
    page = to_html(run_view(RUN, [replace(wide, rate_out_bytes_s=1e6, rate_in_bytes_s=1e6, round_trip_s=0.1)]))
    assert page.count(">worker</th>") > 1 and page.count(">gpu &lt;1&gt;</td>") == page.count(">worker</th>")
