"""Batches of the user's loader in order, each with the ids of its samples, from any position on.

Knows loaders and random state; knows no worker and no step. Batches and samples are counted per epoch, from 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, SequentialSampler

from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.loader_sources import LoadError, make_source
from guava_nb.data.loader_wrappers import LeaveOut
from guava_nb.data.randomness import KeptByObjects, RandomState
from guava_nb.epoch_record import EpochRecord
from guava_nb.errors import CheckpointError, ConfigError

__all__ = ["MOST_BATCHES", "LoaderFeed", "LoadError", "LoadedBatch"]

_POSITION_VERSION = 1
#: Batches that may be on their way and not committed.
MOST_BATCHES = 128
# How far commits may lag behind loading (what is on its way, and what is held ready) before the random state inside an
# epoch is no longer known.
_KEPT_STATES = 2 * MOST_BATCHES
_KEPT_EPOCHS = 4
#: Beginnings of the names of streams that are drawn from for the order of the samples.
_OF_THE_ORDER = ("loader", "sampler", "batch_sampler", "its sampler", "its batch_sampler")
#: Batches after which caches are filled and files open, and what an object still replaces is what it counts or remembers.
_SETTLED = 1


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """One batch as the loader gave it.

    Attributes:
        index: its place in the epoch, from 0.
        batch: what the collate function made.
        sample_ids: indices in the data set as the sampler drew them, in row order; ordinals within the epoch where
            there are no indices (streams, lists of batches). As many as `rows`, unless the collate function dropped or
            added rows: then the ids belong to the batch as a whole.
        rows: samples in the batch.
        source: 0; or the batch is an int64 tensor of sample ids in this data set of the workers, counted from 1.
    """

    index: int
    batch: Any
    sample_ids: tuple[int, ...]
    rows: int
    source: int = 0


class LoaderFeed:
    """Walks a loader epoch by epoch.

    Draws the same random numbers as a plain `for batch in loader` would: its order, its augmentations and the state of
    the random generators afterwards are those of the plain loop.

    Args:
        loader: a DataLoader, or an iterable of batches. A DataLoader subclass with its own `__iter__` counts as the
            latter. `pin_memory` and `in_order=False` are not followed; everything else of a DataLoader is.
        source: goes into every batch, see `LoadedBatch`.
        batch: how the user says that batches are read, see `guava_nb.data.reading_words`.

    Attributes:
        loader: as it was given.
        reading: how they are read.
        record: where the orders came from, and how batches look.

    Raises:
        ConfigError: batches do not come from this, or it has none; `batch` has another form.
    """

    def __init__(self, loader: Any, source: int = 0, batch: str | None = None) -> None:
        self.loader, self._source = loader, make_source(loader)
        self.reading = self._source.reading = BatchReading(batch or "", self._source.stacks, self._few)
        self._number, self.record = source, EpochRecord(loader)
        self._one_shot = isinstance(loader, Iterator)
        self._drawn_once = _is_drawn_once(loader)
        self._is_shuffled = not _is_in_order(loader)
        self._epoch = -1
        self._batches = 0
        self._has_ended, self._astray = False, ""
        self._settled: KeptByObjects | None = None
        self._notes, self._told = list[str](), set[str]()
        self._resume: Mapping[str, Any] | None = None
        self._starts: OrderedDict[int, RandomState] = OrderedDict()
        self._states: OrderedDict[tuple[int, int], RandomState] = OrderedDict()
        if self.batches_per_epoch == 0:
            raise ConfigError(_empty_sentence(loader))

    @property
    def data_set(self) -> Any:
        """What the samples come from: the loader's data set, else the loader itself."""
        return self._source.data_set

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in an epoch; None where the loader cannot tell."""
        try:
            return len(self._source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples that an epoch draws; None where the loader cannot tell."""
        return self._source.num_samples()

    @property
    def skipped_samples(self) -> int | None:
        """Samples in the batches that the last walk skipped; None where these are not loaded and so not counted."""
        return self._source.skipped

    def epoch(self, skip_batches: int | None = None) -> Iterator[LoadedBatch]:
        """The batches of the next epoch, or the rest of the one that `restore` pointed into.

        Args:
            skip_batches: begin after so many batches. Where the data set has indices the skipped ones are not loaded.
                None means those of `restore`, or none.

        Raises:
            LoadError: while iterating, when a batch cannot be loaded.
            ConfigError: while iterating, when the epoch has no batch at all.
        """
        resume, self._resume = self._resume, None
        if resume is None:
            return self._walk(self._epoch + 1, skip_batches or 0, None, None)
        skip = int(resume["batches"]) if skip_batches is None else skip_batches
        start = RandomState.from_plain(resume["start"])
        now = resume["now"] if skip == resume["batches"] else None
        return self._walk(int(resume["epoch"]), skip, start, now and RandomState.from_plain(now))

    def _walk(self, epoch: int, skip: int, start: RandomState | None, now: RandomState | None) -> Iterator[LoadedBatch]:
        source, streams = self._source, self._source.streams()
        if start is not None:
            start.put(streams)
        self._epoch, self._batches, self._has_ended = epoch, skip, False
        _remember(self._starts, epoch, RandomState.take(streams), _KEPT_EPOCHS)
        self.record.begin(epoch)
        source.set_epoch(epoch)
        streams = source.streams()  # it may have made others
        if start is not None:
            self._astray = self._unlike(epoch, skip, now is not None)
        # A skipped batch draws no random numbers of its data set; its state of then makes up for it.
        when_skipped = None if now is None else partial(now.put, streams)
        last: RandomState | None = None
        for batch, ids, rows in source.open(skip, when_skipped):
            index, self._batches = self._batches, self._batches + 1
            self.record.see(batch)
            if source.in_process:
                state = RandomState.take(streams)
                _remember(self._states, (epoch, index + 1), state, _KEPT_STATES)
                if self._astray and last is not None and not state.is_same(last, _OF_THE_ORDER):
                    self._tell("drawn", self._astray)
                last = state
                if self._settled is None and index >= _SETTLED:
                    self._settled = source.kept()
            elif self._astray and source.drew:
                self._tell("drawn", self._astray)
            yield LoadedBatch(index, batch, ids, rows, self._number)
        if now is not None and self._batches == skip:
            now.put(streams)
        self._has_ended = True
        if self._batches == 0:
            raise ConfigError(self._none_text(epoch))

    def _none_text(self, epoch: int) -> str:
        """Say why an epoch had no batches."""
        if not self._one_shot:
            return f"epoch {epoch} of the loader had no batches: there is nothing to do"
        why = (
            "was used up in the first epoch"
            if epoch > 0
            else "is empty or was used up before, by a run or by a loop of yours"
        )
        return f"the loader is an iterator that {why}, so it gave no batches: give a DataLoader or a list of batches"

    def _unlike(self, epoch: int, skip: int, has_state: bool) -> str:
        """What differs from an undisturbed run, if the loader draws random numbers, in a sentence; "" for nothing."""
        source = self._source
        lasts = source.is_persistent and epoch + skip > 0
        if not lasts and (not skip or has_state or source.loads_skipped):
            return ""
        begun = f"epoch {epoch + 1} {f'went on after batch {skip}' if skip else 'began'}, and its loader draws random numbers"
        if source.in_process:
            return (
                f"{begun} (augmentation, say), whose place in their streams is unknown: from there on they differ from those "
                "of an undisturbed run, and so does the order of the samples in later epochs, unless it has its own generator. "
                "A checkpoint goes on exactly"
            )
        until, without = ("the run", " without persistent_workers") if lasts else ("that epoch", "")
        return (
            f"{begun} (augmentation, say) in processes of its own, which began anew: to the end of {until} they differ from "
            "those of an undisturbed run; the order of the samples is the same. A checkpoint of an epoch's end goes on exactly"
            f"{without}, and with num_workers=0 any does"
        )

    def _tell(self, kind: str, note: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._notes.append(note)

    def take_notes(self) -> list[str]:
        """Sentences on what differs from an undisturbed run, each once."""
        notes, self._notes = self._notes, []
        return notes

    def example(self, parts: int) -> Any:
        """Collate the first samples of the data set, as many as one of `parts` equal parts of a batch has.

        For looking at the data before it is used: no random number is drawn that would not have been.

        Raises:
            ConfigError: the loader has no data set with indices.
            LoadError: a sample cannot be loaded.
        """
        with self._untouched():
            return self._source.example(parts)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Draw inside only to look: random state goes back, and what the user's objects count or keep."""
        streams, kept = self._source.streams(), self._source.kept()
        state = RandomState.take(streams)
        try:
            yield
        finally:
            state.put(streams)
            kept.put_back()

    def kept(self) -> KeptByObjects | None:
        """What the user's objects keep now; None where loader processes have copies of their own."""
        return self._source.kept() if self._source.in_process else None

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch, where the loader says it."""
        return self._source.batch_size

    @property
    def loads_here(self) -> bool:
        """Whether samples are made in this process, where others draw from its streams of random numbers too."""
        return self._source.in_process and not self.gives_ids

    @property
    def next_batch(self) -> int:
        """Index of the batch with which the next walk begins."""
        return 0 if self._resume is None else int(self._resume["batches"])

    @property
    def gives_ids(self) -> bool:
        """Whether batches are ids of samples that the workers have."""
        return self._number > 0

    def _few(self, samples: int) -> Any:
        """A batch of so many samples, to see which of its axes grows with them; None where none can be made."""
        with self._untouched():
            try:
                return self._source.few(samples)
            except Exception:  # of the user's data set or collate function: told in its turn, if it happens there too
                return None

    @property
    def is_shuffled(self) -> bool:
        """Whether another order is to be expected in each epoch: all but lists, and loaders that read in order."""
        return self._is_shuffled

    def peek(self, batches: int) -> list[LoadedBatch]:
        """Draw the first batches of an epoch only to look at them: random state and position stay as they are.

        Nothing is drawn of a loader that can be drawn once only.

        Raises:
            LoadError: one cannot be loaded.
        """
        if self._drawn_once or batches < 1:
            return []
        with self._untouched():
            walk = self._source.open(0, None)
            try:
                drawn = islice(walk, batches)
                return [LoadedBatch(i, batch, ids, rows, self._number) for i, (batch, ids, rows) in enumerate(drawn)]
            finally:
                getattr(walk, "close", lambda: None)()

    def position(self, epoch: int | None = None, batches: int | None = None, at_end: bool = False) -> dict[str, Any]:
        """Where to go on later, as plain data that `torch.load(weights_only=True)` reads.

        Args:
            epoch: None means that of the batch given out last.
            batches: batches of it that count as done; None means all that were given out. Loading may be ahead of
                what is committed: within the last 256 batches the position is exact to the random number.

        Raises:
            ConfigError: the epoch is not one of the last four that were begun.
        """
        if self._resume is not None and epoch is None and batches is None:
            return dict(self._resume)
        if self._epoch < 0:
            _remember(self._starts, 0, RandomState.take(self._source.streams()), _KEPT_EPOCHS)
        epoch = max(self._epoch, 0) if epoch is None else epoch
        batches = self._batches if batches is None else batches
        if epoch not in self._starts:
            raise ConfigError(f"epoch {epoch} is too long ago to go back to: known are {list(self._starts)}")
        now = self._states.get((epoch, batches))
        if self._has_ended and (epoch, batches) == (self._epoch, self._batches):
            now = RandomState.take(
                self._source.streams()
            )  # what drew since, as a validation, goes before the next epoch
        kept = None if self._settled is None else self._source.kept()
        return {
            "version": _POSITION_VERSION,
            "epoch": epoch,
            "batches": batches,
            "start": self._starts[epoch].to_plain(),
            "now": None if now is None else now.to_plain(),
            "kept": [] if kept is None or self._settled is None else sorted(kept.replaced_since(self._settled)),
        }

    def walks(self) -> dict[str, Any]:
        """How often it was walked, and where its own random streams are, as plain data; the default streams are left out."""
        streams = RandomState.take(self._source.streams()).to_plain()["generators"]
        return {"epochs": self._epoch + 1, "generators": streams}

    def walk_on(self, walks: Mapping[str, Any]) -> None:
        """Let the next `epoch()` be the one that followed `walks()`.

        Raises:
            CheckpointError: it is not what `walks` gives.
        """
        if type(walks.get("epochs")) is not int:
            raise CheckpointError("the saved place of the validation loader is no number of epochs")
        here = RandomState.take({}).to_plain()
        RandomState.from_plain({**here, "generators": walks.get("generators")}).put(self._source.streams())
        self._epoch = walks["epochs"] - 1

    def leave(self, epoch: int, batches: int) -> None:
        """The run ends after so many batches of an epoch: let random streams be where a plain loop leaves them."""
        if self._batches > batches and epoch == self._epoch:
            there, here = (self._states.get((epoch, number)) for number in (batches, self._batches))
            if there is not None and here is not None and not there.is_same(here):
                there.put(self._source.streams())

    def restore(self, position: Mapping[str, Any]) -> None:
        """Let the next `epoch()` go on at a position: the same order, after the same batches.

        Random numbers that data sets draw in loader processes (`num_workers` > 0) begin anew at the position, which
        `take_notes` tells; all others go on as if nothing had been interrupted.

        Raises:
            CheckpointError: it is no position, or of another version.
        """
        if position.get("version") != _POSITION_VERSION:
            raise CheckpointError(
                f"another version of guava_nb saved the place in the data: it is of version {position.get('version')!r}, and "
                f"this one reads version {_POSITION_VERSION}"
            )
        for state in (position["start"], position["now"]):
            if state is not None:
                RandomState.from_plain(state)  # damage is told now, not in the middle of a run
        if names := ", ".join(list(map(str, position.get("kept", ())))[:4]):
            self._tell(
                "kept",
                f"loading changes {names}, and what is saved of the place in the data lacks that: the batches from here "
                "on find it as it is in this process, so they may differ from those of an undisturbed run. Compute it from the "
                "epoch (set_epoch of the sampler) or from the index of the sample, or train all epochs in one run",
            )
        self._resume = dict(position)

    def read_beyond(self, epoch: int, batches: int) -> int:
        """How many batches of an epoch were read beyond the first so many of it."""
        return max(0, self._batches - batches) if epoch == self._epoch else 0

    def leave_out(self, wanted: LeaveOut) -> None:
        """Do not load batches of which `wanted(indices)` says so, each time one is drawn; they come as `Unread`.

        Raises:
            ConfigError: the loader has no indices.
        """
        self._source.leave_out(wanted)

    def close(self) -> None:
        """End loader processes that persist between epochs; the feed cannot be walked again."""
        self._source.close()


def _is_drawn_once(loader: Any) -> bool:
    """Whether the loader, or what its samples or their order come from, is an iterator."""
    parts = [loader]
    for name in ("dataset", "sampler", "batch_sampler"):
        parts.append(getattr(loader, name, None))
    return any(isinstance(part, Iterator) for part in parts)


def _is_in_order(loader: Any) -> bool:
    if isinstance(loader, list | tuple):
        return True
    # A loader with a batch sampler of the user's own has a sampler that says nothing.
    batches = getattr(loader, "batch_sampler", None)
    sampler = loader.sampler if type(batches) is BatchSampler else None
    return isinstance(sampler, SequentialSampler)


_K = TypeVar("_K", bound=Hashable)


def _remember(states: OrderedDict[_K, RandomState], key: _K, state: RandomState, keep: int) -> None:
    states[key] = state
    states.move_to_end(key)
    while len(states) > keep:
        states.popitem(last=False)


def _empty_sentence(loader: Any) -> str:
    dataset: Any = getattr(loader, "dataset", None)
    samples = f" from {len(dataset)} samples" if hasattr(dataset, "__len__") else ""
    dropped = f" with batch_size={loader.batch_size} and drop_last=True" if getattr(loader, "drop_last", False) else ""
    return f"the loader ({type(loader).__name__}) makes no batches{samples}{dropped}: there is nothing to do"
