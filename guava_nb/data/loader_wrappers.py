"""What is put into a DataLoader that is built again: the pieces around the user's sampler, data set and functions.

Knows what torch calls in the loading process and in loader processes, so everything here can be pickled. Every piece
does what the user's own would and remembers or says one thing more.
"""

from __future__ import annotations

import inspect
import multiprocessing
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FunctionType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from guava_nb.data.randomness import KeptByObjects, RandomState
from guava_nb.errors import ConfigError

__all__ = [
    "TOLD",
    "Collate",
    "Counted",
    "Drew",
    "LeaveOut",
    "Located",
    "Recorder",
    "SampleFailed",
    "Unread",
    "check_spawned",
    "rebuild",
]

#: Says of the indices of a batch whether its samples need not be loaded.
LeaveOut = Callable[[Sequence[int]], bool]

# These are decided here: the sampling and the data set are wrapped, and batches must come in order and stay unpinned,
# because they leave this process as bytes.
_DECIDED_HERE = frozenset(
    {
        "self",
        "dataset",
        "batch_size",
        "shuffle",
        "sampler",
        "batch_sampler",
        "collate_fn",
        "drop_last",
        "worker_init_fn",
    }
    | {"pin_memory", "pin_memory_device", "in_order"}
)


@dataclass(frozen=True, slots=True)
class _Left:
    """Stands for a sample that need not be loaded, on its way through the loader and its processes."""

    index: int


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a batch that was not loaded.

    Attributes:
        ids: of its samples.
        read: loads it after all; raises LoadError.
    """

    ids: tuple[int, ...]
    read: Callable[[], Any]


class Drew(NamedTuple):
    """What a loader process loaded, where it drew random numbers for it."""

    loaded: Any


class _Watch:
    """Sees, in a loader process, whether random numbers were drawn since it looked last."""

    here: _Watch | None = None

    def __init__(self, dataset: Any) -> None:
        self._streams = KeptByObjects({"dataset": dataset}).streams()
        self._last = RandomState.take(self._streams)

    def told(self, loaded: Any) -> Any:
        last, self._last = self._last, RandomState.take(self._streams)
        return loaded if self._last.is_same(last) else Drew(loaded)


def _told(loaded: Any) -> Any:
    return loaded if _Watch.here is None else _Watch.here.told(loaded)


class Collate:
    """The user's collate function, for batches that were loaded."""

    def __init__(self, inner: Callable[[Any], Any]) -> None:
        self.inner = inner

    def __call__(self, samples: Any) -> Any:
        """The batch; None where its samples were left out."""
        if isinstance(samples, list) and samples and type(samples[0]) is _Left:
            return None
        return _told(self.inner(samples))


class Recorder(Sampler[Any]):
    """The user's sampler, remembering what it drew; it can leave out the first draws, and mark batches not to load."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner
        self.leave_out: LeaveOut | None = None
        self.skip = 0
        self.when_skipped: Callable[[], None] | None = None
        self.drawn: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]  # TypeError is the answer where there is no length

    def __iter__(self) -> Iterator[Any]:
        # A fresh queue, because an epoch that was left early may have drawn ahead. Not a generator itself: a sampler
        # that draws random numbers when it is asked for an iterator must do so now, before the loader draws its own.
        # The loader may ask twice before it draws; `skip` stays what the owner set for this epoch.
        self.drawn = deque()
        return self._draw(iter(self.inner), self.drawn, self.skip, self.when_skipped)

    def _draw(
        self, inner: Iterator[Any], drawn: deque[Any], skip: int, when_skipped: Callable[[], None] | None
    ) -> Iterator[Any]:
        for _ in islice(inner, skip):
            pass
        if when_skipped is not None:
            when_skipped()
        for indices in inner:
            left = self.leave_out is not None and isinstance(indices, list) and self.leave_out(indices)
            # Decided here and now: a loader asks for batches ahead, and what was decided must go with the batch.
            drawn.append((list(indices) if isinstance(indices, list) else indices, left))
            yield [_Left(index) for index in indices] if left else indices


class Located(Dataset[Any]):
    """The user's data set; an error says which sample it was."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being unpickled, before there is one
            raise AttributeError(name)
        if name == "__getitems__":
            batch_reader = self.inner.__getitems__
            return lambda indices: self._many(batch_reader, indices)
        return getattr(self.inner, name)

    def __getitem__(self, index: Any) -> Any:
        if type(index) is _Left:
            return index
        try:
            return self.inner[index]
        except Exception as error:
            raise SampleFailed.at(index, error) from error

    def _many(self, batch_reader: Callable[[Sequence[Any]], Any], indices: Sequence[Any]) -> Any:
        if indices and type(indices[0]) is _Left:
            return list(indices)
        try:
            return batch_reader(indices)
        except Exception:
            for index in indices:  # the batch is lost anyhow: find out which sample it was
                self[index]
            raise


class SampleFailed(Exception):  # noqa: N818  it becomes a LoadError before a user sees it
    """Says the sample in its text, because only class and text of an exception survive a loader process."""

    @classmethod
    def at(cls, index: Any, error: BaseException) -> SampleFailed:
        """The failure of the sample at an index."""
        return cls(f"<sample {index!s}> {type(error).__name__}: {error}")


#: Finds what `SampleFailed` says, also after a loader process put its traceback before it.
TOLD = re.compile(r"<sample (?P<sample>[^\n>]*)> (?P<reason>.*)\Z", re.DOTALL)


class Counted:
    """The user's collate function; the batch comes with its number of samples."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The number of samples, and the batch made of them."""
        return _told((len(samples), self.collate(samples)))


class _WorkerInit:
    """The user's worker_init_fn, which must see the user's data set and not our wrapper."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self.inner = inner

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Located):
            object.__setattr__(info, "dataset", info.dataset.inner)  # the record is frozen for users
        if self.inner is not None:
            self.inner(worker_id)
        _Watch.here = _Watch(info.dataset) if info is not None else None


def rebuild(loader: DataLoader[Any], dataset: Any, collate: Any, sampling: dict[str, Any]) -> DataLoader[Any]:
    """A loader like the user's, whichever options this torch has."""
    options = {
        name: getattr(loader, name)
        for name in inspect.signature(DataLoader.__init__).parameters
        if name not in _DECIDED_HERE and hasattr(loader, name)
    }
    if loader.num_workers:
        options["worker_init_fn"] = _WorkerInit(loader.worker_init_fn)
    return DataLoader(dataset, collate_fn=collate, **sampling, **options)


def check_spawned(loader: DataLoader[Any]) -> None:
    """Refuse loader processes that could not start: a spawned one knows nothing that a notebook's cell defines.

    Raises:
        ConfigError: what it cannot import.
    """
    context = loader.multiprocessing_context
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    # The main module of a script is a file, which a spawned process runs again.
    if not loader.num_workers or method == "fork" or hasattr(sys.modules["__main__"], "__file__"):
        return
    parts = [*_inside(loader.dataset), loader.collate_fn, loader.worker_init_fn]
    kinds = [part if isinstance(part, FunctionType) else type(part) for part in parts]
    lost = [kind.__qualname__ for kind in kinds if kind.__module__ == "__main__"]
    if lost:
        forking = ", or multiprocessing_context='fork'" if "fork" in multiprocessing.get_all_start_methods() else ""
        raise ConfigError(
            f"the DataLoader's processes begin by {method!r} and cannot import {lost[0]}, which a cell of this notebook defines: "
            f"put it into a .py file and import it from there, or give num_workers=0{forking}"
        )


def _inside(dataset: Any) -> Iterator[Any]:
    """Yield a data set and those that it wraps, as Subset and ConcatDataset do."""
    yield dataset
    wrapped = [getattr(dataset, "dataset", None), *(getattr(dataset, "datasets", None) or ())]
    for inner in (inner for inner in wrapped if isinstance(inner, Dataset)):
        yield from _inside(inner)
