"""One prediction from its loader to its results: refuses early, goes on where an earlier one was cut off."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from guava_nb.cluster.cluster import Cluster
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.errors import ConfigError
from guava_nb.evaluation.between_runs import ask
from guava_nb.evaluation.passes import Progress
from guava_nb.evaluation.predictions import Prediction, Predictions, in_id_order
from guava_nb.evaluation.result_files import DiskResults, MemoryResults
from guava_nb.protocol.messages import Factory, Wanted
from guava_nb.replica.state_dict import parameter_hash
from guava_nb.sync.handover import fetch_between_runs
from guava_nb.sync.replica_set import ReplicaSet

__all__ = ["Deadlines", "predict"]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a prediction waits for workers.

    Attributes:
        fetch_s: for the state, from a worker that holds it and does not answer.
        grace_s: for the batches in work after an interrupt, as for `ask`.
    """

    fetch_s: float = 60.0
    grace_s: float = 5.0


def predict(
    cluster: Cluster,
    replica_set: ReplicaSet,
    loader: Any,
    wanted: Wanted,
    *,
    path: Path | None = None,
    resume: bool = False,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - immutable
    progress: Progress | None = None,
) -> Predictions:
    """Predict all of a loader; arguments and errors as for `Orchestrator.predict`.

    Args:
        cluster: the workers of the session.
        replica_set: whose last committed state predicts.
        loader: the user's, or a feed of it.
        wanted: what comes back.
        path: of memory maps; None keeps results in memory.
        resume: go on with what `path` holds.
        deadlines: how long workers are waited for.
        progress: as for `ask`.
    """
    _check_fits(replica_set, wanted, path, resume)
    feed = loader if isinstance(loader, LoaderFeed) else LoaderFeed(loader)
    results: MemoryResults | DiskResults = MemoryResults(feed.samples_per_epoch)
    if path is not None:
        fetch_between_runs(replica_set, cluster, deadlines.fetch_s)
        results = DiskResults(path, _asked(replica_set, loader, feed.samples_per_epoch, wanted), resume)
    question = Prediction(wanted, results, feed.samples_per_epoch, lambda: feed.skipped_samples)
    if not results.complete:
        with _written(results):
            ask(
                cluster, replica_set, feed, question, skip_batches=results.batches, grace_s=deadlines.grace_s,
                progress=progress,
            )  # fmt: skip
            question.check_skipped()
    arrays = in_id_order(results.arrays()) if path is None else results.arrays()
    return Predictions(arrays, question.estimated_bytes, path)


@contextmanager
def _written(results: MemoryResults | DiskResults) -> Iterator[None]:
    """Close results after the block: as complete, unless it raises."""
    complete = False
    try:
        yield
        complete = True
    finally:
        results.close(complete)


def _check_fits(replica_set: ReplicaSet, wanted: Wanted, path: Path | None, resume: bool) -> None:
    """Refuse options that contradict each other, or the mode."""
    if resume and path is None:
        raise ConfigError("resume=True goes on with what a folder holds: give path= (--path) as well")
    if wanted.step is not None and replica_set.spec.parallel is not None and replica_set.spec.parallel.pp > 1:
        raise ConfigError(
            "predict_step calls a whole model, and here each worker holds some of its layers: leave it out for batches of "
            "inputs or (inputs, targets), or train in another mode"
        )


def _asked(replica_set: ReplicaSet, loader: Any, total: int | None, wanted: Wanted) -> dict[str, Any]:
    """Return all that must be the same for rows of two calls to belong together, as plain data with names for people."""
    spec, model = replica_set.spec, replica_set.master.model
    digest = hashlib.sha256(msgspec.msgpack.encode((spec.model, replica_set.cells, spec.precision)))
    tensors = [item for item in model.state_dict().items() if isinstance(item[1], Tensor)]
    digest.update(parameter_hash(tensors).encode())
    return {
        "model and shared cells": digest.hexdigest(),
        "number of samples": total,
        "batch size": getattr(loader, "batch_size", None),
        "top_k": wanted.top_k,
        "confidence_threshold": wanted.threshold,
        "full probabilities": wanted.full,
        "raw": wanted.raw,
        "predict_step": _named(wanted.step),
        "preprocess": _named(spec.preprocess),
    }


def _named(function: Factory | None) -> str | None:
    if function is None or not function.args:
        return None if function is None else function.name
    return f"{function.name} with {function.args!r}"
