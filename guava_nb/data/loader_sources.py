"""The user's DataLoader, built again so that each batch comes with the ids of its samples.

Knows torch's DataLoader; knows no run and no position in it. A rebuilt loader draws the same random numbers in the same
order as the user's own would. Three kinds of source have one face: `open(skip_batches)` walks one epoch.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data.datapipes.datapipe import MapDataPipe

from guava_nb.data.frozen_batch import snapshot
from guava_nb.data.loader_wrappers import TOLD, Collate, Counted, LeaveOut, Located, Recorder, Unread, rebuild
from guava_nb.data.split import has_rows, num_rows
from guava_nb.data.worker_data import WorkerData
from guava_nb.errors import ConfigError, TrainingError

__all__ = ["LoadError", "Source", "make_source"]

#: A batch, the ids of its samples, and its rows.
Loaded = tuple[Any, tuple[int, ...], int]


class LoadError(TrainingError):
    """A batch could not be loaded: the user's data set, collate function or loader process failed.

    Attributes:
        batch_index: the batch in its epoch, from 0.
        sample_ids: the samples of that batch, as far as they are known.
        sample: index of the one sample that failed, as text; "" when it is not known.
        loader_traceback: the traceback of where it happened, in this process or in a loader process.
    """

    def __init__(self, batch_index: int, sample_ids: tuple[int, ...], cause: BaseException) -> None:
        """Build the sentence from what was raised; chain `cause` with `raise ... from`."""
        told = TOLD.search(str(cause))
        self.batch_index = batch_index
        self.sample_ids = sample_ids
        self.sample = told["sample"] if told else ""
        self.loader_traceback = "".join(traceback.format_exception(cause))
        what = f"sample {self.sample} (batch {batch_index})" if told else f"batch {batch_index}{_span(sample_ids)}"
        super().__init__(f"{what} could not be loaded: {told['reason'].strip() if told else _reason(cause)}")

    def _render_traceback_(self) -> list[str]:
        """The message, and the traceback, which is the user's code."""
        return [*super()._render_traceback_(), "", *self.loader_traceback.rstrip().splitlines()]


class Source(Protocol):
    """One thing to load batches from, epoch after epoch."""

    #: Whether batches are loaded in this process, so that its random state is part of a position.
    in_process: bool
    #: Samples in the batches that the last walk skipped; None where these are not loaded and nobody counts them.
    skipped: int | None

    def __len__(self) -> int:
        """Batches per epoch; TypeError when it is unknown."""
        ...

    def num_samples(self) -> int | None:
        """Samples drawn in an epoch; None when it is unknown."""
        ...

    def open(self, skip_batches: int, when_skipped: Callable[[], None] | None) -> Iterator[Loaded]:
        """Walk one epoch, from the batch after the skipped ones on.

        `when_skipped` is called when batches were skipped without loading them, before anything is drawn for the next.
        """
        ...

    def leave_out(self, wanted: LeaveOut) -> None:
        """Do not load batches of which `wanted(indices)` says so; they come as `Unread`.

        Raises:
            ConfigError: there are no indices.
        """
        ...

    def example(self, parts: int) -> Any:
        """The first samples, as a batch of the size of one of `parts` equal parts of a batch; ConfigError without."""
        ...

    def generators(self) -> dict[str, torch.Generator]:
        """The generators that decide about order, by name."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers that want to know."""
        ...

    def close(self) -> None:
        """End processes that persist."""
        ...


def make_source(loader: Any) -> Source:
    """The source for what a user gave.

    Raises:
        ConfigError: it is nothing that batches come from.
    """
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        return _IterableSource(loader) if isinstance(loader.dataset, IterableDataset) else _MapSource(loader)
    if isinstance(loader, WorkerData):
        raise ConfigError(
            "data that lies at the workers is given to start_training, as train_loader or val_loader; validating and "
            "predicting outside of a run need a loader here"
        )
    if isinstance(loader, Dataset):
        raise ConfigError(f"a data set ({type(loader).__name__}) gives samples, not batches: wrap it in a DataLoader")
    if not isinstance(loader, Iterable) or isinstance(loader, (str, bytes, dict, torch.Tensor)):
        raise ConfigError(
            f"batches come from a DataLoader or an iterable of batches, not from a {type(loader).__name__}"
        )
    return _PlainSource(loader)


class _MapSource:
    """A loader over a data set with indices: ids are the indices that its sampler draws."""

    skipped: int | None = None

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._theirs = loader
        self._batched = loader.batch_sampler is not None
        self._recorder = Recorder(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        sampling = (
            {"batch_sampler": self._recorder} if self._batched else {"sampler": self._recorder, "batch_size": None}
        )
        dataset = loader.dataset
        if not isinstance(dataset, MapDataPipe):  # a pipe's graph is walked by torch and must stay as it is
            dataset = Located(dataset)
        self._loader = rebuild(loader, dataset, Collate(loader.collate_fn), sampling)
        self.in_process = loader.num_workers == 0

    def __len__(self) -> int:
        return len(self._recorder)

    def leave_out(self, wanted: LeaveOut) -> None:
        if not self._batched or isinstance(self._theirs.dataset, MapDataPipe):
            raise _not_static(self._theirs)
        self._recorder.leave_out = wanted

    def num_samples(self) -> int | None:
        theirs = self._theirs
        if not self._batched or theirs.batch_size is None:  # whatever one index, or the user's own batches, may hold
            return None
        try:
            drawn = len(theirs.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        return drawn - drawn % theirs.batch_size if theirs.drop_last else drawn

    def open(self, skip_batches: int, when_skipped: Callable[[], None] | None) -> Iterator[Loaded]:
        self._recorder.skip, self._recorder.when_skipped = skip_batches, when_skipped
        ordinal = 0

        def failing() -> tuple[int, ...]:
            return _int_ids(self._recorder.drawn[0][0]) if self._recorder.drawn else ()

        for index, batch in _each(iter(self._loader), skip_batches, failing, self.in_process):
            indices, left = self._recorder.drawn.popleft()
            ids = _int_ids(indices) if left else ()
            loaded = (
                (Unread(ids, partial(self._read, index, ids)), ids, len(ids))
                if left
                else self._identify(batch, indices, ordinal)
            )
            ordinal += loaded[2]
            yield loaded

    def _identify(self, batch: Any, indices: Any, ordinal: int) -> Loaded:
        ids = _int_ids(indices)
        rows = _count_rows(batch, len(ids) if self._batched or ids else None)
        # Indices that are no integers, or one index for a whole batch, do not tell samples apart: their place does.
        return _own(batch, self._theirs), ids or tuple(range(ordinal, ordinal + rows)), rows

    def _read(self, batch: int, ids: tuple[int, ...]) -> Any:
        dataset = self._loader.dataset
        try:
            return self._theirs.collate_fn([dataset[index] for index in ids])
        except Exception as error:
            raise LoadError(batch, ids, error) from error

    def example(self, parts: int) -> Any:
        theirs = self._theirs
        rows = -(-(theirs.batch_size or getattr(theirs.batch_sampler, "batch_size", None) or parts) // parts)
        if not self._batched or not hasattr(theirs.dataset, "__len__"):
            raise _without_indices(theirs)
        ids = tuple(range(min(rows, len(theirs.dataset))))
        try:
            return theirs.collate_fn([theirs.dataset[index] for index in ids])
        except Exception as error:
            raise LoadError(0, ids, error) from error

    def generators(self) -> dict[str, torch.Generator]:
        owners = {
            "loader": self._theirs,
            "sampler": self._theirs.sampler,
            "batch_sampler": self._theirs.batch_sampler,
            "batch_sampler.sampler": getattr(self._theirs.batch_sampler, "sampler", None),
        }
        return _generators_of(owners)

    def set_epoch(self, epoch: int) -> None:
        theirs = self._theirs
        _tell_epoch((theirs.sampler, theirs.batch_sampler, getattr(theirs.batch_sampler, "sampler", None)), epoch)

    def close(self) -> None:
        del self._loader  # its processes end with it


class _IterableSource:
    """A loader over a stream: ids are ordinals within the epoch."""

    skipped: int | None = 0

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._theirs = loader
        self._batched = loader.batch_size is not None
        collate = Counted(loader.collate_fn) if self._batched else loader.collate_fn
        sampling = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        self._loader = rebuild(loader, loader.dataset, collate, sampling)
        self.in_process = loader.num_workers == 0

    def __len__(self) -> int:
        if self._theirs.num_workers:
            raise TypeError("each loader process walks the stream in its own way")
        return len(self._theirs)

    def num_samples(self) -> int | None:
        return None  # a stream's length is a promise at best

    def open(self, skip_batches: int, when_skipped: Callable[[], None] | None) -> Iterator[Loaded]:
        ordinal = self.skipped = 0

        def failing() -> tuple[int, ...]:
            return (ordinal,)

        for index, batch in _each(iter(self._loader), 0, failing, self.in_process):
            drawn, batch = batch if self._batched else (None, batch)
            rows = _count_rows(batch, drawn)
            ids = tuple(range(ordinal, ordinal + (rows if drawn is None else drawn)))
            ordinal += len(ids)
            if index >= skip_batches:
                yield _own(batch, self._theirs), ids, rows
            else:
                self.skipped = ordinal

    def leave_out(self, wanted: LeaveOut) -> None:
        raise _not_static(self._theirs)

    def example(self, parts: int) -> Any:
        raise _without_indices(self._theirs)

    def generators(self) -> dict[str, torch.Generator]:
        return _generators_of({"loader": self._theirs})

    def set_epoch(self, epoch: int) -> None:
        _tell_epoch((self._theirs.dataset,), epoch)

    def close(self) -> None:
        del self._loader  # its processes end with it


class _PlainSource:
    """Any iterable of batches: ids are ordinals within the epoch."""

    in_process = True
    skipped: int | None = 0

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # TypeError is the answer where there is no length

    def num_samples(self) -> int | None:
        return None

    def open(self, skip_batches: int, when_skipped: Callable[[], None] | None) -> Iterator[Loaded]:
        ordinal = self.skipped = 0

        def failing() -> tuple[int, ...]:
            return (ordinal,)

        for index, batch in _each(iter(self._batches), 0, failing, self.in_process):
            rows = num_rows(batch)
            ordinal += rows
            if index >= skip_batches:
                kept = isinstance(self._batches, (list, tuple))  # the batches of a list lie there anyway
                yield batch if kept else snapshot(batch), tuple(range(ordinal - rows, ordinal)), rows
            else:
                self.skipped = ordinal

    def leave_out(self, wanted: LeaveOut) -> None:
        raise _not_static(self._batches)

    def example(self, parts: int) -> Any:
        raise _without_indices(self._batches)

    def generators(self) -> dict[str, torch.Generator]:
        return _generators_of({"loader": self._batches})

    def set_epoch(self, epoch: int) -> None:
        _tell_epoch((self._batches,), epoch)

    def close(self) -> None:
        """Nothing persists here."""


# ------------------------------------------------------------------------------------------------------------- details


def _each(
    batches: Iterator[Any], start: int, failing: Callable[[], tuple[int, ...]], in_process: bool
) -> Iterator[tuple[int, Any]]:
    """Batches with their index; whatever goes wrong in loading one is a LoadError about the ids of `failing`."""
    index = start
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            failed = LoadError(index, failing(), error)
            # The traceback would keep torch's iterator until the garbage collector comes, and collected that way its
            # processes need five seconds each to end. In this process the frames are the user's, for a debugger.
            del batches
            if not in_process:
                traceback.clear_frames(error.__traceback__)
            raise failed from error
        yield index, batch
        index += 1


def _own(batch: Any, loader: DataLoader[Any]) -> Any:
    """The batch in memory that nobody fills again: loading goes on while it waits to be sent."""
    made_anew = loader.num_workers > 0 or (loader.batch_sampler is not None and loader.collate_fn is default_collate)
    return batch if made_anew else snapshot(batch)


def _count_rows(batch: Any, drawn: int | None) -> int:
    """Rows of a batch for which `drawn` samples were taken; a collate function may have dropped or added some."""
    if drawn is not None and has_rows(batch, drawn) and not _are_fields(batch, drawn):
        return drawn
    try:
        return num_rows(batch)
    except ConfigError:
        if drawn is None:
            raise
        return drawn


def _not_static(loader: Any) -> ConfigError:
    return ConfigError(
        f"cache_static needs a DataLoader that makes batches of a data set with indices, and this {type(loader).__name__} does "
        "not; leave it out, the samples are then compared in each epoch"
    )


def _are_fields(batch: Any, drawn: int) -> bool:
    """Whether a list of `drawn` elements is not one of samples: (images, labels) of two drawn samples, one of them dropped.

    Fields have equally many rows and differ in kind; samples of one data set are of one kind.
    """
    if type(batch) not in (list, tuple) or not all(isinstance(field, torch.Tensor) and field.ndim for field in batch):
        return False
    rows, kinds = {len(field) for field in batch}, {(field.ndim, field.dtype) for field in batch}
    return len(rows) == 1 and rows != {drawn} and len(kinds) > 1


def _without_indices(loader: Any) -> ConfigError:
    return ConfigError(
        f"this {type(loader).__name__} has no data set with indices, so no sample can be looked at before its turn; "
        "balance stages by parameters, or name the split points"
    )


def _int_ids(indices: Any) -> tuple[int, ...]:
    """Indices as ids; () when they are not a series of integers."""
    try:
        return tuple(map(operator.index, indices))
    except TypeError:
        return ()


def _generators_of(owners: dict[str, Any]) -> dict[str, torch.Generator]:
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: generator for name, generator in found.items() if isinstance(generator, torch.Generator)}


def _tell_epoch(owners: Iterable[Any], epoch: int) -> None:
    for owner in {id(owner): owner for owner in owners}.values():
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _reason(cause: BaseException) -> str:
    """What was raised, in one line; from a loader process comes a whole traceback as text."""
    text = str(cause).strip()
    if "Original Traceback" in text:
        return text.rpartition("\n")[2]
    return f"{type(cause).__name__}: {text}"


def _span(ids: tuple[int, ...]) -> str:
    if not ids:
        return ""
    if len(ids) == 1:
        return f" (from sample {ids[0]} on)"
    return f" (samples {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''})"
