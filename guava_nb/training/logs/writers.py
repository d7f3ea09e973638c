"""Where rows of a run go: CSV files, TensorBoard, Weights & Biases, MLflow, each through its own library.

The libraries are imported on the log's thread, and only those that were asked for. A writer may raise anything.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from guava_nb.training.logs.rows import KINDS, Row

__all__ = ["WRITERS", "LogPlace", "Writer"]

#: What only CSV files have: each number costs those libraries more than a whole line of a file.
_NO_CURVES = ("step", "samples", "seconds")
#: Before a number's name where all kinds of rows stand in one place.
_GROUPS = {"steps": "train", "validations": "val", "epochs": "epoch"}


@dataclass(frozen=True)
class LogPlace:
    """Where one run's log is, and what it goes on from.

    Attributes:
        folder, name: the save folder, and how the names of the run's files begin.
        settings: of the run, as plain data, for libraries that show them.
        before: the name of the run that it goes on from, whose files lie in the folder; "" for none.
        before_step: up to which step it does.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    before: str = ""
    before_step: int = 0


class Writer(Protocol):
    """Takes rows. What it has kept after `flush` is not written again."""

    #: Where the rows are, for people.
    where: str

    def write(self, rows: Sequence[Row]) -> None:
        """Take rows, in the order of their steps within each kind."""

    def rewind(self, step: int) -> None:
        """Drop what was taken of later steps: they will be done again."""

    def flush(self) -> None:
        """Keep what was taken."""

    def close(self, state: str) -> None:
        """Take nothing more; `state` is how the run ended."""


class CsvWriter:
    """One file for each kind of rows, with a line for each row."""

    def __init__(self, place: LogPlace) -> None:
        """Begin with the lines of the run that this one goes on from."""
        self._place = place
        self.where = f"{self._path('steps')} (and -epochs, -validations)"
        self._files: dict[str, tuple[IO[str], tuple[str, ...]]] = {}
        place.folder.mkdir(parents=True, exist_ok=True)
        for kind in KINDS if place.before else ():
            self._copy(self._path(kind, place.before), self._path(kind), place.before_step)

    def _path(self, kind: str, name: str = "") -> Path:
        return self._place.folder / f"{name or self._place.name}-{kind}.csv"

    @staticmethod
    def _copy(before: Path, path: Path, step: int) -> None:
        if before.is_file() and not path.exists():
            with before.open(encoding="utf-8", newline="") as old, path.open("x", encoding="utf-8", newline="") as new:
                new.writelines(_lines_to(old, step))

    def write(self, rows: Sequence[Row]) -> None:
        """Append a line for each."""
        for row in rows:
            file, columns = self._files.get(row.kind) or self._open(row)
            csv.writer(file).writerow(["" if (one := row.values.get(name)) is None else one for name in columns])

    def _open(self, row: Row) -> tuple[IO[str], tuple[str, ...]]:
        path = self._path(row.kind)
        columns = KINDS[row.kind] or ("step", *(name for name in row.values if name != "step"))
        is_new = not path.exists()
        if not is_new:  # of the run before, or of a try that failed
            with path.open(encoding="utf-8", newline="") as old:
                columns = tuple(next(csv.reader(old), ())) or columns
                is_new = path.stat().st_size == 0
        file = path.open("a", encoding="utf-8", newline="")
        self._files[row.kind] = file, columns
        if is_new:
            csv.writer(file).writerow(columns)
        return file, columns

    def rewind(self, step: int) -> None:
        """Cut the files after the last line of such a step, and after the last whole line."""
        self._close_files()
        for kind in KINDS:
            path = self._path(kind)
            if path.exists():
                with path.open(encoding="utf-8", newline="") as file:
                    kept = sum(len(line.encode()) for line in _lines_to(file, step))
                os.truncate(path, kept)

    def flush(self) -> None:
        """Hand what was written to the system."""
        for file, _ in self._files.values():
            file.flush()

    def close(self, state: str) -> None:
        """Close the files."""
        self._close_files()

    def _close_files(self) -> None:
        files, self._files = self._files, {}
        for file, _ in files.values():
            with contextlib.suppress(OSError):  # of what a full disk did not take: `rewind` follows
                file.close()


def _lines_to(lines: IO[str], step: int) -> list[str]:
    """The header and the whole lines up to a step, which stands in the first column."""
    header, kept = next(lines, ""), []
    for line in lines:
        first = line.partition(",")[0]
        if not line.endswith("\n") or not first.isdecimal() or int(first) > step:
            break
        kept.append(line)
    return [header, *kept] if header.endswith("\n") else []


class TensorboardWriter:
    """Event files in a folder of the run, by TensorBoard's writer."""

    def __init__(self, place: LogPlace) -> None:
        """Begin with the events of the run that this one goes on from."""
        self._folder = place.folder / f"{place.name}-tensorboard"
        self.where = f"{self._folder} (tensorboard --logdir {place.folder})"
        before = place.folder / f"{place.before}-tensorboard"
        if place.before and before.is_dir() and not self._folder.exists():
            shutil.copytree(before, self._folder)
        self._writer = self._open(place.before_step)

    def _open(self, step: int) -> Any:
        """Have later steps that lie there hidden: TensorBoard's own way of going on."""
        module = importlib.import_module("torch.utils.tensorboard")
        return module.SummaryWriter(str(self._folder), purge_step=step + 1 if step else None)

    def write(self, rows: Sequence[Row]) -> None:
        """Add a scalar for each number."""
        for row in rows:
            for name, value in _numbers(row).items():
                self._writer.add_scalar(name, value, row.step)

    def rewind(self, step: int) -> None:
        """Begin a further event file."""
        with contextlib.suppress(Exception):  # of a full disk
            self._writer.close()
        self._writer = self._open(max(step, 1))

    def flush(self) -> None:
        """Write what is in memory."""
        self._writer.flush()

    def close(self, state: str) -> None:
        """Close the event file."""
        self._writer.close()


class WandbWriter:
    """The notebook's own wandb run, where it has begun one; else one of this run, offline where no key is known."""

    def __init__(self, place: LogPlace) -> None:
        """Begin a run of the library, or take the one that is there."""
        self._wandb = importlib.import_module("wandb")
        self._is_theirs = self._wandb.run is not None
        self._run = self._wandb.run if self._is_theirs else self._begin(place)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        is_offline = bool(getattr(self._run, "offline", False))
        how = (
            f" (offline: wandb sync {Path(self._run.dir).parent} sends it)" if is_offline else f" {self._run.url or ''}"
        )
        self.where = f"wandb run {self._run.name}{how}"

    def _begin(self, place: LogPlace) -> Any:
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        place.folder.mkdir(parents=True, exist_ok=True)
        return self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "guava_nb"),
            name=place.name,
            group=place.before or place.name,
            dir=str(place.folder),
            config=dict(place.settings),
            mode=mode,
            settings=self._wandb.Settings(console="off", silent=True),
        )

    def write(self, rows: Sequence[Row]) -> None:
        """Log the numbers of each row; the library keeps and sends them on its own."""
        for row in rows:
            self._run.log({"step": row.step, **_numbers(row)})

    def rewind(self, step: int) -> None:
        """Its history only grows: steps that are done again stand there twice, the later ones last."""

    def flush(self) -> None:
        """The library writes by itself."""

    def close(self, state: str) -> None:
        """Finish the run, if it is not the notebook's own."""
        if not self._is_theirs:
            self._run.finish(exit_code=int(state == "failed"))


def _has_wandb_key() -> bool:
    """Whether the library would not ask for a key: on this thread no person could answer."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    with contextlib.suppress(Exception):  # no such file, or one that is none
        netrc = importlib.import_module("netrc").netrc()
        return any("wandb" in host for host in netrc.hosts)
    return False


class MlflowWriter:
    """A run in the store that mlflow is set to; without one in the folder `mlruns` beside the checkpoints."""

    #: Numbers that the library takes at once.
    _MOST = 1000

    def __init__(self, place: LogPlace) -> None:
        """Begin a run, or take the notebook's own active one."""
        mlflow = importlib.import_module("mlflow")
        self._entities = importlib.import_module("mlflow.entities")
        is_set = os.environ.get("MLFLOW_TRACKING_URI") or mlflow.is_tracking_uri_set()
        if not is_set:  # newer ones want to be asked for a store of files
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = None if is_set else (place.folder.resolve() / "mlruns").as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        active = mlflow.active_run() if is_set else None
        self._is_theirs = active is not None
        self._run_id = active.info.run_id if active is not None else self._begin(place)
        self.where = f"mlflow run {place.name} in {uri or mlflow.get_tracking_uri()}"

    def _begin(self, place: LogPlace) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "guava_nb")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=place.name)
        for key, value in place.settings.items():
            self._client.log_param(run.info.run_id, key, value)
        return str(run.info.run_id)

    def write(self, rows: Sequence[Row]) -> None:
        """Log the numbers of all rows."""
        now = int(time.time() * 1000)
        metrics = (self._entities.Metric(n, v, now, row.step) for row in rows for n, v in _numbers(row).items())
        while part := list(islice(metrics, self._MOST)):
            self._client.log_batch(self._run_id, metrics=part)

    def rewind(self, step: int) -> None:
        """Its history only grows: steps that are done again stand there twice, the later ones last."""

    def flush(self) -> None:
        """What was written is kept."""

    def close(self, state: str) -> None:
        """Say how the run ended, if it is not the notebook's own."""
        if not self._is_theirs:
            ends = {"done": "FINISHED", "stopped": "KILLED"}
            self._client.set_terminated(self._run_id, status=ends.get(state, "FAILED"))


def _numbers(row: Row) -> dict[str, float]:
    """The numbers that are known, by the names that the libraries get."""
    named = {f"{_GROUPS[row.kind]}/{name}": one for name, one in row.values.items() if name not in _NO_CURVES}
    return {name: float(one) for name, one in named.items() if one is not None}


#: By the words of the option `log`.
WRITERS: Mapping[str, Callable[[LogPlace], Writer]] = {
    "csv": CsvWriter,
    "tensorboard": TensorboardWriter,
    "wandb": WandbWriter,
    "mlflow": MlflowWriter,
}
