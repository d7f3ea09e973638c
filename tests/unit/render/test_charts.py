"""Charts of a run: which there are, and scales that stay."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from guava_nb.render import Curve
from guava_nb.render.charts import Scale, Scales, charts_of, smoothed, tick_text
from guava_nb.render.pictures import classes_png, curve_png, size_px
from guava_nb.render.svg import charts_html
from guava_nb.status import DeviceUse

POINTS = tuple((step, 2.0 / (step + 1)) for step in range(30))
FULL = Curve(POINTS, POINTS[::10], (("accuracy", ((10, 0.5),)), ("f1", ((10, 0.4),)), ("perplexity", ((10, 40.0),))),
             POINTS, POINTS, 100)  # fmt: skip


def test_there_is_a_chart_for_each_kind_and_metrics_between_0_and_1_share_one() -> None:
    charts = charts_of(FULL)
    assert [chart.title for chart in charts] == ["loss", "metrics", "perplexity", "learning rate", "gradient norm"]
    assert {chart.last for chart in charts} == {50}
    assert [charts_of(Curve(((1, 1.0), (n, 0.5)), last_step=100))[0].last for n in (2, 60, 100)] == [2, 100, 100]
    assert charts_of(Curve(((1, 1.0), (60, 0.5))))[0].last == 100
    assert [chart.title for chart in charts_of(Curve(POINTS, learning_rates=POINTS[:1]))] == ["loss"]
    assert charts_of(Curve(((1, math.nan), (2, math.inf)))) == ()


def test_devices_have_a_chart_each_of_busy_and_memory_and_many_are_folded() -> None:
    def used(names: str, is_gpu: bool) -> DeviceUse:
        return DeviceUse(names, is_gpu, ((0, 0.2), (59, 0.9)), ((0, 1e9), (59, 4e9)))

    charts = charts_of(Curve(POINTS, devices=(used("a, b", True), used("c", False))))[1:]
    assert [chart.title for chart in charts] == ["GPU busy", "GPU memory", "CPU busy", "RAM in use"]
    assert [line.name for line in charts[0].lines] == ["a, b"] and charts[1].scale.high == 5e9
    page = charts_html(charts)
    assert all(text in page for text in ("a, b 90 %", "c 4 GB", ">1 min 40 s<", ">time<")), page
    (busy, _) = charts_of(Curve(POINTS, devices=tuple(used(f"w{k}", True) for k in range(24))))[1:]
    assert [(line.name, line.points[-1][1]) for line in busy.lines][:2] == [("least of 24", 0.9), ("mean of 24", 0.9)]
    long = [used(f"a machine of a long name {k}", True) for k in range(3)]
    assert [line.name for line in charts_of(Curve(POINTS, devices=tuple(long)))[1].lines] == [
        "least of 3",
        "mean of 3",
        "most of 3",
    ]
    four = charts_html(charts_of(Curve(POINTS, devices=tuple(used(f"local-{k}", True) for k in range(4))))[1:2])
    assert ">local-3</tspan>" in four, "names alone where the figures beside them would be cut"
    assert charts_of(Curve(POINTS, devices=(DeviceUse("a", True),)))[1:] == ()
    crowd = charts_of(Curve(POINTS, devices=(used(", ".join(f"local-{k}" for k in range(8)), False),)))[1:]
    assert [[line.name for line in chart.lines] for chart in crowd] == [["8 workers"], ["8 workers"]]
    page = charts_html(crowd)
    assert "8 workers 90 %" in page and "auto-fill" in page, "columns of one width, whatever number is in the last row"


def test_a_scale_only_widens_through_a_run() -> None:
    scales: Scales = {}
    seen = [charts_of(Curve(tuple((k, 2.0 / (k + 1)) for k in range(end))), scales)[0].scale for end in range(2, 200)]
    assert all(a.low >= b.low and a.high <= b.high and b.is_log for a, b in zip(seen, seen[1:], strict=False))
    assert len(set(seen)) <= 8, "it changes in a few steps, not with every frame"
    narrow = charts_of(Curve(((1, 0.5), (2, 0.5))), scales)[0].scale
    assert narrow == seen[-1]
    below = charts_of(Curve(((1, 0.5), (2, -0.5))), scales)[0].scale
    assert not below.is_log and below.low <= -0.5
    assert not charts_of(Curve(((1, 0.5), (2, 0.6))), scales)[0].scale.is_log, "it does not jump back"


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_scale_has_room_for_its_values(values: list[float], is_log: bool) -> None:
    scale = Scale.of(values, is_log)
    assert scale.low <= min(values) * (1 - 1e-8 * math.copysign(1, min(values))) or scale.low <= min(values)
    assert scale.low < scale.high
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 5 and ticks[0] == scale.low and ticks[-1] >= scale.high * (1 - 1e-8)
    assert all(0 <= scale.place(value) <= 1 for value in values)


def test_smoothing_follows_the_line_and_leaves_a_short_one() -> None:
    assert smoothed(POINTS, 0.0) == POINTS and smoothed(POINTS[:5], 0.9) == POINTS[:5]
    flat = tuple((k, 3.0) for k in range(50))
    assert all(abs(value - 3.0) < 1e-9 for _, value in smoothed(flat, 0.9))
    jumps = tuple((k, float(k % 2)) for k in range(100))
    assert all(0.3 < value < 0.7 for _, value in smoothed(jumps, 0.9)[50:])


def test_numbers_beside_axes_are_short() -> None:
    shown = {0.0: "0", 1.0: "1", 0.0005: "0.0005", 2500.0: "2,500", 1e-5: "1e-5", 2e6: "2e6", 1.5e-7: "1.5e-7"}
    assert {value: tick_text(value) for value in shown} == shown


def test_pictures_are_small_whatever_is_drawn() -> None:
    six = replace(FULL, scores=(), devices=(DeviceUse("a", True, ((0, 0.5), (9, 1.0)), ((0, 1e9), (9, 2e9))),))
    assert size_px(curve_png(six)) == (640, 660) and size_px(curve_png(Curve(POINTS))) == (640, 440)
    for curve in (FULL, Curve(((0, 1e308), (1, -1e308))), Curve(((0, 0.0), (1, 0.0)))):
        assert curve_png(curve).startswith(b"\x89PNG")
    many = tuple((step, 1.0 + step % 7) for step in range(500))
    page = charts_html(charts_of(Curve(many, (), (), many, many)), 0.6)
    assert page.count("<svg") == 3 and len(page) < 9_000, "of every frame"
    assert "<b>" not in charts_html(charts_of(Curve(POINTS, (), (("<b>", ((1, 0.5),)),))))
    assert classes_png([[1, 0], [1, 3]], ["cat", "dog"], [[[0.0, 1.0], [1.0, 0.0]]], [("cat", True)]).startswith(
        b"\x89"
    )
