"""The record of a run's energy: sums, parts and what they bought."""

from __future__ import annotations

import json

import pytest

from guava_nb.errors import ConfigError
from guava_nb.telemetry.energy_record import energy_record, peak_flops
from tests.support.energy import record, report


def test_joules_per_everything() -> None:
    made = record(grams_per_kwh=360.0, price_per_kwh=0.36)
    assert (made["joules"], made["j_per_sample"], made["j_per_step"]) == (2000.0, 2.0, 20.0)
    assert made["watt_hours"] == pytest.approx(2000 / 3600)
    assert made["co2e_g"] == pytest.approx(0.2)
    assert made["cost"] == pytest.approx(0.0002)
    assert made["epochs"] == [900.0, 1100.0]
    assert (made["tokens"], made["j_per_token"]) == (20_000.0, 0.1)
    assert made["tasks"] == [{"worker": "w0", "task": "attention", "seconds": 1.5, "joules": 300.0, "times": 100}]
    first, second, third = made.rows
    assert (first["j_per_token"], first["uncovered_s"], first["problem"]) == (0.2, 4.0, "GPU is lost")
    assert (first["cpu_busy"], first["network_in_bytes_s"], second["cpu_busy"]) == (0.5, None, None)
    assert (first["watts"], first["forward_j"], first["waiting_s"]) == (200.0, 400.0, 8.0)
    assert first["flops_per_s"] == pytest.approx(500 * 1e9 / 2.0)  # while it computed
    assert first["share_of_peak"] == pytest.approx(500e9 / 2 / 65e12)
    assert first["flops_per_joule"] == pytest.approx(500e9 / 2000)
    assert (second["joules"], third["joules"], third["flops_per_s"]) == (None, None, None)
    json.dumps(dict(made))


def test_without_a_factor_there_is_no_gram_and_no_price() -> None:
    assert record()["co2e_g"] is None and record()["cost"] is None
    with pytest.raises(ConfigError, match="grams_per_kwh"):
        record(grams_per_kwh=-1.0)


def test_what_was_not_measured_is_none_everywhere() -> None:
    blind = {**report(), "energy_j": None, "energy": report()["energy"][2:]}
    made = energy_record(blind, {}, "fp32", grams_per_kwh=100.0)
    assert [made[key] for key in ("joules", "j_per_sample", "j_per_step", "watt_hours", "co2e_g")] == [None] * 5
    assert "not measured" in repr(made)


def test_each_list_makes_a_table() -> None:
    """What `pandas.DataFrame(rows)` needs: flat rows of plain values."""
    made = record()
    for rows in (made["workers"], made["tasks"]):
        for row in rows:
            assert all(value is None or isinstance(value, str | int | float | bool) for value in row.values()), row
    assert {"worker", "joules", "forward_s", "forward_j", "j_per_token"} <= made["workers"][0].keys()


def test_the_record_goes_to_pandas() -> None:
    made = record()
    pandas = pytest.importorskip("pandas", reason="the record goes to pandas, which is no dependency")
    table = pandas.DataFrame(made["workers"]).set_index("worker")
    assert table.loc["w0", "joules"] == 2000.0 and pandas.isna(table.loc["w2", "joules"])
    assert pandas.DataFrame(made["tasks"])["joules"].sum() == 300.0


def test_without_a_count_there_are_no_tokens() -> None:
    made = energy_record({**report(), "tokens": None}, {}, "fp32")
    assert made["tokens"] is None and made["j_per_token"] is None


def test_a_run_without_samples_divides_by_nothing() -> None:
    assert energy_record({**report(), "samples": 0, "steps": 0}, {}, "fp32")["j_per_sample"] is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989.5e12),
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA L4", "fp32", 30.3e12),
        ("NVIDIA L40S", "fp32", 91.6e12),
        ("Tesla T4", "fp64", None),
        ("GPU of tomorrow", "fp32", None),
    ],
)
def test_peaks(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak
