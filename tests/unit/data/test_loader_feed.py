"""Real DataLoaders: the plain loop's batches and random numbers, with ids, from any position on."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import types
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from guava_nb.data.codec import pack
from guava_nb.data.loader_feed import LoaderFeed, LoadError
from guava_nb.data.randomness import RandomState
from guava_nb.errors import CheckpointError, ConfigError

SAMPLES = 21

# Two loader processes on two cores may warn about their number, and forking after torch's threads began is what
# DataLoader itself does.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:This process:DeprecationWarning")


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index)), index


class Noisy(Numbers):
    """Draws from all three default streams, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(())), np.random.rand(), random.random()


class Broken(Numbers):
    def __init__(self, at: int = 17) -> None:
        self.at = at

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            raise ValueError(f"file {index} is broken")
        return index


class BrokenMany(Broken):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = SAMPLES, fail_at: int = -1) -> None:
        self.count, self.fail_at = count, fail_at

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        step = worker.num_workers if worker else 1
        for value in range(worker.id if worker else 0, self.count, step):
            if value == self.fail_at:
                raise OSError("the stream ended early")
            yield torch.tensor([float(value)])


class EagerSampler(Sampler[int]):
    """Draws its random numbers when asked for an iterator, and again while it is walked."""

    def __iter__(self) -> Iterator[int]:
        return self._walk(torch.randperm(SAMPLES).tolist())

    @staticmethod
    def _walk(order: list[int]) -> Iterator[int]:
        for index in order:
            torch.rand(())
            yield index

    def __len__(self) -> int:
        return SAMPLES


class NoLengthSampler(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def keep_odd(samples: list[Any]) -> Any:
    return torch.stack([image for image, label in samples if label % 2])


def ragged(samples: list[Any]) -> Any:
    return {"images": [image for image, _ in samples], "labels": [label for _, label in samples]}


def everything(samples: list[Any]) -> Any:
    return samples


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def flat(value: Any) -> Any:
    """Something that compares."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, (list, tuple)) else value


def state_now() -> str:
    return str(RandomState.take({}).to_plain()["torch"].sum()) + str(random.getstate()) + str(np.random.get_state())


class Drawing(Numbers):
    """Draws from streams of its own, of each kind."""

    def __init__(self) -> None:
        self.streams = [np.random.default_rng(1), np.random.RandomState(2), random.Random(3), random.SystemRandom()]
        self.torchs, self.kind = torch.Generator().manual_seed(4), np.random.Generator(np.random.MT19937(5))

    def __getitem__(self, index: int) -> Any:
        one, two, three, _ = self.streams
        return (
            index,
            one.random(),
            two.rand(),
            three.random(),
            torch.rand((), generator=self.torchs).item(),
            self.kind.random(),
        )


class Counting(Numbers):
    def __init__(self) -> None:
        self.calls, self.cache, self.file, self.seen = 0, {}, None, deque([0], 2)

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        self.file = self.file or object()
        self.cache[index] = index
        self.seen.append(index)
        return index


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "plain order": lambda **more: DataLoader(Numbers(), batch_size=4, **more),
    "shuffled": lambda **more: DataLoader(Numbers(), batch_size=4, shuffle=True, **more),
    "shuffled by a generator": lambda **more: DataLoader(
        Numbers(), batch_size=4, shuffle=True, generator=generator(), **more
    ),
    "last one dropped": lambda **more: DataLoader(Numbers(), batch_size=8, drop_last=True, shuffle=True, **more),
    "augmented": lambda **more: DataLoader(Noisy(), batch_size=4, shuffle=True, **more),
    "augmented from its own streams": lambda **more: DataLoader(Drawing(), batch_size=4, shuffle=True, **more),
    "own batch sampler": lambda **more: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers(), generator=generator()), 5, False), **more
    ),
    "list as batch sampler": lambda **more: DataLoader(Numbers(), batch_sampler=[[3, 1], [2], [0, 4, 5]], **more),
    "sampler that draws early": lambda **more: DataLoader(Numbers(), batch_size=4, sampler=EagerSampler(), **more),
    "with replacement": lambda **more: DataLoader(
        Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, 50), **more
    ),
    "own collate": lambda **more: DataLoader(Numbers(), batch_size=4, collate_fn=ragged, **more),
    "no length": lambda **more: DataLoader(Numbers(), batch_size=4, sampler=NoLengthSampler(), **more),
    "split in two": lambda **more: DataLoader(
        random_split(TensorDataset(torch.arange(SAMPLES)), [11, 10], generator())[0], batch_size=4, shuffle=True, **more
    ),
    "data set makes batches": lambda **more: DataLoader(
        TensorDataset(torch.arange(SAMPLES)),
        batch_size=None,
        sampler=BatchSampler(RandomSampler(range(SAMPLES)), 4, False),
        **more,
    ),
    "stream": lambda **more: DataLoader(Stream(), batch_size=4, **more),
    "stream, last one dropped": lambda **more: DataLoader(Stream(), batch_size=4, drop_last=True, **more),
    "stream of batches": lambda **more: DataLoader(Stream(5), batch_size=None, **more),
}
PROCESSES = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
PROCESS_IDS = ["in process", "two processes", "two that persist"]


# Starting processes takes a while: those cases where they could change something.
WITH_PROCESSES = ["shuffled by a generator", "sampler that draws early", "own batch sampler", "stream"]
CASES = [(name, 0) for name in LOADERS] + [(name, kind) for name in WITH_PROCESSES for kind in (1, 2)]


@pytest.mark.parametrize(("name", "kind"), CASES, ids=[f"{name}, {PROCESS_IDS[kind]}" for name, kind in CASES])
def test_batches_and_random_numbers_are_those_of_the_plain_loop(name: str, kind: int) -> None:
    processes = PROCESSES[kind]
    seed_everything(3)
    plain = LOADERS[name](**processes)
    expected = [[flat(batch) for batch in plain] for _ in range(2)]
    after = state_now()
    seed_everything(3)
    feed = LoaderFeed(LOADERS[name](**processes))
    got = [list(feed.epoch()) for _ in range(2)]
    assert [[flat(loaded.batch) for loaded in epoch] for epoch in got] == expected
    assert state_now() == after
    for epoch in got:
        assert [loaded.index for loaded in epoch] == list(range(len(epoch)))
        assert all(len(loaded.sample_ids) == loaded.rows for loaded in epoch)
    if feed.batches_per_epoch is not None:
        assert feed.batches_per_epoch == len(got[0])
    feed.close()


@pytest.mark.parametrize("processes", PROCESSES[:2], ids=PROCESS_IDS[:2])
def test_ids_are_the_indices_that_were_drawn(processes: dict[str, Any]) -> None:
    seed_everything(1)
    loaded = list(LoaderFeed(LOADERS["shuffled"](**processes)).epoch())
    for one in loaded:
        assert list(one.sample_ids) == one.batch[1].tolist()
    assert sorted(index for one in loaded for index in one.sample_ids) == list(range(SAMPLES))
    assert [one.rows for one in loaded] == [4, 4, 4, 4, 4, 1]
    batches = list(LoaderFeed(LOADERS["data set makes batches"](**processes)).epoch())
    assert [list(one.sample_ids) for one in batches] == [one.batch[0].tolist() for one in batches]


def test_streams_and_lists_of_batches_count_their_samples() -> None:
    loaded = list(LoaderFeed(LOADERS["stream"]()).epoch())
    assert [one.sample_ids for one in loaded] == [tuple(range(i, min(i + 4, SAMPLES))) for i in range(0, SAMPLES, 4)]
    feed = LoaderFeed([torch.zeros(3, 2), (torch.zeros(2), torch.zeros(2))])
    for _ in range(2):
        assert [one.sample_ids for one in feed.epoch()] == [(0, 1, 2), (3, 4)]
    assert feed.batches_per_epoch == 2
    assert LoaderFeed(LOADERS["stream"]()).batches_per_epoch is None
    assert LoaderFeed(LOADERS["no length"]()).batches_per_epoch is None

    class Lazy(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([torch.zeros(2), torch.ones(1)])

    assert [one.rows for one in LoaderFeed(Lazy(Numbers())).epoch()] == [2, 1]


def test_a_collate_function_may_drop_samples_or_keep_them_apart() -> None:
    loaded = list(LoaderFeed(DataLoader(Numbers(), batch_size=4, drop_last=True, collate_fn=keep_odd)).epoch())
    assert [one.rows for one in loaded] == [2, 2, 2, 2, 2]
    assert loaded[1].sample_ids == (4, 5, 6, 7)
    samples = list(LoaderFeed(DataLoader(Numbers(), batch_size=4, collate_fn=everything)).epoch())
    assert [one.rows for one in samples] == [4, 4, 4, 4, 4, 1]


def test_a_data_set_of_the_notebook_works_in_loader_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("__main__")
    exec(
        "from torch.utils.data import Dataset\n"
        "class Typed(Dataset):\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, index): return index * scale\n"
        "scale = 10\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "__main__", module)
    feed = LoaderFeed(DataLoader(module.Typed(), batch_size=3, num_workers=2, multiprocessing_context="fork"))
    assert [flat(one.batch) for one in feed.epoch()] == [[0, 10, 20], [30, 40, 50]]


SEEN: list[Any] = []


class Renamed(Numbers):
    name = "before"

    def __getitem__(self, index: int) -> Any:
        return self.name


def rename(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Renamed
    info.dataset.name = f"worker {worker_id}"


def test_worker_init_sees_the_users_own_data_set() -> None:
    feed = LoaderFeed(DataLoader(Renamed(), batch_size=4, num_workers=2, worker_init_fn=rename, collate_fn=everything))
    assert {name for one in feed.epoch() for name in one.batch} == {"worker 0", "worker 1"}


@pytest.mark.parametrize("processes", PROCESSES, ids=PROCESS_IDS)
def test_loader_processes_draw_different_numbers_in_every_epoch_and_repeat_from_the_seed(
    processes: dict[str, Any],
) -> None:
    def draw() -> list[Any]:
        seed_everything(11)
        feed = LoaderFeed(LOADERS["augmented"](**processes))
        values = [flat(one.batch[1:]) for _ in range(3) for one in feed.epoch()]
        feed.close()
        return values

    first = draw()
    for stream in range(3):
        numbers = [number for batch in first for number in batch[stream]]
        assert len(set(numbers)) == len(numbers) == 3 * SAMPLES
    assert draw() == first


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("processes", PROCESSES[:2], ids=PROCESS_IDS[:2])
@pytest.mark.parametrize("dataset", [Broken(), BrokenMany()], ids=["one by one", "many at once"])
def test_a_broken_sample_is_named(dataset: Any, processes: dict[str, Any]) -> None:
    got = []
    with pytest.raises(LoadError) as caught:
        for one in LoaderFeed(DataLoader(dataset, batch_size=5, **processes)).epoch():
            got.append(one.index)
    assert got == [0, 1, 2]
    assert str(caught.value) == "sample 17 (batch 3) could not be loaded: ValueError: file 17 is broken"
    assert (caught.value.batch_index, caught.value.sample_ids, caught.value.sample) == (3, (15, 16, 17, 18, 19), "17")
    shown = "\n".join(caught.value._render_traceback_())
    assert "in __getitem__" in shown
    assert 'raise ValueError(f"file {index} is broken")' in shown


@pytest.mark.parametrize("processes", PROCESSES[:2], ids=PROCESS_IDS[:2])
def test_a_broken_collate_function_and_stream_are_named(processes: dict[str, Any]) -> None:
    mixed = DataLoader([torch.zeros(2), torch.zeros(2), torch.zeros(3)], batch_size=3, **processes)
    with pytest.raises(LoadError, match=r"^batch 0 \(samples 0, 1, 2\) could not be loaded: RuntimeError: "):
        list(LoaderFeed(mixed).epoch())
    with pytest.raises(
        LoadError, match=r"^batch \d \(from sample \d+ on\) could not be loaded: OSError: the stream ended"
    ):
        list(LoaderFeed(DataLoader(Stream(fail_at=9), batch_size=2, **processes)).epoch())


class _Killed(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_loader_process_that_the_system_killed_is_named() -> None:
    """On a thread, as in a run: in the main one torch raises out of a signal's handler, wherever that is, with any lock held."""
    feed = LoaderFeed(DataLoader(_Killed(), batch_size=4, num_workers=1))
    with (
        ThreadPoolExecutor(1) as aside,
        pytest.raises(
            LoadError, match=r"a process of the DataLoader \(pid \d+\) was ended by signal 9; .* memory runs out"
        ),
    ):
        aside.submit(lambda: list(feed.epoch())).result(60)


def test_a_data_set_that_raises_stop_iteration_does_not_end_the_epoch_silently() -> None:
    class Short(Numbers):
        def __getitem__(self, index: int) -> Any:
            return next(iter([])) if index == 6 else index

    with pytest.raises(LoadError, match="sample 6"):
        list(LoaderFeed(DataLoader(Short(), batch_size=4)).epoch())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            DataLoader(TensorDataset(torch.zeros(5)), batch_size=8, drop_last=True),
            "5 samples with batch_size=8 and drop",
        ),
        (DataLoader(TensorDataset(torch.zeros(0)), batch_size=8), "no batches from 0 samples"),
        ([], "makes no batches"),
        (Numbers(), "wrap it in a DataLoader"),
        (3, "not from a int"),
        ("batches", "not from a str"),
        (
            torch.zeros(3),
            r"whole Tensor of shape \[3\] was given, not batches.*DataLoader\(TensorDataset\(X\), batch_size=32",
        ),
        (
            (torch.zeros(30, 2), np.zeros(30)),
            r"tuple of 2 whole arrays with 30 entries.*TensorDataset\(X, torch.as_tensor\(y\)\)",
        ),
        (
            {"x": torch.zeros(9, 2), "y": torch.zeros(9)},
            r"dict of whole arrays \(x, y\).*TensorDataset\(data\['x'\], data\['y'\]\)",
        ),
        (np.zeros((5, 2)), r"whole ndarray of shape \[5, 2\].*torch.as_tensor\(X\)"),
    ],
    ids=["dropped", "no samples", "empty list", "data set", "number", "text", "tensor", "pair", "dict", "array"],
)
def test_what_gives_no_batches_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderFeed(loader)


def test_an_empty_stream_and_a_used_up_iterator_are_told() -> None:
    with pytest.raises(ConfigError, match="had no batches"):
        list(LoaderFeed(DataLoader(Stream(0), batch_size=4)).epoch())
    feed = LoaderFeed(iter([torch.zeros(2)]))
    assert len(list(feed.epoch())) == 1
    with pytest.raises(ConfigError, match="used up in the first epoch"):
        list(feed.epoch())
    drained = (batch for batch in [torch.zeros(2)])
    list(drained)  # a loop of the user's, say, to look at the data
    with pytest.raises(
        ConfigError,
        match="iterator that is empty or was used up before, by a run or by a loop of yours, so it gave no batches",
    ):
        list(LoaderFeed(drained).epoch())


# ------------------------------------------------------------------------------------------------------------ position


def through_a_file(position: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(position, file)
    file.seek(0)
    pack(position)
    return torch.load(file, weights_only=True)


def walk(feed: LoaderFeed, epochs: int, steps: list[Any]) -> None:
    for _ in range(epochs):
        for one in feed.epoch():
            steps.append((one.index, one.sample_ids, flat(one.batch)))


EXACT = [name for name in LOADERS if name != "stream of batches"]


@pytest.mark.parametrize("done", [0, 1, 3], ids=lambda done: f"after {done}")
@pytest.mark.parametrize("name", EXACT)
def test_an_interrupted_epoch_goes_on_to_the_last_random_number(name: str, done: int) -> None:
    seed_everything(8)
    whole: list[Any] = []
    walk(LoaderFeed(LOADERS[name]()), 3, whole)
    after = state_now()

    seed_everything(8)
    feed, steps = LoaderFeed(LOADERS[name]()), []
    walk(feed, 1, steps)
    ahead = feed.epoch()  # two batches are loaded and never committed
    loaded = list(islice(ahead, done + 2))
    steps += [(one.index, one.sample_ids, flat(one.batch)) for one in loaded[:done]]
    position = through_a_file(feed.position(batches=done))

    seed_everything(1234)
    again = LoaderFeed(LOADERS[name]())
    again.restore(position)
    assert again.position()["batches"] == done
    walk(again, 2, steps)
    assert steps == whole
    assert state_now() == after


@pytest.mark.parametrize("name", ["shuffled", "own batch sampler", "stream"])
def test_order_survives_with_loader_processes(name: str) -> None:
    seed_everything(8)
    whole: list[Any] = []
    walk(LoaderFeed(LOADERS[name](num_workers=2)), 2, whole)
    seed_everything(8)
    feed = LoaderFeed(LOADERS[name](num_workers=2))
    ahead = feed.epoch()
    loaded = [next(ahead) for _ in range(3)]
    position = through_a_file(feed.position(batches=2))
    del ahead
    steps = [(one.index, one.sample_ids, flat(one.batch)) for one in loaded[:2]]
    again = LoaderFeed(LOADERS[name](num_workers=2))
    again.restore(position)
    walk(again, 2, steps)
    assert steps == whole


def test_the_end_of_an_epoch_and_the_moment_before_the_first_are_positions_too() -> None:
    seed_everything(2)
    whole: list[Any] = []
    walk(LoaderFeed(LOADERS["augmented"]()), 2, whole)
    seed_everything(2)
    feed, steps = LoaderFeed(LOADERS["augmented"]()), []
    before = feed.position()
    walk(feed, 1, steps)
    at_the_end = feed.position()
    for position, have in ((before, []), (at_the_end, steps)):
        seed_everything(77)
        again, more = LoaderFeed(LOADERS["augmented"]()), list(have)
        again.restore(position)
        walk(again, 2, more)
        assert more == whole


def test_what_was_drawn_after_an_epoch_goes_before_the_next() -> None:
    for name in ("shuffled", "stream"):
        whole, steps = list[Any](), list[Any]()
        for taken in (False, True):
            seed_everything(2)
            feed = LoaderFeed(LOADERS[name]())
            walk(feed, 1, steps if taken else whole)
            torch.rand(3)  # a validation
            if taken:
                position = through_a_file(feed.position(at_end=True))
                seed_everything(77)
                feed = LoaderFeed(LOADERS[name]())
                feed.restore(position)
                assert list(feed.epoch()) == []
            walk(feed, 1, steps if taken else whole)
        assert steps == whole


@pytest.mark.parametrize("processes", PROCESSES, ids=PROCESS_IDS)
def test_random_numbers_that_begin_anew_are_told(processes: dict[str, Any]) -> None:
    def told(name: str, *, at_the_end: bool = False) -> list[str]:
        feed = LoaderFeed(LOADERS[name](**processes))
        loading = feed.epoch()
        next(loading)
        position = feed.position(batches=1)
        list(loading)
        position = feed.position() if at_the_end else {**position, "now": None}
        feed.close()
        again = LoaderFeed(LOADERS[name](**processes))
        again.restore(position)
        list(again.epoch()) + list(again.epoch())
        again.close()
        return again.take_notes()

    assert told("shuffled") == told("own batch sampler") == []
    for name in ("augmented", "augmented from its own streams"):
        (note,) = told(name)
        assert note.startswith("epoch 1 went on after batch 1, and its loader draws random numbers")
    persists = "persistent_workers" in processes
    assert len(told("augmented", at_the_end=True)) == persists


def test_what_the_loader_counts_is_told_where_it_goes_on() -> None:
    feed = LoaderFeed(DataLoader(Counting(), batch_size=4))
    list(feed.epoch())
    position = through_a_file(feed.position())
    again = LoaderFeed(DataLoader(Counting(), batch_size=4))
    again.restore(position)
    (note,) = again.take_notes()
    assert note.startswith(
        "loading changes dataset.calls, dataset.seen, and what is saved of the place in the data lacks that"
    )
    feed.restore(feed.position(batches=3))
    assert len(feed.take_notes()) == 1


def test_a_run_that_ends_early_leaves_streams_where_a_plain_loop_does() -> None:
    seed_everything(4)
    for number, _ in enumerate(LOADERS["augmented"]()):
        if number == 1:
            break
    plain = state_now()
    seed_everything(4)
    feed = LoaderFeed(LOADERS["augmented"]())
    ahead = feed.epoch()
    for _ in range(4):
        next(ahead)
    feed.leave(0, 2)
    assert state_now() == plain


def test_skipped_batches_are_not_loaded() -> None:
    loads: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> Any:
            loads.append(index)
            return index

    loaded = list(LoaderFeed(DataLoader(Watched(), batch_size=4)).epoch(skip_batches=4))
    assert [one.index for one in loaded] == [4, 5]
    assert loads == list(range(16, SAMPLES))


def test_an_epoch_left_early_does_not_disturb_the_next() -> None:
    for processes in PROCESSES:
        feed = LoaderFeed(LOADERS["shuffled"](**processes))
        early = feed.epoch()
        next(early)
        del early
        for one in feed.epoch():
            assert list(one.sample_ids) == one.batch[1].tolist()
        feed.close()


def test_samplers_that_count_epochs_are_told() -> None:
    def loader() -> Any:
        sampler = DistributedSampler(Numbers(), num_replicas=1, rank=0)
        return DataLoader(Numbers(), batch_size=4, sampler=sampler)

    expected = []
    plain = loader()
    for epoch in range(3):
        plain.sampler.set_epoch(epoch)
        expected.append([flat(batch) for batch in plain])
    feed = LoaderFeed(loader())
    got = [[flat(one.batch) for one in feed.epoch()] for _ in range(2)]
    again = LoaderFeed(loader())
    again.restore(feed.position(epoch=1, batches=6))
    assert list(again.epoch()) == []
    got.append([flat(one.batch) for one in again.epoch()])
    assert got == expected


def test_a_position_that_cannot_be_read_is_refused() -> None:
    feed = LoaderFeed([torch.zeros(2)])
    position = feed.position()
    for damaged in ({}, {**position, "version": 9}, {**position, "start": {"numpy": 3}}):
        with pytest.raises(CheckpointError):
            feed.restore(damaged)
    walk(feed, 9, [])
    with pytest.raises(ConfigError, match="too long ago"):
        feed.position(epoch=0, batches=0)


def test_sequential_sampler_without_generator_has_none_to_save() -> None:
    feed = LoaderFeed(DataLoader(Numbers(), batch_size=4, sampler=SequentialSampler(Numbers())))
    assert feed.position()["start"]["generators"] == {}


def test_a_pair_of_fields_from_two_samples_of_which_one_was_dropped_has_one_row() -> None:
    """Two fields are as many as two samples, so only their kinds tell them from a list of samples."""

    def first_only(samples: list[Any]) -> Any:
        return torch.zeros(1, 10), torch.tensor([len(samples)])

    def as_list(samples: list[Any]) -> Any:
        return [torch.zeros(3, 8, 8) for _ in samples]

    data = TensorDataset(torch.zeros(4))
    assert [b.rows for b in LoaderFeed(DataLoader(data, 2, collate_fn=first_only)).epoch()] == [1, 1]
    assert [b.rows for b in LoaderFeed(DataLoader(data, 2, collate_fn=as_list)).epoch()] == [2, 2]


def test_an_example_is_the_first_samples_and_draws_nothing() -> None:
    class Noisy(Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.rand(2) + index, index

    torch.manual_seed(3)
    plain = list(DataLoader(Noisy(), batch_size=4, shuffle=True))
    torch.manual_seed(3)
    feed = LoaderFeed(DataLoader(Noisy(), batch_size=4, shuffle=True))
    inputs, ids = feed.example(2)
    assert ids.tolist() == [0, 1] and inputs.shape == (2, 2)
    for loaded, (values, labels) in zip(feed.epoch(), plain, strict=True):
        assert torch.equal(loaded.batch[0], values) and torch.equal(loaded.batch[1], labels)


def test_an_example_needs_a_data_set_with_indices() -> None:
    with pytest.raises(ConfigError, match="no data set with indices"):
        LoaderFeed([torch.zeros(2, 1)]).example(1)


class NotebookOnly(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """As a cell defines it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2)


def test_a_class_of_a_cell_and_spawned_loader_processes_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NotebookOnly, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    inside = torch.utils.data.Subset(NotebookOnly(), [0, 1])
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    with pytest.raises(ConfigError, match=r"begin by 'spawn' and cannot import NotebookOnly.*num_workers=0"):
        LoaderFeed(DataLoader(inside, **spawned))
    LoaderFeed(DataLoader(inside))
    LoaderFeed(DataLoader([1.0, 2.0], **spawned))
    sys.modules["__main__"].__file__ = "train.py"  # a spawned process runs a script's file again
    LoaderFeed(DataLoader(inside, **spawned))
