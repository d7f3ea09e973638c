"""Prediction: the outputs of all batches in the order of the data set, and the object that holds them.

Order. Every row has a sample id: its index in the data set, or for streams and lists its place in them. Results stand in
the order of these ids, also where a sampler shuffled; samples drawn twice stand beside each other. Where a
collate function dropped or added rows nothing tells rows apart: then all results stay in the loader's order, and
`sample_ids` is -1 there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch import Tensor

from guava_nb.config.mesh import Mesh
from guava_nb.config.units import show_bytes
from guava_nb.data.codec import unpack
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.errors import ConfigError, RemoteProtocolError, TrainingError
from guava_nb.evaluation.batch_orders import Answer, span_text
from guava_nb.evaluation.result_files import DiskResults, MemoryResults
from guava_nb.protocol.messages import Generated, Message, Predict, Predicted, Tree, Wanted
from guava_nb.replica.outputs import inputs_of, unpacked, without_targets

__all__ = ["Prediction", "Predictions", "in_id_order", "least_row_bytes", "wanted_of"]

MB = 1_000_000


class Predictions(Mapping[str, Any]):
    """Results of a prediction, by name; numpy arrays, or memory maps where a `path` was given.

    Keys: `predictions` and `confidences` of shape (N,), or (N, top_k) with top_k above 1 (-1 and NaN where a row is below
    the threshold); `kept` (N,) with a threshold; `probabilities` (N, C) when asked for; instead of all these `outputs` when raw
    (a dict of arrays where the model returned several); `sample_ids` (N,); and the numbers `total_samples`,
    `estimated_memory_mb` (None where the length was not known) and `measured_memory_mb`, in millions of bytes.

    Attributes:
        path: the folder of the memory maps; None for arrays in memory.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], estimated_bytes: int | None, path: Path | None = None) -> None:
        """Put results that were asked for together."""
        self.path = path
        raw = {name: array for name, array in arrays.items() if name.split(".")[0] == "outputs"}
        self._values: dict[str, Any] = {name: array for name, array in arrays.items() if name not in raw}
        if raw:
            named = {name.removeprefix("outputs."): array for name, array in raw.items()}
            self._values["outputs"] = raw["outputs"] if raw.keys() == {"outputs"} else named
        self._values["total_samples"] = len(next(iter(arrays.values()))) if arrays else 0
        self._values["estimated_memory_mb"] = None if estimated_bytes is None else estimated_bytes / MB
        self._values["measured_memory_mb"] = sum(array.nbytes for array in arrays.values()) / MB

    def __getitem__(self, key: str) -> Any:
        """Return a result; KeyError says what there is."""
        if key not in self._values:
            raise KeyError(f"{key!r} was not asked for; there are: {', '.join(self._values)}")
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        """Names of the results."""
        return iter(self._values)

    def __len__(self) -> int:
        """How many results there are, not how many samples: that is `total_samples`."""
        return len(self._values)

    def __repr__(self) -> str:
        """What there is, in which shape, and what it takes."""
        arrays = []
        for key, value in self._values.items():
            for name, array in (value if isinstance(value, dict) else {"": value}).items():
                if isinstance(array, np.ndarray):
                    arrays.append(f"{key}{'.' if name else ''}{name} {array.shape} {array.dtype}")
        where = f"in {self.path}" if self.path is not None else "in memory"
        size = round(self._values["measured_memory_mb"] * MB)
        return f"Predictions({self._values['total_samples']} samples: {', '.join(arrays)}; {show_bytes(size)} {where})"


def wanted_of(top_k: int, threshold: float | None, full: bool, raw: bool) -> Wanted:
    """Return the record of what a user asked for.

    Args:
        top_k: the most likely classes of each sample.
        threshold: probability below which a sample is not kept; None: all are.
        full: probabilities of all classes.
        raw: outputs as they are.

    Raises:
        ConfigError: something is out of its range, or contradicts something else.
    """
    if type(top_k) is not int or top_k < 1:
        raise ConfigError(f"top_k is {top_k!r}; give a whole number, at least 1")
    if threshold is not None and not (isinstance(threshold, int | float) and 0 <= threshold <= 1):
        raise ConfigError(f"confidence_threshold is {threshold!r}; give a probability between 0 and 1")
    if raw and (top_k != 1 or threshold is not None or full):
        raise ConfigError("raw=True gives the outputs as they are: leave top_k, threshold and full probabilities out")
    return Wanted(top_k, None if threshold is None else float(threshold), bool(full), bool(raw))


def least_row_bytes(wanted: Wanted) -> int | None:
    """Return the bytes of a row of results; None where it depends on the outputs."""
    if wanted.raw or wanted.full:
        return None
    return 8 + wanted.top_k * (8 + 4) + (0 if wanted.threshold is None else 1)


class Prediction:
    """The question that a prediction asks; a `guava_nb.evaluation.batch_orders.Question`.

    Args:
        wanted: what is asked for.
        results: where rows go.
        expected_rows: of the whole loader; None where it is not known.
        skipped: samples that the loader skipped because the results have them; None where they are not counted.
        heard: takes tokens of answers that are still in work.

    Attributes:
        estimated_bytes: of all results; None while it is not known.

    Raises:
        ConfigError: the results cannot fit; the message has the arithmetic.
    """

    verb = "predicting"

    def __init__(
        self,
        wanted: Wanted,
        results: MemoryResults | DiskResults,
        expected_rows: int | None,
        skipped: Callable[[], int | None] = lambda: None,
        heard: Callable[[Generated], None] = lambda message: None,
    ) -> None:
        """Estimate the bytes of all results, where they do not depend on the outputs."""
        self._skipped, self.heard = skipped, heard
        self._had = results.last_id
        self._wanted, self._results, self._expected = wanted, results, expected_rows
        self.estimated_bytes: int | None = None
        self._estimated = False
        row_bytes = least_row_bytes(wanted)
        if row_bytes is not None:
            self._estimate(row_bytes, f"{row_bytes} bytes")

    def part(self, batch: Any, wants_whole: bool) -> Any:
        """Return the inputs alone, unless a function of the user's needs the whole batch."""
        return batch if wants_whole or self._wanted.step is not None else without_targets(batch)

    def for_stage(self, mesh: Mesh, stage: int, piece: Any, wants_whole: bool) -> Any:
        """Return the inputs for the first stage; the whole batch where it is preprocessed there."""
        if wants_whole:
            return piece if stage == 0 else None
        return (inputs_of(piece) if stage == 0 else None, None)

    def message(self, run_id: str, request: int, rows: int, tree: Tree, grouped: bool) -> Predict:
        """Return the record that asks for the outputs on a batch."""
        return Predict(run_id=run_id, request_id=request, rows=rows, batch=tree, wanted=self._wanted, grouped=grouped)

    def check(self, answer: Message, payload: memoryview, rows: int) -> None:
        """Check an answer on a batch of so many rows; errors as in `Question.check`."""
        if not isinstance(answer, Predicted) or not 0 <= answer.rows <= rows:
            raise RemoteProtocolError(f"it is no prediction of {rows} rows")
        if answer.columns.structure:
            columns = unpack(answer.columns, payload)
            if not isinstance(columns, dict) or not all(isinstance(column, Tensor) for column in columns.values()):
                raise RemoteProtocolError("its columns are no tensors by name")

    def take(self, batch: LoadedBatch, answers: Sequence[Answer]) -> None:
        """Keep the rows of one batch."""
        parts = []
        for message, payload in answers:
            assert isinstance(message, Predicted)
            if message.columns.structure:
                parts.append(unpacked(unpack(message.columns, payload), message.rows, self._wanted))
        arrays = {name: np.concatenate([part[name] for part in parts]) if len(parts) > 1 else array
                  for name, array in parts[0].items()}  # fmt: skip
        if any(len(array) != batch.rows for array in arrays.values()):
            raise TrainingError(
                f"batch {batch.index}{span_text(batch)} has {batch.rows} rows, and other numbers came back"
            )
        known = len(batch.sample_ids) == batch.rows
        arrays["sample_ids"] = np.array(batch.sample_ids, np.int64) if known else np.full(batch.rows, -1, np.int64)
        if not self._estimated:
            self._estimate_from(arrays, batch.rows)
        self.check_skipped()
        self._check_order(batch)
        self._results.append(arrays, batch.index + 1, batch.sample_ids[-1] if batch.sample_ids else None)

    def check_skipped(self) -> None:
        """Refuse to go on where the loader's skipped batches are not the samples that the folder holds."""
        skipped, last = self._skipped(), self._had
        if skipped is None or last is None or skipped == last + 1:
            return
        raise ConfigError(
            f"{self._results.folder} holds the first {last + 1} samples of an earlier prediction, and as many batches of this "
            f"loader have {skipped}: resume=True goes on with the same sizes only. Give the loader of then, or another folder"
        )

    def _check_order(self, batch: LoadedBatch) -> None:
        """Refuse batches out of the order of the data set: files only grow at their end."""
        if self._results.folder is None or not batch.sample_ids:
            return
        ids, before = batch.sample_ids, self._results.last_id
        if any(a >= b for a, b in zip(ids, ids[1:], strict=False)) or (before is not None and before >= ids[0]):
            raise ConfigError(
                f"path= writes results as they come, in the order of the data set, and batch {batch.index} of the loader"
                f"{span_text(batch)} is out of it: give a loader with shuffle=False, or leave path out"
            )

    def _estimate_from(self, arrays: Mapping[str, np.ndarray], rows: int) -> None:
        sizes = {name: array.nbytes // rows for name, array in arrays.items()}
        told = " + ".join(
            f"{name} {'x'.join(map(str, arrays[name].shape[1:] or (1,)))} x {arrays[name].itemsize}" for name in sizes
        )
        self._estimate(sum(sizes.values()), f"({told}) bytes")

    def _estimate(self, row_bytes: int, told: str) -> None:
        self._estimated = True
        if self._expected is None:
            return
        self.estimated_bytes = self._expected * row_bytes
        missing = self.estimated_bytes - self._results.rows * row_bytes
        if self._results.folder is not None:
            free, where = shutil.disk_usage(self._results.folder).free, f"the disk of {self._results.folder}"
            advice = "give a path on a larger disk, or ask for less"
        else:
            free, where = psutil.virtual_memory().available, "memory"
            advice = (
                "give path= (--path), a folder for memory maps, or ask for less (top_k instead of all probabilities)"
            )
        if missing > free:
            raise ConfigError(
                f"the results would take {self._expected:,} rows x {told} = {show_bytes(self.estimated_bytes)}, and "
                f"{show_bytes(free)} are free in {where}: {advice}"
            )


def in_id_order(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return all rows in the order of their sample ids, rows of equal ids as they came; as they came if one has no id."""
    ids = arrays["sample_ids"] if arrays else np.empty(0)
    if len(ids) < 2 or ids.min() < 0 or bool((ids[1:] >= ids[:-1]).all()):
        return dict(arrays)
    order = np.argsort(ids, kind="stable")
    return {name: array[order] for name, array in arrays.items()}
