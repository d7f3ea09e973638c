"""Training with rows kept at the workers equals plain PyTorch, and what was sent once is not sent again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.protocol.messages import (
    BatchShard,
    CacheSpec,
    Evaluate,
    Factory,
    GradientBucket,
    Message,
    RowList,
    RowsWanted,
    counted_as,
)
from guava_nb.training.run import Run
from tests.support.direct import DirectWorker, make_cluster
from tests.support.training import dataset, difference, job_for, loader, losses_of, plain, plan_for, spec

CACHE = CacheSpec("memory", 1 << 20)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = make_cluster()
    yield made
    made.close()


class Watched(DirectWorker):
    """A worker of which the bytes of samples are counted as the wire counts them."""

    def __init__(self, cluster: Cluster, name: str, hook: Callable[..., None] = lambda worker, message: None) -> None:
        super().__init__(cluster, name, hook)
        self.sample_bytes = 0
        self.said: Counter[type[Message]] = Counter()
        send = self.session.send

        def counted(message: Message, channel: int, buffers: Any = ()) -> None:
            size = sum(buffer.nbytes for buffer in buffers)
            if isinstance(message, BatchShard | Evaluate) and counted_as(message, size) == channel:
                self.sample_bytes += size
            send(message, channel, buffers)

        self.session.send = counted  # type: ignore[method-assign]

    def _send(self, message: Message, buffers: Any) -> None:
        self.said[type(message)] += 1
        super()._send(message, buffers)


class PerEpoch:
    """A callback: sample bytes of each epoch."""

    def __init__(self, workers: list[Watched]) -> None:
        self.workers, self.totals = workers, [sum(worker.sample_bytes for worker in workers)]

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        self.totals.append(sum(worker.sample_bytes for worker in self.workers))

    @property
    def bytes(self) -> list[int]:
        return [b - a for a, b in zip(self.totals, self.totals[1:], strict=False)]


def train(
    cluster: Cluster, workers: list[Watched], data: Any, epochs: int = 3, cache: CacheSpec = CACHE, **changes: Any
) -> tuple[Run, list[int]]:
    for worker in workers:
        if not worker.thread.is_alive():
            worker.start()
    cluster.wait_for(len(workers), 10)
    counted = PerEpoch(workers)
    plan = plan_for(data, epochs, callbacks=[counted], **changes)
    number = sum(worker.said.total() for worker in workers)
    job = job_for(cluster, spec(cache=cache), plan, f"run-{number}")
    job.start()
    assert job.run.wait(60), job.run
    job.run.result()
    assert (job.run.lost_samples, job.run.duplicated_samples) == (0, 0)
    return job.run, counted.bytes


def assert_equal(run: Run, data: Any, epochs: int = 3, **changes: Any) -> None:
    model, losses = plain(spec(), data, epochs, **changes)
    assert losses_of(run) == pytest.approx(losses, abs=1e-12)
    assert difference(run.model(), model) <= 1e-9


ROW_BYTES = 10 * 8 + 8


@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_worker_gets_every_sample_once_in_all(cluster: Cluster, accumulate: int) -> None:
    run, sent = train(cluster, [Watched(cluster, "w0")], loader(), accumulation_steps=accumulate)
    assert 101 * ROW_BYTES <= sent[0] <= 101 * ROW_BYTES + 200 and sent[1:] == [0, 0]
    assert_equal(run, loader(), accumulate=accumulate)


def test_with_a_fixed_order_three_workers_get_every_sample_once_in_all(cluster: Cluster) -> None:
    ordered = DataLoader(dataset(), batch_size=32)
    run, sent = train(cluster, [Watched(cluster, f"w{k}") for k in range(3)], ordered)
    assert sent[0] >= 101 * ROW_BYTES and sent[1:] == [0, 0]
    assert_equal(run, ordered)


def test_with_a_shuffled_order_most_samples_go_to_who_holds_them(cluster: Cluster) -> None:
    run, sent = train(cluster, [Watched(cluster, f"w{k}") for k in range(3)], loader(), epochs=5)
    assert all(later < sent[0] / 3 for later in sent[1:]) and sent[4] < sent[1]
    assert_equal(run, loader(), 5)


def test_a_budget_that_is_too_small_still_trains_right_and_saves_a_part(cluster: Cluster) -> None:
    some = CacheSpec("memory", 40 * (16 + ROW_BYTES + 160))
    run, sent = train(cluster, [Watched(cluster, "w0")], loader(), cache=some)
    assert 61 * ROW_BYTES <= sent[1] <= 61 * ROW_BYTES + 200 and sent[2] == pytest.approx(sent[1], abs=64)
    assert_equal(run, loader())


class Augmented(Dataset[Any]):
    """Is another at every look, like a random crop, for every second sample.

    The generator is its own, because the workers of this test share torch's with the loader.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        base = torch.full((10,), float(index), dtype=torch.float64) / 60
        noise = torch.randn(10, dtype=torch.float64, generator=self.generator)
        return (base + noise if index % 2 else base), index % 4


def test_samples_that_change_between_epochs_are_never_served_stale(cluster: Cluster) -> None:
    told: list[str] = []
    cluster.notice = told.append
    run, sent = train(cluster, [Watched(cluster, "w0")], DataLoader(Augmented(), batch_size=16))
    assert sent[1] == sent[2] == pytest.approx(sent[0] / 2, rel=0.05)  # the half that changed
    assert not [line for line in told if "change between epochs" in line]
    assert_equal(run, DataLoader(Augmented(), batch_size=16))


class Noise(Augmented):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(10, dtype=torch.float64, generator=self.generator), index % 4


def test_that_a_cache_saves_nothing_is_told_once(cluster: Cluster) -> None:
    told: list[str] = []
    cluster.notice = told.append
    _, sent = train(cluster, [Watched(cluster, "w0")], DataLoader(Noise(), batch_size=16), epochs=4)
    assert len({*sent}) == 1
    assert len([line for line in told if "change between epochs" in line]) == 1


class Shuffled(IterableDataset[Any]):
    """The same samples in another order each time."""

    def __iter__(self) -> Iterator[Any]:
        data = dataset()
        return (data[int(i)] for i in torch.randperm(len(data)))  # type: ignore[arg-type]


def test_an_iterable_in_another_order_is_known_by_its_content(cluster: Cluster) -> None:
    told: list[str] = []
    cluster.notice = told.append
    _, sent = train(cluster, [Watched(cluster, "w0")], DataLoader(Shuffled(), 16))
    assert sent[1:] == [0, 0] and not [line for line in told if "change between epochs" in line]


def test_batches_that_cannot_be_taken_apart_are_sent_whole_and_that_is_told(cluster: Cluster) -> None:
    def by_two(batch: Any, ranges: Any) -> list[Any]:
        return [tuple(part[a:b] for part in batch) for a, b in ranges]

    told: list[str] = []
    cluster.notice = told.append
    run, sent = train(cluster, [Watched(cluster, f"w{k}") for k in range(2)], loader(), split_fn=by_two)
    assert len({*sent}) == 1
    assert len([line for line in told if "split function" in line]) == 1
    assert_equal(run, loader())


def test_a_worker_that_lacks_what_it_was_thought_to_hold_asks_and_the_run_goes_on(cluster: Cluster) -> None:
    workers = [Watched(cluster, f"w{k}") for k in range(2)]

    class Forgetful:
        """After the first epoch half of what is held is gone, as from a disk."""

        def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
            for worker in workers:
                store = worker.loop._reader._store
                store.drop(list(store.sizes())[::2])  # type: ignore[union-attr]

    ordered = DataLoader(dataset(), batch_size=32)
    for worker in workers:
        worker.start()
    cluster.wait_for(2, 10)
    counted = PerEpoch(workers)
    job = job_for(cluster, spec(cache=CACHE), plan_for(ordered, 3, callbacks=[Forgetful(), counted]))
    job.start()
    assert job.run.wait(60)
    job.run.result()
    assert all(worker.said[RowsWanted] for worker in workers)
    assert 0 < counted.bytes[1] < counted.bytes[0]
    assert_equal(job.run, ordered)


def test_a_lost_worker_s_rows_are_sent_to_those_who_go_on(cluster: Cluster) -> None:
    seen: Counter[str] = Counter()

    def dies(worker: DirectWorker, message: Message) -> None:
        seen[worker.name] += isinstance(message, GradientBucket)
        if worker.name == "w1" and seen["w1"] == 20:
            worker.die()

    ordered = DataLoader(dataset(), batch_size=32)
    run, sent = train(cluster, [Watched(cluster, f"w{k}", dies) for k in range(3)], ordered, epochs=5)
    assert sent[4] == 0
    assert_equal(run, ordered, 5)


def test_a_second_run_finds_what_the_first_one_sent(cluster: Cluster) -> None:
    workers = [Watched(cluster, "w0")]
    train(cluster, workers, loader())
    run, sent = train(cluster, workers, loader())
    assert sent == [0, 0, 0] and workers[0].said[RowList] == 0  # both sides agreed at once
    assert_equal(run, loader())


def test_who_disagrees_is_asked_for_the_list(cluster: Cluster) -> None:
    workers = [Watched(cluster, "w0")]
    train(cluster, workers, loader())
    store = workers[0].loop._reader._store
    assert store is not None
    store.drop(list(store.sizes())[:11])
    run, sent = train(cluster, workers, loader())
    assert workers[0].said[RowList] == 1 and workers[0].said[RowsWanted] == 0
    assert 11 * ROW_BYTES <= sent[0] < 12 * ROW_BYTES + 200 and sent[1:] == [0, 0]
    assert_equal(run, loader())


@pytest.mark.parametrize("count", [1, 3])
def test_a_validation_set_is_sent_once(cluster: Cluster, count: int) -> None:
    workers = [Watched(cluster, f"w{k}") for k in range(count)]
    for worker in workers:
        worker.start()
    cluster.wait_for(count, 10)
    counted = PerEpoch(workers)
    ordered = DataLoader(dataset(), batch_size=32)
    plan = plan_for(ordered, 3, callbacks=[counted])
    plan.val_feed = LoaderFeed(DataLoader(dataset(77), batch_size=10))
    job = job_for(cluster, spec(cache=CACHE), plan)
    job.start()
    assert job.run.wait(60)
    job.run.result()
    assert counted.bytes[1:] == [0, 0]
    assert [v["samples"] for v in job.run.validations] == [77] * 3
    model, _ = plain(spec(), ordered, 3)
    model.eval()
    x, y = dataset(77).tensors
    assert job.run.validations[-1]["loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(model(x), y).detach())
    )


class Words(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((10,), index / 40, dtype=torch.float64), "y": index % 4, "name": f"sample {index}"}


def names_step(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    for x, name in zip(batch["x"], batch["name"], strict=True):
        assert name == f"sample {round(float(x[0]) * 40)}", "a row was put together of two samples"
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def test_strings_stay_with_their_rows(cluster: Cluster) -> None:
    workers = [Watched(cluster, f"w{k}") for k in range(2)]
    for worker in workers:
        worker.start()
    cluster.wait_for(2, 10)
    counted = PerEpoch(workers)
    run_spec = spec(cache=CACHE, criterion=None, step=Factory(f"{__name__}:names_step"))
    batches = DataLoader(Words(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(1))
    job = job_for(cluster, run_spec, plan_for(batches, 6, callbacks=[counted]))
    job.start()
    assert job.run.wait(60)
    job.run.result()
    assert counted.bytes[5] < counted.bytes[0] / 2


class Counting(Dataset[Any]):
    """Counts its looks; from `changes_at` looks on samples are others than they were."""

    def __init__(self, changes_at: int = 1 << 40) -> None:
        self.looks, self.changes_at = 0, changes_at

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.looks += 1
        return torch.full((10,), index / 50 - (self.looks >= self.changes_at), dtype=torch.float64), index % 4


def shuffled(data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(9), **options)


@pytest.mark.parametrize("count", [1, 2])
def test_samples_that_are_said_not_to_change_are_loaded_once(cluster: Cluster, count: int) -> None:
    data = Counting()
    workers = [Watched(cluster, f"w{k}") for k in range(count)]
    run, sent = train(cluster, workers, shuffled(data), 4, cache_static=True)
    assert data.looks == 101 if count == 1 else 101 <= data.looks < 4 * 101
    assert sent[1:] == [0, 0, 0] if count == 1 else sent[3] < sent[0]
    assert_equal(run, shuffled(Counting()), 4)


def test_loader_processes_leave_samples_out_too(cluster: Cluster) -> None:
    run, sent = train(cluster, [Watched(cluster, "w0")], shuffled(Counting(), num_workers=2), 3, cache_static=True)
    assert sent[1:] == [0, 0]
    assert_equal(run, shuffled(Counting(), num_workers=2))


def test_a_lost_worker_s_rows_are_loaded_again(cluster: Cluster) -> None:
    seen: Counter[str] = Counter()

    def dies(worker: DirectWorker, message: Message) -> None:
        seen[worker.name] += isinstance(message, GradientBucket)
        if worker.name == "w1" and seen["w1"] == 20:
            worker.die()

    workers = [Watched(cluster, f"w{k}", dies) for k in range(2)]
    run, sent = train(cluster, workers, shuffled(data := Counting()), 5, cache_static=True)
    assert data.looks > 101 and sent[4] == 0
    assert_equal(run, shuffled(Counting()), 5)


def test_that_samples_changed_although_they_were_said_not_to_is_found_when_one_is_loaded(cluster: Cluster) -> None:
    workers = [Watched(cluster, "w0")]
    some = CacheSpec("memory", 40 * (16 + ROW_BYTES + 160))
    workers[0].start()
    cluster.wait_for(1, 10)

    class Lose:
        def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
            store = workers[0].loop._reader._store
            store.drop(list(store.sizes()))  # type: ignore[union-attr]

    plan = plan_for(DataLoader(Counting(changes_at=102), batch_size=8), 3, callbacks=[Lose()], cache_static=True)
    job = job_for(cluster, spec(cache=some), plan)
    job.start()
    assert job.run.wait(60)
    with pytest.raises(ConfigError, match=r"sample \d+ is not what it was.*cache_static"):
        job.run.result()


def ragged(samples: list[Any]) -> Any:
    longest = max(int(y) for _, y in samples) + 1  # the batch decides how wide its rows are
    return (
        torch.stack([torch.nn.functional.pad(x, (0, longest))[:10] for x, _ in samples]),
        torch.tensor([y for _, y in samples]),
        torch.zeros(longest),
    )


def test_batches_of_several_forms_are_loaded_in_each_epoch(cluster: Cluster) -> None:
    data = Counting()
    loader_ = DataLoader(data, batch_size=3, collate_fn=ragged)
    run_spec = spec(cache=CACHE, criterion=None, step=Factory(f"{__name__}:first_two"))
    worker = Watched(cluster, "w0").start()
    cluster.wait_for(1, 10)
    job = job_for(cluster, run_spec, plan_for(loader_, 3, cache_static=True))
    job.start()
    assert job.run.wait(60)
    job.run.result()
    assert data.looks == 3 * 101 and worker.error is None


def first_two(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_list_of_batches_has_no_samples_to_leave_out(cluster: Cluster) -> None:
    plan = plan_for([(torch.zeros(4, 10), torch.zeros(4))], 2, cache_static=True)
    with pytest.raises(ConfigError, match="cache_static needs a DataLoader"):
        job_for(cluster, spec(cache=CACHE), plan)
