"""What notebook and background process tell each other arrives as it was, and what cannot travel is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from guava_nb.errors import ConfigError
from guava_nb.evaluation.predictions import Predictions
from guava_nb.notebook.background.values import RunName, read_value, write_value
from guava_nb.notebook.panel.following import News
from guava_nb.status import WorkerStatus
from tests.support.energy import record
from tests.support.fake_session import FakeRun


def travelled(value: Any, folder: Path, **words: Any) -> Any:
    write_value(folder / "value", value)
    return read_value(folder / "value", **words)


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, [None, 2.5]), "b": {"c": {1, 2}}, "d": "é", 3: b"x"},
        News(
            FakeRun().status(),
            (WorkerStatus(0, "w0", "ready", "cpu", "cpu", "host"),),
            ("said",),
            ("line",),
            ("cell", "note"),
        ),
        [Path("a/b"), ("x", Path())],
        {},
    ],
)
def test_plain_values_and_records_arrive_as_they_were(value: Any, tmp_path: Path) -> None:
    assert travelled(value, tmp_path) == value


def test_objects_of_ours_arrive_with_their_methods(tmp_path: Path) -> None:
    energy, found = record(), Predictions({"predictions": np.arange(3)}, None, Path("there"))
    assert repr(travelled(energy, tmp_path)) == repr(energy) and dict(travelled(energy, tmp_path)) == dict(energy)
    again = travelled(found, tmp_path)
    assert again["predictions"].tolist() == [0, 1, 2] and again.path == Path("there")
    assert torch.equal(travelled({"t": torch.ones(2, dtype=torch.float64)}, tmp_path)["t"], torch.ones(2).double())


def test_a_run_stays_where_it_is_and_only_its_name_travels(tmp_path: Path) -> None:
    run = FakeRun()
    name = RunName("run-1", ("status",))
    write_value(tmp_path / "value", {"run": [run]}, lambda value: name if value is run else None)
    assert read_value(tmp_path / "value", lambda name: name.run_id.upper()) == {"run": ["RUN-1"]}


def test_what_cannot_travel_is_named_by_place_and_class(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['f'\]"):
        write_value(tmp_path / "value", {"f": lambda: None})
    assert not (tmp_path / "value").exists()
