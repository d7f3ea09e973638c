"""The user's DataLoader, built again so that each batch comes with the ids of its samples.

Knows torch's DataLoader; knows no run and no position in it. A rebuilt loader draws the same random numbers in the same
order as the user's own would. Three kinds of source have one interface: `open(skip_batches)` walks one epoch.
"""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from torch.utils.data.datapipes.datapipe import MapDataPipe

from guava_nb.data.batch_reading import BatchReading
from guava_nb.data.frozen_batch import snapshot
from guava_nb.data.loader_wrappers import (
    TOLD,
    Collate,
    Counted,
    Drew,
    LeaveOut,
    Located,
    Recorder,
    SampleFailed,
    Unread,
    check_spawned,
    rebuild,
)
from guava_nb.data.randomness import KeptByObjects
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
        self.loader_traceback = _of_the_user(cause)
        what = f"sample {self.sample} (batch {batch_index})" if told else f"batch {batch_index}{_span(sample_ids)}"
        super().__init__(f"{what} could not be loaded: {told['reason'].strip() if told else _reason(cause)}")

    def _render_traceback_(self) -> list[str]:
        """The message, and the traceback, which is the user's code."""
        return [*super()._render_traceback_(), "", *self.loader_traceback.rstrip().splitlines()]


class Source:
    """One thing to load batches from, epoch after epoch; as it stands, any iterable of batches.

    Without a data set that has indices the ids of samples are their ordinals within the epoch.

    Attributes:
        in_process: whether batches are loaded in this process, so that its random state is part of a position.
        loads_skipped: whether skipped batches are loaded all the same, and draw what they draw.
        drew: whether a loader process told that it draws random numbers.
        stacks: whether torch's own collate function makes the batches.
        reading: reads them; its owner may put another one here.
        skipped: samples in the batches that the last walk skipped; None where these are not loaded and so not counted.
    """

    in_process = loads_skipped = True
    stacks = drew = False
    skipped: int | None = 0

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._walked: Any = theirs
        #: Whether batches lie in memory that the loader does not fill again: loading goes on while they wait to be sent.
        self._is_kept = isinstance(theirs, list | tuple)
        self._random_parts = {"loader": theirs}
        self._epoch_parts = [theirs]
        self.reading = BatchReading()

    def __len__(self) -> int:
        """Batches per epoch; TypeError when it is unknown."""
        return len(self._theirs)

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch, where the loader says it."""
        return getattr(self._theirs, "batch_size", None)

    @property
    def data_set(self) -> Any:
        """What the samples come from: the loader's data set, else the loader."""
        return getattr(self._theirs, "dataset", self._theirs)

    def num_samples(self) -> int | None:
        """Samples drawn in an epoch; None when it is unknown."""
        return None  # a stream's length is a promise at best

    def open(self, skip_batches: int, when_skipped: Callable[[], None] | None) -> Iterator[Loaded]:
        """Walk one epoch, from the batch after the skipped ones on.

        `when_skipped` is called when batches were skipped without loading them, before anything is drawn for the next.
        """
        ordinal = self.skipped = 0

        def failing() -> tuple[int, ...]:
            return (ordinal,)

        for index, loaded in _each(iter(self._walked), 0, failing, self.in_process):
            drawn, batch = self._counted(self._heard(loaded))
            batch = self._own(batch) if index >= skip_batches else batch
            rows = self.reading.read(batch, drawn)
            ids = tuple(range(ordinal, ordinal + (rows if drawn is None else drawn)))
            ordinal += len(ids)
            if index >= skip_batches:
                yield batch, ids, rows
            else:
                self.skipped = ordinal

    def _counted(self, loaded: Any) -> tuple[int | None, Any]:
        """How many samples were drawn for a batch, where that is known, and the batch."""
        return None, loaded

    def _heard(self, loaded: Any) -> Any:
        """What was loaded, without the word of a loader process that it drew random numbers."""
        if type(loaded) is not Drew:
            return loaded
        self.drew = True
        return loaded.loaded

    def _own(self, batch: Any) -> Any:
        return batch if self._is_kept else snapshot(batch)

    def leave_out(self, wanted: LeaveOut) -> None:
        """Do not load batches of which `wanted(indices)` says so; they come as `Unread`.

        Raises:
            ConfigError: there are no indices.
        """
        raise ConfigError(
            "cache_static needs a DataLoader that makes batches of a data set with indices, and this "
            f"{type(self._theirs).__name__} does not; leave it out, the samples are then compared in each epoch"
        )

    def example(self, parts: int) -> Any:
        """The first samples, as a batch of the size of one of `parts` equal parts of a batch.

        Raises:
            ConfigError: there are no indices.
        """
        raise ConfigError(
            f"this {type(self._theirs).__name__} has no data set with indices, so no sample can be looked at before its "
            "turn; balance stages by parameters, or name the split points"
        )

    def few(self, samples: int) -> Any:
        """A batch of so many first samples; None where none can be made. Raises LoadError."""
        return None

    def streams(self) -> dict[str, Any]:
        """The streams that decide about order, and those of the user's own objects, by name."""
        found = {name: getattr(part, "generator", None) for name, part in self._random_parts.items()}
        deciding = {name: one for name, one in found.items() if isinstance(one, torch.Generator)}
        known = {id(one) for one in (*deciding.values(), torch.default_generator)}
        return deciding | {f"its {name}": one for name, one in self.kept().streams().items() if id(one) not in known}

    @property
    def is_persistent(self) -> bool:
        """Whether loader processes, and what they draw, go on from epoch to epoch."""
        return bool(getattr(self._theirs, "persistent_workers", False))

    def kept(self) -> KeptByObjects:
        """What the user's own objects keep now: the data set, what draws from it, what makes batches."""
        parts = {
            name: getattr(self._theirs, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")
        }
        own = {name: part for name, part in parts.items() if part is not None}
        return KeptByObjects(own or {"loader": self._theirs})

    def set_epoch(self, epoch: int) -> None:
        """Tell samplers and streams that want to know."""
        for part in {id(part): part for part in self._epoch_parts}.values():
            tell = getattr(part, "set_epoch", None)
            if callable(tell):
                tell(epoch)

    def close(self) -> None:
        """End processes that persist."""
        self._walked = ()  # they end with their loader


def make_source(loader: Any) -> Source:
    """The source for what a user gave.

    Raises:
        ConfigError: it is nothing that batches come from.
    """
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        check_spawned(loader)
        return _StreamSource(loader) if isinstance(loader.dataset, IterableDataset) else _MapSource(loader)
    if isinstance(loader, WorkerData):
        raise ConfigError(
            "data that lies at the workers is given to start_training, as train_loader or val_loader; validating and "
            "predicting outside of a run need a loader here"
        )
    if isinstance(loader, Dataset):
        raise ConfigError(f"a data set ({type(loader).__name__}) gives samples, not batches: wrap it in a DataLoader")
    if _are_arrays(loader):
        raise ConfigError(
            f"{_whole(loader)}, not batches; make batches of it: DataLoader({_rows_of(loader)}, batch_size=32, shuffle=True), "
            "with DataLoader and TensorDataset of torch.utils.data"
        )
    if not isinstance(loader, Iterable) or isinstance(loader, (str, bytes, dict)):
        raise ConfigError(
            f"batches come from a DataLoader or an iterable of batches, not from a {type(loader).__name__}"
        )
    return Source(loader)


class _MapSource(Source):
    """A loader over a data set with indices: ids are the indices that its sampler draws."""

    skipped: int | None = None
    loads_skipped = False

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._batched = loader.batch_sampler is not None
        self._recorder = Recorder(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        sampling = (
            {"batch_sampler": self._recorder} if self._batched else {"sampler": self._recorder, "batch_size": None}
        )
        # A pipe's graph is walked by torch and must stay as it is.
        self._dataset = loader.dataset if isinstance(loader.dataset, MapDataPipe) else Located(loader.dataset)
        self._walked = rebuild(loader, self._dataset, Collate(loader.collate_fn), sampling)
        self.in_process, self._is_kept = loader.num_workers == 0, _is_made_anew(loader)
        self.stacks = self._batched and loader.collate_fn is default_collate
        inner = getattr(loader.batch_sampler, "sampler", None)
        samplers = {"sampler": loader.sampler, "batch_sampler": loader.batch_sampler, "batch_sampler.sampler": inner}
        self._random_parts |= samplers
        self._epoch_parts = list(samplers.values())

    def __len__(self) -> int:
        return len(self._recorder)

    def leave_out(self, wanted: LeaveOut) -> None:
        if not self._batched or isinstance(self._dataset, MapDataPipe):
            super().leave_out(wanted)
        self._recorder.leave_out = wanted

    def num_samples(self) -> int | None:
        theirs = self._theirs
        if not self._batched or theirs.batch_size is None:  # whatever one index, or the user's own batches, may hold
            return None
        try:
            drawn = len(theirs.sampler)
        except (TypeError, NotImplementedError):
            return None
        return drawn - drawn % theirs.batch_size if theirs.drop_last else drawn

    def open(self, skip_batches: int, when_skipped: Callable[[], None] | None) -> Iterator[Loaded]:
        self._recorder.skip, self._recorder.when_skipped = skip_batches, when_skipped
        ordinal = 0

        def failing() -> tuple[int, ...]:
            return _int_ids(self._recorder.drawn[0][0]) if self._recorder.drawn else ()

        for index, batch in _each(iter(self._walked), skip_batches, failing, self.in_process):
            indices, left = self._recorder.drawn.popleft()
            batch = self._heard(batch)
            ids = _int_ids(indices) if left else ()
            loaded = (
                (Unread(ids, partial(self._collated, self._dataset, ids, index)), ids, len(ids))
                if left
                else self._identify(batch, indices, ordinal)
            )
            ordinal += loaded[2]
            yield loaded

    def _identify(self, batch: Any, indices: Any, ordinal: int) -> Loaded:
        ids, batch = _int_ids(indices), self._own(batch)
        rows = self.reading.read(batch, len(ids) if self._batched or ids else None)
        # Indices that are no integers, or one index for a whole batch, do not tell samples apart: their place does.
        return batch, ids or tuple(range(ordinal, ordinal + rows)), rows

    def _collated(self, dataset: Any, ids: tuple[int, ...], batch: int) -> Any:
        try:
            return self._theirs.collate_fn([dataset[index] for index in ids])
        except Exception as error:
            raise LoadError(batch, ids, error) from error

    def example(self, parts: int) -> Any:
        theirs = self._theirs
        rows = -(-(theirs.batch_size or getattr(theirs.batch_sampler, "batch_size", None) or parts) // parts)
        if not self._batched or not hasattr(theirs.dataset, "__len__"):
            return super().example(parts)
        return self._collated(theirs.dataset, tuple(range(min(rows, len(theirs.dataset)))), 0)

    def few(self, samples: int) -> Any:
        theirs = self._theirs
        enough = self._batched and hasattr(theirs.dataset, "__len__") and len(theirs.dataset) >= samples
        return self._collated(theirs.dataset, tuple(range(samples)), 0) if enough else None


class _StreamSource(Source):
    """A loader over a stream."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._batched = loader.batch_size is not None
        self.stacks = self._batched and loader.collate_fn is default_collate
        collate = Counted(loader.collate_fn) if self._batched else loader.collate_fn
        sampling = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        self._walked = rebuild(loader, loader.dataset, collate, sampling)
        self.in_process, self._is_kept = loader.num_workers == 0, _is_made_anew(loader)
        self._epoch_parts = [loader.dataset]

    def __len__(self) -> int:
        if self._theirs.num_workers:
            raise TypeError("each loader process walks the stream in its own way")
        return len(self._theirs)

    def _counted(self, loaded: Any) -> tuple[int | None, Any]:
        return loaded if self._batched else (None, loaded)


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
            failed = LoadError(index, failing(), _of_ended_process(batches, error) or error)
            # The traceback would keep torch's iterator until the garbage collector comes, and collected that way its
            # processes need five seconds each to end. In this process the frames are the user's, for a debugger.
            del batches
            if not in_process:
                traceback.clear_frames(error.__traceback__)
            raise failed from error
        yield index, batch
        index += 1


_ENDS_S = 5.0  # that a process may take to end after its pipe broke


def _of_ended_process(batches: Iterator[Any], error: Exception) -> RuntimeError | None:
    """What is to be told where a loader process was ended, and all else is the broken pipe to it."""
    processes = getattr(batches, "_workers", ())
    if processes and isinstance(
        error, ConnectionError | EOFError
    ):  # a pipe breaks before its process has an exit status
        ended = wait([process.sentinel for process in processes], _ENDS_S)
        for process in processes:
            if process.sentinel in ended:  # its files are closed; the system takes note of its end a little later
                process.join(_ENDS_S)
    for process in processes:
        if (status := process.exitcode) is not None and status < 0:
            why = "; the system does so where memory runs out: a smaller num_workers takes less" if status == -9 else ""
            return RuntimeError(f"a process of the DataLoader (pid {process.pid}) was ended by signal {-status}{why}")
    return None


#: In a written traceback: a frame of this package or of torch's loader, with its lines of code and marks.
_OURS = re.escape(str(Path(__file__).resolve().parents[1]))
_FRAME = re.compile(rf'^ *File "(?:{_OURS}|[^"\n]*/torch/utils/data)/[^"\n]*", .*\n(?:    .*\n)*', re.M)
#: What a loader process wrote of the first error, before ours.
_THERE = re.compile(
    r"Original (Traceback \(most recent call last\):\n.*?)(?=\n\nThe above exception was the direct|\Z)", re.S
)


def _of_the_user(cause: BaseException) -> str:
    """The traceback of what went wrong in the user's code, from there on; that of a loader process is in the error's text."""
    first = cause.__cause__ if isinstance(cause, SampleFailed) and cause.__cause__ is not None else cause
    whole = "".join(traceback.format_exception(first))
    there = _THERE.search(whole)
    theirs = _FRAME.sub("", whole if there is None else there[1])
    return theirs if '  File "' in theirs else whole


def _are_arrays(loader: Any) -> bool:
    """Whether a user gave whole arrays or tables in the place of a loader: one, or some that are equally long.

    A list of tensors of one kind may be a list of batches; a tuple is one of columns, such as (X, y).
    """
    if isinstance(loader, Mapping):
        loader = tuple(loader.values())
    if not isinstance(loader, list | tuple):
        return hasattr(loader, "__array__")
    if len(loader) < 2 or not all(hasattr(part, "__array__") and getattr(part, "shape", ()) for part in loader):
        return False
    kinds = {(len(part.shape), str(getattr(part, "dtype", ""))) for part in loader}
    return len({part.shape[0] for part in loader}) == 1 and (isinstance(loader, tuple) or len(kinds) > 1)


def _whole(loader: Any) -> str:
    """What was given, as the beginning of a sentence."""
    if isinstance(loader, Mapping):
        return f"a {type(loader).__name__} of whole arrays ({', '.join(map(str, loader))}) was given"
    if isinstance(loader, list | tuple):
        return (
            f"a {type(loader).__name__} of {len(loader)} whole arrays with {loader[0].shape[0]} entries each was given"
        )
    return f"a whole {type(loader).__name__} of shape {list(loader.shape)} was given"


def _rows_of(loader: Any) -> str:
    """The expression that makes a data set of the rows of what was given."""
    if isinstance(loader, Mapping):
        parts = [(f"data[{key!r}]", part) for key, part in loader.items()]
    elif isinstance(loader, list | tuple):
        names = ("X", "y") if len(loader) == 2 else tuple(f"part{number}" for number in range(len(loader)))
        parts = list(zip(names, loader, strict=True))
    else:
        parts = [("X", loader)]
    made = [
        name if isinstance(part, torch.Tensor) else f"torch.as_tensor({_plain(name, part)})" for name, part in parts
    ]
    return f"TensorDataset({', '.join(made)})"


def _plain(name: str, part: Any) -> str:
    return f"{name}.to_numpy()" if hasattr(part, "iloc") else name


def _is_made_anew(loader: DataLoader[Any]) -> bool:
    """Whether each batch lies in memory of its own."""
    return loader.num_workers > 0 or (loader.batch_sampler is not None and loader.collate_fn is default_collate)


def _int_ids(indices: Any) -> tuple[int, ...]:
    """Indices as ids; () when they are not a series of integers."""
    try:
        return tuple(map(operator.index, indices))
    except TypeError:
        return ()


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
