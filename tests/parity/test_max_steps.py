"""A run ends after so many optimizer steps, in the middle of an epoch too, and goes on from there as if it had not ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from guava_nb import Orchestrator
from guava_nb.errors import ConfigError
from guava_nb.training.run import Run
from tests.support.session import direct_session
from tests.support.training import SmallNet, difference, loader

TRAINING: dict[str, Any] = {
    "optimizer": "AdamW", "optimizer_args": {"lr": 0.02}, "precision": "fp64", "progress": False, "fresh": True
}  # fmt: skip


@pytest.fixture(params=[1, 2])
def session(request: pytest.FixtureRequest) -> Iterator[Orchestrator]:
    with direct_session(request.param) as made:
        made.register_model(SmallNet)
        yield made


def train(session: Orchestrator, **options: Any) -> Run:
    return session.start_training(loader(), **{**TRAINING, **options})


def plain(session: Orchestrator, steps: int, accumulate: int = 1, total: int | None = None) -> nn.Module:
    """So many steps of passes over the same loader."""
    torch.manual_seed(session.config.seed)
    model, batches = SmallNet().double(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total) if total else None
    done = 0
    while done < steps:
        epoch = list(batches)
        for start in range(0, len(epoch), accumulate):
            if done == steps:
                break
            group = epoch[start : start + accumulate]
            x, y = (torch.cat(parts) for parts in zip(*group, strict=True))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            done += 1
    return model


@pytest.mark.parametrize("steps", [1, 3, len(loader()), len(loader()) + 2])
def test_so_many_steps_equal_as_many_of_one_process(session: Orchestrator, steps: int) -> None:
    run = train(session, max_steps=steps)
    assert [record["step"] for record in run.history] == list(range(1, steps + 1))
    assert (run.lost_samples, run.duplicated_samples) == (0, 0)
    assert difference(run.model(), plain(session, steps)) <= 1e-9
    assert run.status().total_steps == steps and run.state == "done"


def test_epochs_end_a_run_that_may_take_more_steps(session: Orchestrator) -> None:
    run = train(session, max_steps=100, num_epochs=1)
    assert len(run.history) == len(loader()) == run.status().total_steps


def test_accumulated_batches_are_one_step_and_schedules_end_with_the_run(session: Orchestrator) -> None:
    run = train(
        session, max_steps=3, accumulation_steps=2, scheduler="OneCycleLR",
        scheduler_args={"max_lr": 0.05, "total_steps": 3},
    )  # fmt: skip
    assert len(run.history) == 3
    assert difference(run.model(), plain(session, 3, accumulate=2, total=3)) <= 1e-9


def test_the_end_of_the_run_validates_and_ends_no_epoch(session: Orchestrator) -> None:
    ended: list[int] = []
    watch = type("Watch", (), {"on_epoch": lambda self, run, record: ended.append(record["epoch"])})()
    each = len(loader())
    run = session.start_training(loader(), loader(), **TRAINING, max_steps=each + 1, callbacks=[watch])
    assert [one["step"] for one in run.validations] == [each, each + 1] and ended == [1]


def test_a_checkpoint_of_its_end_goes_on_in_the_middle_of_the_epoch(session: Orchestrator, tmp_path: Path) -> None:
    train(session, max_steps=2)
    saved = session.save_checkpoint(tmp_path / "two.pt")
    with pytest.raises(ConfigError, match=r"has 2 steps and max_steps is 2.*--max-steps"):
        train(session, max_steps=2, resume=saved, fresh=False)
    run = train(session, max_steps=6, resume=saved, fresh=False)
    assert [record["step"] for record in run.history] == [3, 4, 5, 6]
    assert difference(run.model(), plain(session, 6)) <= 1e-9


def test_a_round_of_local_steps_is_cut_at_the_last_one(session: Orchestrator) -> None:
    run = train(session, max_steps=3, sync="local", sync_every=2)
    assert [record["steps"] for record in run.history] == [2, 1] and run.history[-1]["step"] == 3
    if len(session.status().workers) == 1:
        assert difference(run.model(), plain(session, 3)) <= 1e-9


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from loader().dataset


def test_data_without_a_length_is_passed_over_as_often_as_is_needed(session: Orchestrator) -> None:
    per_pass = len(list(DataLoader(Stream(), batch_size=16)))
    run = session.start_training(DataLoader(Stream(), batch_size=16), **TRAINING, max_steps=per_pass + 1)
    assert [record["epoch"] for record in run.history] == [1] * per_pass + [2]


def test_the_forecast_is_of_as_many_steps() -> None:
    session, each = Orchestrator(num_workers=2), len(loader())
    session.register_model(SmallNet)
    for steps in (1, each, each + 2):
        found = session.forecast(loader(), **TRAINING, max_steps=steps)
        assert found.steps == steps and len(found.epochs) == -(-steps // each)
