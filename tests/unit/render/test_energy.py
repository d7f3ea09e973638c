"""Energy as a view, in text and HTML."""

from __future__ import annotations

from guava_nb.render import energy_view, to_html, to_text
from guava_nb.render.pictures import watts_png
from guava_nb.telemetry.energy_record import energy_record
from tests.support.energy import CURVES, record, report


def test_figures_with_units_and_methods() -> None:
    text = to_text(energy_view(record(grams_per_kwh=360.0)))
    for words in ("2 kJ", "2 J", "0.556 Wh", "900 J, 1.1 kJ", "0.2 g", "200 W", "NVML energy counter", "w2: no sensor"):
        assert words in text, text
    assert "same board" in text and "8 s, 1.6 kJ" in text and "FLOP/J" in text
    assert "0.1 J, 20,000 tokens" in text and "per token" in text
    assert "attention" in text and "300 J" in text and "another view of the same time" in text
    assert "w0: no reading covers 4 s of 10 s (GPU is lost)" in text
    assert "50 %" in text and "3.0 MB/s" in text
    assert "<table" in to_html(energy_view(record()))


def test_what_nobody_asked_for_takes_no_room() -> None:
    plain = {**report(), "tokens": None}
    plain["energy"] = [{**one, "tokens": None, "tasks": {}, "machine": {}, "boards": []} for one in plain["energy"]]
    text = to_text(energy_view(energy_record(plain, {}, "fp16")))
    assert "token" not in text and "task" not in text and "machine of" not in text and "no reading" not in text


def test_a_run_too_short_for_its_sensor_says_so() -> None:
    short = report()
    short["energy"][0]["boards"][0] |= {"too_short": True, "uncovered_s": 0.0}
    assert "w0: the run was hardly longer than the pace of the sensor" in to_text(
        energy_view(energy_record(short, {}, "fp16"))
    )


def test_nothing_measured_says_so_and_shows_no_zero() -> None:
    blind = {**report(), "energy_j": None, "energy": report()["energy"][2:]}
    text = to_text(energy_view(energy_record(blind, {}, "fp32")))
    assert "not measured" in text and "no sensor" in text and " 0 " not in text


def test_the_picture_is_a_png_made_without_pyplot() -> None:
    import sys

    before = "matplotlib.pyplot" in sys.modules
    assert watts_png(CURVES).startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_reason_that_holds_for_many_workers_is_told_once() -> None:
    row = next(row for row in record()["workers"] if row["why"])
    for count, who in ((1, "w0: "), (3, "w0, w1, w2: "), (8, "all 8 workers: ")):
        rows = [{**row, "worker": f"w{number}"} for number in range(count)]
        notes = energy_view({**record(), "workers": rows}).notes
        assert [note for note in notes if row["why"] in note] == [who + row["why"]]
