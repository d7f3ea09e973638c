"""Data sets that lie at a worker, on the worker's side: built once, measured, read by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch.utils.data import default_collate

from guava_nb.data.codec import pack
from guava_nb.data.sample_count import has_rows
from guava_nb.data.sample_text import sample_text
from guava_nb.errors import ConfigError, PreparationError, TrainingError
from guava_nb.protocol.messages import BatchShard, Cell, CheckStep, DataSpec, Evaluate, Predict
from guava_nb.replica.rng import seeded, shard_seed
from guava_nb.spec.cells import digest, resolve
from guava_nb.spec.factories import build, find

__all__ = ["OwnData", "SampleFailed"]

_CPU = torch.device("cpu")
#: The data sets of the newest run and those that were asked for meanwhile.
_MOST = 4


class SampleFailed(TrainingError):  # noqa: N818 - the name is what the user reads
    """A sample of a data set that lies at a worker could not be loaded there."""


@dataclass(frozen=True, slots=True)
class _Built:
    name: str
    dataset: Any
    collate: Any
    facts: DataSpec

    def batch(self, ids: Sequence[int]) -> Any:
        """The batch of these samples.

        Raises:
            SampleFailed: one cannot be loaded, or the collate function fails; what was raised is chained.
        """
        samples = self._samples(ids)
        try:
            batch = self.collate(samples)
        except Exception as error:
            raise SampleFailed(
                f"{sample_text(ids)} of {self.name} could not be collated: {type(error).__name__}: {error}"
            ) from error
        if not has_rows(batch, len(ids)):
            raise SampleFailed(
                f"the collate function of {self.name} made a batch of {len(ids)} samples in which nothing has {len(ids)} "
                "entries: with data at the workers it may neither drop nor add samples"
            )
        return batch

    def _samples(self, ids: Sequence[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if not callable(many):
            return [self._sample(index) for index in ids]
        try:
            return list(many(list(ids)))
        except Exception:
            for index in ids:  # the batch is lost anyhow: find out which sample it was
                self._sample(index)
            raise

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise SampleFailed(
                f"sample {index} of {self.name} could not be loaded: {type(error).__name__}: {error}"
            ) from error


class OwnData:
    """The data sets of one worker, over all its runs."""

    def __init__(self) -> None:
        """Have none."""
        self._built: dict[bytes, _Built] = {}
        self._run: list[_Built] = []

    def facts(self, cells: Sequence[Cell], specs: Sequence[DataSpec], module: ModuleType | None) -> list[DataSpec]:
        """Build data sets, and return their records with length and probe.

        Args:
            cells: shared ones, which a data set may be built from.
            specs: what to build.
            module: of the cells.

        Raises:
            ConfigError, PreparationError: one cannot be built or has no length.
        """
        return [self._get(cells, spec, module).facts for spec in specs]

    def open(self, cells: Sequence[Cell], specs: Sequence[DataSpec], module: ModuleType | None) -> None:
        """A run begins that reads these, numbered from 1.

        Args:
            cells, specs, module: as for `facts`.

        Raises:
            PreparationError: one is not what the other workers have.
        """
        self._run = [self._get(cells, spec, module) for spec in specs]
        for built, spec in zip(self._run, specs, strict=True):
            if built.facts.length != spec.length:
                raise PreparationError(
                    f"{built.name} has {built.facts.length} samples here and {spec.length} at the run's other workers: put "
                    "the same data there"
                )
            if built.facts.probe != spec.probe:
                raise PreparationError(
                    f"{built.name} has other samples here than at the run's other workers (three were compared): put the "
                    "same data there, in the same order; or say check=False where they differ by design"
                )

    def batches(self, message: BatchShard | Evaluate | Predict | CheckStep, ids: Any, seed: int) -> Any:
        """Return the batch that a message names by the ids of its samples, or the list of parts of a shard.

        A shard that is issued again draws the same random numbers elsewhere.

        Args:
            message: asks for it.
            ids: an array of sample ids; of a shard one for each part.
            seed: of the run.

        Raises:
            TrainingError: the data set is not one of the run.
            SampleFailed: a sample cannot be loaded.
        """
        number = message.source
        if not isinstance(message, BatchShard):
            return self._batch(number, ids.tolist(), shard_seed(seed, -1 - number, int(ids[0])))
        return [
            self._batch(number, part.tolist(), shard_seed(seed, -1 - message.step, (place << 32) + message.shard))
            for place, part in enumerate(ids)
        ]

    def _batch(self, number: int, ids: Sequence[int], seed: int) -> Any:
        if not 0 < number <= len(self._run):
            raise TrainingError(f"data set {number} of this run is unknown here")
        with seeded(seed, _CPU):
            return self._run[number - 1].batch(ids)

    def _get(self, cells: Sequence[Cell], spec: DataSpec, module: ModuleType | None) -> _Built:
        wanted = msgspec.structs.replace(spec, length=-1, probe="")
        key = blake2b(digest(cells).encode() + msgspec.msgpack.encode(wanted)).digest()
        if key not in self._built:
            while len(self._built) >= _MOST:
                del self._built[next(iter(self._built))]
            self._built[key] = _build(wanted, module)
        return self._built[key]


#: Samples of a data set that workers compare. The same number everywhere, since the digest depends on it.
_MOST_PROBED = 17


def _build(spec: DataSpec, module: ModuleType | None) -> _Built:
    name = spec.factory.name

    def named(wanted: str) -> Any:
        return resolve(wanted, module)

    dataset = build("data set", name, find("data set", name, {}, "", named), from_torch=False, args=spec.factory.args)
    collate = default_collate if spec.collate is None else find("collate", spec.collate.name, {}, "", named)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{name} gave a {type(dataset).__name__}, which has no len() or no samples by index: a map-style data set is needed"
        )
    length = len(dataset)
    if not length:
        raise ConfigError(f"{name} has no samples here: put the data on this machine, or correct its path")
    built = _Built(name, dataset, collate, spec)
    probe = _probe(built, length) if spec.check else ""
    return _Built(name, dataset, collate, msgspec.structs.replace(spec, length=length, probe=probe))


def _or_its_error(built: _Built, index: int) -> Any:
    """A batch of one sample, or the sentence on why there is none: the step that needs it will say so, with the worker's name."""
    try:
        return built.batch([index])
    except SampleFailed as failed:
        return str(failed)


def _probe(built: _Built, length: int) -> str:
    """Digest of some samples, from the first to the last, their random numbers drawn from one seed."""
    with seeded(0, _CPU):
        places = sorted({k * (length - 1) // (_MOST_PROBED - 1) for k in range(_MOST_PROBED)})
        batches = [built.batch([0]), *(_or_its_error(built, index) for index in places[1:])]
    try:
        tree, buffers = pack(batches, "a sample")
    except ConfigError:  # of a type that does not travel, and need not: then only the lengths are compared
        return ""
    content = blake2b(msgspec.msgpack.encode(tree), digest_size=16)
    for buffer in buffers:
        content.update(buffer)
    return content.hexdigest()
