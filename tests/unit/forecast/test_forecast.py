"""The arithmetic of a forecast, and what it says."""

from __future__ import annotations

import math
import unittest.mock
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guava_nb.cluster.traffic import KINDS, NOTHING, Traffic, kind_of
from guava_nb.forecast.batch_bytes import travelling
from guava_nb.forecast.forecast import Feeding, Forecast, Parts, Saving, seconds_for
from guava_nb.forecast.savings import looks_like_bytes
from guava_nb.protocol.messages import CacheSpec, Channel
from guava_nb.render.forecast import forecast_view
from guava_nb.render.text import to_text

SIZES = st.integers(0, 10**9)
TRAFFIC = st.builds(Traffic, st.tuples(*[SIZES] * len(KINDS)), st.tuples(*[SIZES] * len(KINDS)))


@given(TRAFFIC, TRAFFIC, st.integers(0, 50))
def test_traffic_adds_up(one: Traffic, other: Traffic, times: int) -> None:
    both = one + other * times
    assert both.total_bytes == one.total_bytes + times * other.total_bytes
    assert sum(both.of(kind) for kind in KINDS) == both.total_bytes == both.out_bytes + both.in_bytes
    assert both.record()["out_bytes"] == both.out_bytes
    assert both.without("gradient").total_bytes == both.total_bytes - both.of("gradient")


@pytest.mark.parametrize("channel", list(Channel))
def test_every_channel_is_of_some_kind_both_ways(channel: Channel) -> None:
    kinds = {
        kind_of(channel, out, down, what) for out in (True, False) for down in (True, False) for what in ("gradient",)
    }
    assert kinds <= set(KINDS)
    assert kind_of(Channel.GRADIENT, True, True) == "parameter" != kind_of(Channel.GRADIENT, False, True)


def feeding(batches: int | None, travel: tuple[float, ...] = (1.0,)) -> Feeding:
    rows = None if batches is None else batches * 8.0
    sent, held = Traffic.going("sample", 100), Traffic.going("control", 60)
    return Feeding(batches, rows, sent, Traffic.going("sample", 10), held, 17, travel)


@given(
    batches=st.integers(1, 40), accumulation=st.integers(1, 5), epochs=st.integers(1, 5),
    val_interval=st.none() | st.integers(1, 30),
    every=st.lists(st.integers(1, 20), max_size=2), each_epoch=st.booleans(), ends=st.booleans(),
)  # fmt: skip
def test_a_run_is_what_a_walk_over_its_steps_counts(
    batches: int,
    accumulation: int,
    epochs: int,
    val_interval: int | None,
    every: list[int],
    each_epoch: bool,
    ends: bool,
) -> None:
    parts = Parts(
        Traffic.going("parameter", 1000), Traffic.coming("gradient", 7), feeding(batches, (1.0, 0.0)), accumulation,
        (1.0,) * epochs, feeding(3), val_interval, Traffic.coming("parameter", 500), tuple(every), each_epoch, ends,
    )  # fmt: skip
    train, val = feeding(batches, (1.0, 0.0)), feeding(3)
    total, step, fetched = parts.start, 0, -1
    for epoch in range(epochs):
        for _ in range(math.ceil(batches / accumulation)):
            step += 1
            total = total + parts.step
            if val_interval and step % val_interval == 0:
                total = total + (val.part(0) or NOTHING)
            if any(step % n == 0 for n in every):
                total, fetched = total + parts.state, step
        total = total + (train.part(epoch) or NOTHING)
        if val_interval is None:
            total = total + (val.part(0) or NOTHING)
        if each_epoch and epoch < epochs - 1 and fetched != step:
            total, fetched = total + parts.state, step
    if ends and fetched != step:
        total = total + parts.state
    assert parts.run() == total and parts.steps() == step


def test_a_run_of_very_many_epochs_is_reckoned_at_once() -> None:
    """One that is to be stopped by hand took minutes before it began, told by nothing."""
    parts = Parts(Traffic.going("parameter", 1000), Traffic.coming("gradient", 7), feeding(10), 1, (1.0,) * 1500)
    assert parts.run() == sum(parts.every_epoch(), parts.start + parts.end())
    with unittest.mock.patch.object(Parts, "epoch", side_effect=Parts.epoch, autospec=True) as reckoned:
        assert replace(parts, epochs=(1.0,) * 1_000_000).run() is not None
    assert reckoned.call_count <= 1000


def test_what_is_left_of_an_epoch_counts_in_part() -> None:
    whole = Parts(NOTHING, Traffic.coming("gradient", 7), feeding(10), 1, (1.0, 1.0))
    rest = Parts(NOTHING, Traffic.coming("gradient", 7), feeding(10), 1, (0.3, 1.0))
    assert whole.steps() == 20 and rest.steps() == 13
    one, other = whole.epoch(0), rest.epoch(0)
    assert one is not None and other is not None and other.total_bytes == pytest.approx(0.3 * one.total_bytes)


def test_without_a_length_there_is_no_run() -> None:
    parts = Parts(NOTHING, Traffic.coming("gradient", 7), feeding(None), 2, (1.0,))
    assert parts.run() is None and parts.epoch(0) is None and parts.steps() is None
    assert parts.one_step(16).total_bytes == 7 + 2 * 100 + 16 * 27


@given(TRAFFIC, st.none() | st.floats(1, 1e9), st.none() | st.floats(1, 1e9))
def test_the_slower_way_decides_and_an_unmeasured_one_tells_nothing(
    traffic: Traffic, out: float | None, back: float | None
) -> None:
    found = seconds_for(traffic, (out, back))
    if (traffic.out_bytes and out is None) or (traffic.in_bytes and back is None):
        assert found is None
    else:
        assert found == max(traffic.out_bytes / (out or 1), traffic.in_bytes / (back or 1))


@given(
    rows=st.integers(1, 400), batch=st.integers(1, 64), workers=st.integers(1, 4), room=st.floats(0, 2), shuffled=st.booleans(),
)  # fmt: skip
def test_samples_travel_once_where_there_is_room(
    rows: int, batch: int, workers: int, room: float, shuffled: bool
) -> None:
    budget = int(room * rows * (100 + 160))
    found = travelling(CacheSpec("memory", budget), 100, rows, batch, [1.0] * workers, 3, shuffled)
    assert found[0] == 1.0 and all(0.0 <= part <= 1.0 for part in found)
    if room >= 1 and (workers == 1 or not shuffled):
        assert found[1:] == (0.0, 0.0)
    if not budget:
        assert found == (1.0, 1.0, 1.0)


def test_normalised_bytes_are_told_from_other_floats() -> None:
    pixels = torch.randint(0, 256, (8, 3, 16, 16), generator=torch.Generator().manual_seed(0)).float() / 255
    mean, std = torch.tensor([0.48, 0.45, 0.4]).view(3, 1, 1), torch.tensor([0.22, 0.23, 0.24]).view(3, 1, 1)
    assert looks_like_bytes(pixels) and looks_like_bytes((pixels - mean) / std) and looks_like_bytes(pixels.double())
    assert not looks_like_bytes(torch.randn(8, 3, 16, 16)) and not looks_like_bytes(torch.arange(10).float() ** 0.5)
    assert not looks_like_bytes(torch.zeros(100)) and not looks_like_bytes((pixels * 255).to(torch.uint8))
    assert not looks_like_bytes(torch.linspace(0, 1, 1000)) and not looks_like_bytes(torch.tensor([float("nan")] * 50))


def shown(**changes: object) -> Forecast:
    part = Traffic.going("sample", 4_000_000)
    fields = {
        "mode": "data", "workers": 2, "steps": 40, "steps_per_epoch": 10, "start": part, "step": part * 0.1, "validation": part,
        "end": NOTHING, "epochs": (part,) * 4, "run": part * 5, **changes,
    }  # fmt: skip
    return Forecast(**fields)  # type: ignore[arg-type]


def test_a_forecast_says_all_of_it() -> None:
    text = repr(shown(savings=(Saving("--cache memory", 5_000_000),), notes=("Counted so.",), budget_bytes=10_000_000))
    assert text.splitlines()[0] == "forecast: data mode, 2 workers, 40 steps in 4 epochs, 20.0 MB in all"
    for part in (
        "At least 16 s at 10 Mbit/s or 1.6 s at 100 Mbit/s each way; how fast the line is was not measured here: %guava_doctor",
        "about 0.2 %",
        "5.0 MB for the run, 75% less",
        "Counted so.",
        "after about 50%",
    ):
        assert part in text
    assert "epochs 1 to 4, each" in text and "activation" in text
    assert (
        text.index("100 Mbit/s")
        < text.index("5.0 MB for the run")
        < text.index("activation")
        < text.index("Counted so.")
    )
    assert shown(encrypted=False, rates_bytes_s=(2e6, None)).seconds == 10.0
    assert "take at least 10 s" in repr(shown(rates_bytes_s=(2e6, None))) and "enough" in repr(
        shown(budget_bytes=10**9)
    )
    assert shown()._repr_html_() == f"<pre>{repr(shown())}</pre>"


def test_its_rows_number_the_epochs_as_the_run_will_and_leave_none_out() -> None:
    parts = tuple(Traffic.going("sample", size) for size in (9, 8, 7, 6, 5, 5))
    names = {name: traffic.total_bytes for name, traffic in shown(epochs=parts, first_epoch=10).columns()}
    assert list(names)[3:-2] == ["epoch 10", "epoch 11", "epochs 12 to 13, together", "epochs 14 to 15, each"]
    assert names["epochs 12 to 13, together"] == 13 and names["epochs 14 to 15, each"] == 5
    two = [name for name, _ in shown(epochs=parts[:2]).columns()]
    assert two[3:-2] == ["epoch 1", "epoch 2"]


def test_an_epoch_that_only_has_to_be_ended_is_not_called_one_of_no_steps() -> None:
    rest = shown(steps=0, epochs=(Traffic.going("sample", 9),), first_epoch=10, only_ends=True)
    assert "no step, only the validation that ends epoch 10" in rest.headline()
    assert "40 steps in 3 epochs" in shown(only_ends=True).headline()
    assert "All steps of epoch 10 are done" in repr(rest)


def test_a_view_of_it_answers_before_it_shows_figures() -> None:
    text = to_text(forecast_view(shown(budget_bytes=10_000_000)))
    assert text.index("in all") < text.index("Budget 10.0 MB: not enough") < text.index("activation")


def test_a_forecast_is_plain_data() -> None:
    plain = shown(savings=(Saving("less", 5),)).to_dict()
    assert plain["run_bytes"] == plain["run"]["out_bytes"] == 20_000_000 and plain["seconds"] is None
    assert plain["savings"] == [{"what": "less", "bytes": 5, "of": "run"}] and len(plain["epochs"]) == 4
