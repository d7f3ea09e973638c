"""Real worker processes keep samples: what is on the wire in later epochs, after a kill, and with a damaged file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from guava_nb import WorkerData
from guava_nb.errors import ConfigError, RemoteError
from guava_nb.training.run import Run
from tests.support.processes import ROOT, PlainTraining, Session, data, eventually, loader

ROWS = 101
ROW_BYTES = 10 * 8 + 8


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = tmp_path_factory.mktemp("cache")
        session = Session(folder, num_workers=2, worker_cache_mb=16, worker_cache_dir=str(folder / "rows"))
        try:
            yield session
        finally:
            session.close()


def ordered() -> DataLoader[Any]:
    return DataLoader(data(ROWS), batch_size=32)


class SampleBytes:
    """A callback: bytes of samples on the wire in each epoch."""

    def __init__(self) -> None:
        self.totals = [0]

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        self.totals.append(run.wire.sample_bytes)

    @property
    def bytes(self) -> list[int]:
        return [b - a for a, b in zip(self.totals, self.totals[1:], strict=False)]


def test_epoch_two_sends_no_sample_and_equals_plain_pytorch(pool: Session) -> None:
    pool.ensure(2)
    counted = SampleBytes()
    # The one-step check sends samples of its own.
    run = pool.train(ordered(), 3, cache="memory", callbacks=[counted], val_loader=ordered(), check="off")
    pool.assert_undisturbed(run, PlainTraining(pool.folder, ordered()).epochs(3))
    assert counted.bytes[0] >= 2 * ROWS * ROW_BYTES / 2 and counted.bytes[1:] == [0, 0]
    assert run.report()["wire"]["sample_bytes"] == counted.totals[-1]
    # Without a cache every epoch costs the same; the report says so in the same place.
    plain = SampleBytes()
    pool.train(ordered(), 2, callbacks=[plain], check="off")
    assert plain.bytes[0] == plain.bytes[1] > ROWS * ROW_BYTES


def test_one_worker_and_a_shuffled_order(pool: Session) -> None:
    pool.ensure(1)
    counted = SampleBytes()
    run = pool.train(loader(), 3, cache="memory", callbacks=[counted])
    pool.assert_undisturbed(run, PlainTraining(pool.folder, loader()).epochs(3))
    assert counted.bytes[1:] == [0, 0]


@pytest.mark.timeout(180)
def test_a_killed_worker_s_successor_proves_what_is_on_its_disk(pool: Session) -> None:
    first, second = pool.ensure(2)
    counted = SampleBytes()
    pool.train(ordered(), 1, cache="disk", callbacks=[counted])
    assert counted.bytes[0] >= ROWS * ROW_BYTES
    second.handle.kill()
    eventually(lambda: len(pool.ready()) == 1, 30, "the killed worker is gone")
    pool.ensure(2)  # another process, under another name
    counted = SampleBytes()
    run = pool.train(ordered(), 2, cache="disk", callbacks=[counted], check="off")
    pool.assert_undisturbed(run, PlainTraining(pool.folder, ordered()).epochs(2))
    assert counted.bytes == [0, 0]


@pytest.mark.timeout(180)
def test_a_worker_that_is_killed_in_the_middle_costs_its_rows_and_no_sample(pool: Session) -> None:
    first, second = pool.ensure(2)
    second.trap("forward", 6)  # in the second epoch, of rows that were kept in the first
    counted = SampleBytes()
    run = pool.train(ordered(), 4, cache="disk", callbacks=[counted], detach=True)
    second.wait_trapped()
    second.handle.kill()
    run.wait(60)
    pool.assert_undisturbed(run, PlainTraining(pool.folder, ordered()).epochs(4))
    assert counted.bytes[3] == 0


@pytest.mark.timeout(180)
def test_damaged_rows_on_disk_are_asked_for_again(pool: Session) -> None:
    pool.ensure(1)
    pool.train(ordered(), 1, cache="disk")
    files = sorted((pool.folder / "rows").glob("*/rows.sqlite"))
    assert files
    for path in files:
        with sqlite3.connect(path, timeout=30) as damage:
            damage.execute("UPDATE rows SET entry=zeroblob(length(entry)) WHERE rowid % 3 = 0")
        damage.close()
    counted = SampleBytes()
    run = pool.train(ordered(), 2, cache="disk", callbacks=[counted], check="off")
    pool.assert_undisturbed(run, PlainTraining(pool.folder, ordered()).epochs(2))
    assert 0 < counted.bytes[0] < ROWS * ROW_BYTES and counted.bytes[1] == 0
    assert any("missing or damaged" in note for note in pool.orch.status().notes)


DATA_CELL = """
import torch
from torch.utils.data import Dataset, TensorDataset


def own(rows={rows}):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 10, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (rows,), generator=generator))


class Torn(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 17:
            raise ValueError("this file is torn")
        return torch.zeros(10, dtype=torch.float64), 0
"""


def test_data_at_the_workers_is_fed_by_ids_alone(pool: Session) -> None:
    pool.ensure(2)
    pool.orch.share(DATA_CELL.format(rows=ROWS), "data")
    val = DataLoader(TensorDataset(*(t[:20] for t in data(ROWS).tensors)), batch_size=8)
    batches = WorkerData("own", batch_size=32, shuffle=True, seed=9)
    run = pool.train(batches, 2, data="worker")
    pool.assert_undisturbed(run, PlainTraining(pool.folder, loader()).epochs(2))
    assert run.wire.sample_bytes == 0 and run.total_steps == len(run.history)
    # A loader here and one there go together; resuming goes on at the same place.
    path = pool.orch.save_checkpoint(pool.folder / "own.pt")
    more = pool.train(batches, 3, data="worker", val_loader=val, resume=path)
    assert len(more.history) == 4 and more.validations[-1]["samples"] == 20
    plain = PlainTraining(pool.folder, loader()).epochs(3)
    assert [r["loss"] for r in more.history] == pytest.approx(plain.losses[8:], abs=1e-12)
    with pytest.raises(
        RemoteError, match=r"w\d+ raised SampleFailed: sample 17 of Torn .*ValueError: this file is torn"
    ):
        pool.train(WorkerData("Torn", 8))
    assert len(pool.ready()) == 2
    with pytest.raises(ConfigError, match="give WorkerData"):
        pool.train(loader(), data="worker")
    with pytest.raises(ConfigError, match="given to start_training"):
        pool.orch.validate(batches)
    pool.orch.set_mode("data", path="direct")
    try:
        with pytest.raises(ConfigError, match="path='relay'"):
            pool.train(batches)
    finally:
        pool.orch.set_mode("data", path="auto")


#: The same layers, in a form that can be cut into stages.
BLOCKS = """
from torch import nn


def Net():
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["zero", "pipeline"])
def test_a_group_s_members_keep_their_parts(pool: Session, mode: str) -> None:
    pool.ensure(2)
    counted = SampleBytes()
    pool.orch.set_mode(mode, **({"zero_stage": 1} if mode == "zero" else {"micro_batches": 2}))
    try:
        run = pool.train(
            ordered(),
            3,
            cell=BLOCKS,
            cache="memory",
            criterion="CrossEntropyLoss",
            callbacks=[counted],
            val_loader=ordered(),
            check="off",  # it sends samples of its own
        )
    finally:
        pool.orch.set_mode("data")
    plain = PlainTraining(Path(pool.folder), ordered()).epochs(3)
    assert [r["loss"] for r in run.history] == pytest.approx(plain.losses, abs=1e-9)
    assert counted.bytes[0] > 0 and counted.bytes[1:] == [0, 0]
    assert torch.isfinite(torch.tensor(run.validations[-1]["loss"]))
