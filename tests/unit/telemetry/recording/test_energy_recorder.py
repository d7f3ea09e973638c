"""What a recorder writes is what the board said, and a recording that is none is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from guava_nb.errors import ConfigError
from guava_nb.telemetry import EnergyRecorder, EnergyRecording
from guava_nb.telemetry.energy_record import energy_record
from guava_nb.telemetry.nvml import NvmlBoard, open_board
from tests.support.energy import CURVES, report
from tests.support.kernels import wait_until
from tests.support.sensors import FakeNvml


def board_of(api: FakeNvml) -> NvmlBoard:
    board = open_board("GPU-1", "host", api)
    assert isinstance(board, NvmlBoard)
    return board


def recorded(api: FakeNvml) -> EnergyRecording:
    with EnergyRecorder(board=board_of(api), interval_s=0.001) as recorder, recorder.run("short") as keep:
        wait_until(lambda: len(recorder._readings) > 3, lambda: "reading", timeout_s=20)
        keep(energy_record(report(), CURVES, "fp16"))
    return recorder.recording()


def test_a_recording_comes_back_from_its_file_with_the_records_of_its_runs(tmp_path: Path) -> None:
    api = FakeNvml()
    made = recorded(api)
    assert api.opened == 0, "NVML is given back"
    made.save(tmp_path / "gpu.json")
    found = EnergyRecording.load(tmp_path / "gpu.json")
    assert found.device == "Imaginary T4" and found.method == "NVML energy counter"
    reading = found.readings[0]
    assert (reading.joules, reading.watts, reading.busy, reading.memory_used_bytes) == (5000.0, 200.0, 0.75, 2 << 30)
    assert 0 <= found.run("short").begin_s <= found.run("short").end_s <= found.seconds
    record = found.run("short").energy_record()
    assert dict(record) == dict(energy_record(report(), CURVES, "fp16"))
    assert [list(point) for point in CURVES["w0"]] == [list(point) for point in record.curves["w0"]]
    assert "host/" not in (tmp_path / "gpu.json").read_text()


def test_the_recording_that_ships_has_two_runs_and_tells_what_it_is_of() -> None:
    found = EnergyRecording.load()
    small, large = (run.energy_record() for run in found.runs)
    assert found.device.startswith("NVIDIA") and re.fullmatch(r"20\d\d-\d\d-\d\d", found.date)
    assert small["samples"] == large["samples"] and small["joules"] > large["joules"] > 0
    for run in found.runs:  # what the worker measured is what this process read meanwhile
        inside = [one.joules or 0.0 for one in found.readings if run.begin_s <= one.seconds <= run.end_s]
        assert inside[-1] - inside[0] == pytest.approx(run.record["joules"], rel=0.06)
    with pytest.raises(
        ConfigError, match="no run 'third' in this recording; there are: batches of 32, batches of 2048"
    ):
        found.run("third")


def test_a_board_without_a_counter_is_recorded_by_its_power() -> None:
    made = recorded(FakeNvml(refuses=("nvmlDeviceGetTotalEnergyConsumption",)))
    assert {(reading.joules, reading.watts) for reading in made.readings} == {(None, 200.0)}


def test_what_cannot_be_recorded_says_why() -> None:
    with pytest.raises(ConfigError, match="cpu cannot be recorded: cpu has no energy sensor"):
        EnergyRecorder("cpu")
    split = board_of(FakeNvml(mig=True))
    with pytest.raises(ConfigError, match="a slice of a GPU"):
        EnergyRecorder(board=split)


def test_a_driver_that_stops_answering_leaves_nothing_to_keep() -> None:
    api = FakeNvml()
    recorder = EnergyRecorder(board=board_of(api), interval_s=0.001)
    api.refuses = ("nvmlDeviceGetTotalEnergyConsumption",)
    with recorder:
        pass
    with pytest.raises(ConfigError, match="nothing to keep: 0 readings of Imaginary T4"):
        recorder.recording()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("device"), "missing required field `device`"),
        (lambda found: found.update(readings=[[0, 1], ["soon", 2]]), "Expected `float`"),
        (lambda found: found.update(readings=[[0, 1]]), "two readings or more"),
        (lambda found: found.update(readings=[[1, 1], [0, 2]]), "in order of time"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(change: object, words: str, tmp_path: Path) -> None:
    values = {"device": "d", "date": "2026-01-31", "torch": "2", "method": "m", "readings": [[0, 1], [1, 2]]}
    change(values)  # type: ignore[operator]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=words):
        EnergyRecording.load(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        EnergyRecording.load(tmp_path / "nowhere.json")
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no recording of an EnergyRecorder"):
        EnergyRecording.load(path)
