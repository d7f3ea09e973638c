"""What an exported program is made of: a run's record, its shared cells, its plan, and how its data is drawn.

Taken when the run begins. Keeps no model, no loader and no batch.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, default_collate

from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.epoch_record import EpochRecord
from guava_nb.protocol.messages import Cell, DataSpec, RunSpec
from guava_nb.training.plan import TrainingPlan

__all__ = ["ExportFacts", "LoaderFacts"]


@dataclass(frozen=True)
class LoaderFacts:
    """How a run's loader draws batches.

    Attributes:
        what: what it is, in words.
        batch_size: of the global batch; None where the loader does not say it.
        drop_last: a last batch that is smaller is left out.
        num_workers: its loader processes.
        samples: in an epoch; None where it cannot tell.
        by_index: rows can be drawn by index, one replica's alone: a map-style data set with torch's own samplers.
        collate: an importable or shared collate function's place; "" is torch's own, None another one.
        record: orders of its epochs, and how its batches look.
        reading: how its batches are read, in words; "" before the first.
        data_set: gives the data set, or the list of batches, while it lives.
    """

    what: str
    batch_size: int | None
    drop_last: bool
    num_workers: int
    samples: int | None
    by_index: bool
    collate: str | None
    record: EpochRecord
    feed: weakref.ref[LoaderFeed]
    data_set: Any

    @classmethod
    def of(cls, feed: LoaderFeed, cells: Sequence[Cell] = ()) -> LoaderFacts:
        """Look at a feed; nothing is drawn."""
        loader, record = feed.loader, feed.record
        is_loader = type(loader) is DataLoader
        data_set = feed.data_set
        kind = type(data_set).__name__
        collate = "" if not is_loader or loader.collate_fn is default_collate else _place(loader.collate_fn, cells)
        return cls(
            what=f"a DataLoader of {kind}" if is_loader else f"an iterable of batches ({type(loader).__name__})",
            batch_size=feed.batch_size,
            drop_last=bool(loader.drop_last) if is_loader else False,
            num_workers=loader.num_workers if is_loader else 0,
            samples=feed.samples_per_epoch,
            by_index=record.kind != "own" and collate is not None,
            collate=collate,
            record=record,
            feed=weakref.ref(feed),
            data_set=_weak(data_set, feed),
        )

    @property
    def cuts_otherwise(self) -> bool:
        """Whether a slice of rows does not say how its batches are cut."""
        return any(word in self.reading for word in ("whole", "axis", "one per sample"))

    @property
    def reading(self) -> str:
        """How batches are read, as `TrainingOptions.batch` says it."""
        feed = self.feed()
        return "" if feed is None or feed.gives_ids else feed.reading.text


def _place(function: Any, cells: Sequence[Cell]) -> str | None:
    """The name of a function of a shared cell, or where it can be imported from; None for one of the notebook only."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__", "guava_shared"):
        return name if any(_defines(cell, name) for cell in cells) else None
    return f"{module}:{name}" if name.isidentifier() else None


def _defines(cell: Cell, name: str) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == name for one in ast.parse(cell.text).body)


def _weak(data_set: Any, feed: LoaderFeed) -> Any:
    """Return what gives a data set while it lives, without keeping it alive."""
    try:
        return weakref.ref(data_set)
    except TypeError:  # a list has no weak references
        of_feed = weakref.ref(feed)
        return lambda: None if (alive := of_feed()) is None else alive.data_set


@dataclass(frozen=True)
class ExportFacts:
    """Everything that is known of a run when it begins.

    Attributes:
        run_id, spec, cells: of the run.
        workers: that took part when it began.
        is_from_seed: its first weights are those that the seed gives.
        num_epochs, max_steps, accumulation_steps: see `TrainingPlan`.
        loader: how its data is drawn.
        left_out: what the run does beside training, in words, which a program does not.
        refused: why it cannot be exported at all; "" where it may.
    """

    run_id: str
    spec: RunSpec
    cells: Sequence[Cell]
    workers: int
    is_from_seed: bool
    num_epochs: int
    max_steps: int | None
    accumulation_steps: int
    loader: LoaderFacts
    left_out: tuple[str, ...] = ()
    refused: str = ""

    @classmethod
    def of(
        cls, run_id: str, spec: RunSpec, cells: Sequence[Cell], workers: int, is_from_seed: bool, plan: TrainingPlan
    ) -> ExportFacts:
        """Take them from a run that is about to begin.

        Args:
            run_id, spec, cells, workers, is_from_seed: see the attributes.
            plan: of the run.
        """
        beside: Mapping[str, Any] = {
            "validation": plan.val_feed,
            "callbacks": plan.callbacks,
            "the log": plan.log,
            "unequal shares (every process takes an equal part)": plan.shares,
            "patience": plan.patience,
            "checkpoints within an epoch": plan.save_every_steps or plan.save_every_s,
            "the checkpoint of the best validation": plan.save_best,
            "checkpoints without what is frozen": plan.base is not None,
            "figures of energy": spec.tokens or spec.count_flops,
            "the limit of bytes": plan.budget is not None,
        }
        return cls(
            run_id=run_id,
            spec=spec,
            cells=tuple(cells),
            workers=workers,
            is_from_seed=is_from_seed and not plan.start.feed,
            num_epochs=plan.num_epochs,
            max_steps=plan.max_steps,
            accumulation_steps=plan.accumulation_steps,
            loader=LoaderFacts.of(plan.feed, cells),
            left_out=tuple(name for name, value in beside.items() if value),
            refused="it cuts batches with a split_fn, which is a function of this notebook" if plan.split_fn else "",
        )

    @property
    def data(self) -> DataSpec | None:
        """The data set that lies at the workers, None where the orchestrator has the data."""
        return self.spec.data[0] if self.spec.data else None
