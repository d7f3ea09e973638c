"""Batches on their way to real workers: what travels, what is done to it there, how far ahead, and who waits for whom."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from guava_nb.errors import ConfigError, RemoteError
from guava_nb.render import session_view, to_text
from tests.support.processes import CELL as TRAPS
from tests.support.processes import ROOT, Session, difference, eventually

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


# ------------------------------------------------------------------------------------------- ahead of need, and the status


class Big(Dataset[Any]):
    """Rows of a megabyte, made when they are asked for; counts them."""

    def __init__(self, rows: int = 60) -> None:
        self.rows, self.made = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.made += 1
        return torch.full((1_000_000,), index % 251, dtype=torch.uint8), index % 4


HELD = (
    TRAPS
    + """

class Few(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(10, 4)

    def forward(self, x):
        global _calls
        _calls += not checking()
        trap("forward")
        return self.head(x[:, :10].double())
"""
)


def test_what_is_held_stays_bounded_however_slow_a_worker_is(pool_of_three: Session) -> None:
    """A worker that stands still: bytes in flight and bytes loaded stop within the budget, and go on when it does."""
    (worker,) = pool_of_three.ensure(1)
    budget = 8_100_000  # four batches
    pool_of_three.orch.config = pool_of_three.orch.config.replace(prefetch_bytes=budget)
    try:
        dataset = Big()
        worker.trap("forward", 3)
        run = pool_of_three.train(
            DataLoader(dataset, 2), 1, HELD.format(folder=str(pool_of_three.folder)),
            model="Few", criterion="CrossEntropyLoss", detach=True,
        )  # fmt: skip
        worker.wait_trapped()
        rank = next(w.rank for w in pool_of_three.orch.status().workers if w.name == worker.name)
        in_flight = eventually(
            lambda: (found := run.feeding().in_flight[rank])[0] == 4 and found, 20, "the budget is in use"
        )
        assert 4 * 2_000_000 < in_flight[1] <= budget  # the batch in work among them

        def shown() -> tuple[int, int]:
            workers = pool_of_three.orch.status().workers
            return next((w.queued_batches, w.queued_bytes) for w in workers if w.name == worker.name)

        eventually(lambda: shown() == in_flight, 20, "the status shows it, when the steps before are told as done")
        loaded = eventually(lambda: pool_of_three.orch.status().run.loaded_batches, 20, "a batch is ready")
        assert loaded == 1  # a quarter of the budget is held ready
        assert dataset.made <= 2 * (2 + 4 + 1 + 1)  # two done, four in flight, one ready, one being loaded
        text = to_text(session_view(pool_of_three.orch.status()))
        assert "4 batches, 8.0 MB" in text and "1 batches, 2.0 MB, ready to be sent" in text
        worker.release()
        assert run.wait(60)
        run.result()
        assert (dataset.made, run.lost_samples) == (60, 0)
    finally:
        pool_of_three.orch.config = pool_of_three.orch.config.replace(prefetch_bytes=64 << 20)


SLOW_WORKER = (
    CELL
    + """

def slow_loss(outputs, targets):
    import time
    time.sleep(0.03)
    return nn.functional.cross_entropy(outputs, targets)
"""
)


class Slow(Dataset[Any]):
    """Takes its time."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.03)
        return torch.zeros(12, dtype=torch.uint8), index % 4


def test_who_waits_for_whom_is_told(pool_of_three: Session) -> None:
    pool_of_three.ensure(1)
    slow_data = pool_of_three.train(
        DataLoader(Slow(), 2), 2, CELL, model="Deep", criterion="CrossEntropyLoss", preprocess="to_float"
    )
    quick = DataLoader(images(200), 2)
    slow_worker = pool_of_three.train(quick, 1, SLOW_WORKER, model="Deep", criterion="slow_loss", preprocess="to_float")
    (starved,), (busy,) = slow_data.report()["waits"], slow_worker.report()["waits"]
    assert starved["gpu_waits_for_data"] > 0.5 > busy["gpu_waits_for_data"]
    assert busy["data_waits_for_gpu"] > 0.2 > starved["data_waits_for_gpu"]
    assert starved["seconds"] > 0
    text = to_text(session_view(pool_of_three.orch.status()))
    assert "worker waits for data" in text and "data waits for worker" in text


def test_a_run_over_compressed_links_is_the_same_with_fewer_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 400 kB that compress: exact losses, and the wire's counters show what was sent."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pixels = images(64).tensors[0].repeat(1, 1000)  # the same twelve values a thousand times
    dataset = TensorDataset(pixels, images(64).tensors[1])
    cell = CELL + "\n\ndef first_values(batch):\n    return to_float((batch[0][:, :12], batch[1]))\n"
    figures = {}
    for mode in ("off", "on"):
        session = Session(tmp_path, num_workers=1, compression=mode)
        try:
            session.ensure(1)
            run = session.train(
                DataLoader(dataset, 32), 2, cell, model="Deep", criterion="CrossEntropyLoss", preprocess="first_values"
            )
            figures[mode] = (run.report()["train_loss"], run.wire.sample_bytes)
        finally:
            session.close()
    raw = 2 * 64 * 12_000
    assert figures["on"][0] == figures["off"][0]
    assert figures["off"][1] > raw and figures["on"][1] < raw / 10
