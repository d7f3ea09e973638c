"""A run ends by itself when its validations do not get better, with the state of the last step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guava_nb import Orchestrator
from guava_nb.errors import ConfigError
from tests.support.session import direct_session, said
from tests.support.training import SmallNet, loader

#: A learning rate that climbs: the loss of a validation falls, and rises later.
TRAINING: dict[str, Any] = {
    "optimizer": "SGD", "optimizer_args": {"lr": 1e-3}, "precision": "fp64", "progress": False, "fresh": True,
    "scheduler": "ExponentialLR", "scheduler_args": {"gamma": 1.6}, "num_epochs": 30, "val_interval": 1,
}  # fmt: skip


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Orchestrator]:
    with direct_session(2, checkpoint_dir=str(tmp_path)) as made:
        made.register_model(SmallNet)
        yield made


def losses(session: Orchestrator, **options: Any) -> list[float]:
    run = session.start_training(loader(), loader(), **TRAINING, **options)
    assert [one["step"] for one in run.validations] == list(range(1, len(run.validations) + 1))
    return [one["loss"] for one in run.validations]


@pytest.mark.parametrize("patience", [1, 3])
def test_so_many_validations_that_are_no_better_end_the_run(session: Orchestrator, patience: int) -> None:
    found = losses(session, patience=patience)
    best = min(range(len(found)), key=found.__getitem__)
    assert best > 0 and len(found) == best + 1 + patience < 30 * len(loader())
    assert f"ends early by its patience: no validation was better in loss for {patience} of them" in said(session)
    assert session.run is not None and session.run.state == "stopped" and len(session.run.history) == len(found)


def test_the_best_one_is_saved_and_its_figure_is_followed(session: Orchestrator, tmp_path: Path) -> None:
    found = losses(session, patience=2, save_best="loss")
    best = min(range(len(found)), key=found.__getitem__)
    assert [path.name.endswith(f"-best-step-{best + 1}.pt") for path in tmp_path.glob("*best*")] == [True]


def test_patience_wants_validations(session: Orchestrator) -> None:
    with pytest.raises(ConfigError, match="patience has no effect without val_loader"):
        session.start_training(loader(), patience=2, progress=False)
