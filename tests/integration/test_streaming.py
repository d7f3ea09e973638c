"""Batches on their way to real workers: what travels, what is done to it there, how far ahead, and who waits for whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb.errors import ConfigError, RemoteError
from tests.support.processes import Session, difference

CELL = """
import torch
from torch import nn


def Deep():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def to_float(batch):
    images, labels = batch
    return (images.double() - 128) / 64, labels


def shuffled(batch):
    # Both halves in one order that is drawn: a rank that drew another one would learn from wrong labels.
    images, labels = batch
    order = torch.randperm(len(images))
    return images[order], labels[order]


def noisy(batch):
    return batch[0] + torch.rand(batch[0].shape, dtype=torch.float64), batch[1]


def forgets(batch):
    batch[0].double()


def drops_one(batch):
    return batch[0][1:].double(), batch[1][1:]
"""


def images(rows: int = 101) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (rows, 12), dtype=torch.uint8, generator=generator)
    return TensorDataset(pixels, torch.randint(0, 4, (rows,), generator=generator))


def batches(batch_size: int = 32) -> DataLoader[Any]:
    return DataLoader(images(), batch_size, shuffle=True, generator=torch.Generator().manual_seed(9))


def train(session: Session, epochs: int = 2, **options: Any) -> Any:
    given = {"model": "Deep", "criterion": "CrossEntropyLoss", "preprocess": "to_float", **options}
    return session.train(batches(), epochs, CELL, **given)


def plain(epochs: int = 2) -> tuple[torch.nn.Module, list[float]]:
    """The same in plain PyTorch, with the function called in the loop."""
    names: dict[str, Any] = {}
    exec(CELL, names)
    torch.manual_seed(0)
    model = names["Deep"]().double()
    optimizer, losses, loader = torch.optim.AdamW(model.parameters(), lr=0.01), [], batches()
    for _ in range(epochs):
        for batch in loader:
            x, y = names["to_float"](batch)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return model, losses


MODES: list[tuple[str, int, dict[str, Any]]] = [
    ("data", 1, {}),
    ("data", 3, {}),
    ("tensor", 2, {"tensor_plan": {"0": "colwise", "2": "rowwise"}}),
    ("pipeline", 3, {"micro_batches": 2}),
    ("pipeline", 2, {"micro_batches": 2, "pipeline_balance": "time"}),
    ("zero", 2, {"zero_stage": 2}),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mode", "workers", "settings"), MODES, ids=lambda value: str(value)[:8])
def test_functions_of_the_user_run_on_the_worker_and_change_no_result(
    pool_of_three: Session, mode: str, workers: int, settings: dict[str, Any]
) -> None:
    pool_of_three.ensure(workers)
    pool_of_three.orch.set_mode(mode, path="relay", **settings)
    try:
        run = train(pool_of_three, augment="shuffled", val_loader=DataLoader(images(), 30))
        model, losses = plain()
        assert [record["loss"] for record in run.history] == pytest.approx(losses, abs=1e-12)
        assert difference(run.model(), model) <= 1e-9
        model.eval()
        x, y = images().tensors
        with torch.no_grad():
            truth = torch.nn.functional.cross_entropy(model((x.double() - 128) / 64), y).item()
        assert run.validations[-1]["loss"] == pytest.approx(truth, abs=1e-12)
        assert run.validations[-1]["samples"] == 101
    finally:
        pool_of_three.orch.set_mode("data")


def test_bytes_travel_in_the_dtype_they_have(pool_of_three: Session) -> None:
    pool_of_three.ensure(1)
    one = train(pool_of_three, 1)
    two = train(pool_of_three, 2)
    messages = len(two.history) - len(one.history)
    sent = two.wire.sample_bytes - one.wire.sample_bytes
    raw = 101 * (12 + 8)  # uint8 pixels, int64 labels
    assert raw <= sent <= raw + 512 * messages


def test_augmentation_repeats_from_the_seed_and_differs_between_shards(pool_of_three: Session) -> None:
    pool_of_three.ensure(2)
    first, again, other = (train(pool_of_three, 2, augment="noisy", seed=seed) for seed in (1, 1, 2))
    assert first.report()["train_loss"] == again.report()["train_loss"]
    assert first.report()["train_loss"] != other.report()["train_loss"]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [("forgets", "preprocess 'forgets' returned None"), ("drops_one", "returned 31 samples")],
)
def test_a_function_that_gives_no_batch_back_is_named(pool_of_three: Session, function: str, sentence: str) -> None:
    pool_of_three.ensure(1)
    with pytest.raises((ConfigError, RemoteError), match=sentence):
        train(pool_of_three, preprocess=function)
    assert len(train(pool_of_three).history) == 8  # the worker stayed up
