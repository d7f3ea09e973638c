"""Asks all workers what the data sets that lie there are like, before a run is planned."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from types import ModuleType

import msgspec

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.worker_data import WorkerData
from guava_nb.errors import ClusterError, ConfigError, PreparationError, RemoteProtocolError
from guava_nb.protocol.messages import AskData, Cell, DataFacts, DataSpec, Factory, RunSpec
from guava_nb.spec.missing_modules import missing_advice
from guava_nb.spec.run_spec import factory_name, plain_arguments

__all__ = ["ask_data", "data_spec", "feeds", "refuse_group", "refuse_place", "refuse_static"]


def data_spec(data: WorkerData, shared: ModuleType | None) -> DataSpec:
    """Return the record of a data set that lies at the workers.

    Raises:
        SourceError: its factory or collate function exists only here.
        ConfigError: an argument cannot travel.
    """
    factory = Factory(factory_name("data set", data.dataset, shared), plain_arguments("data set", data.args))
    collate = None if data.collate is None else Factory(factory_name("collate", data.collate, shared))
    return DataSpec(factory, collate, data.check)


def refuse_place(data: str, loader: object) -> None:
    """Refuse a place of the data that does not go with the loader.

    Raises:
        ConfigError: why, and what to give instead.
    """
    if data not in ("orchestrator", "worker"):
        raise ConfigError(f"data is {data!r}; it is one of: orchestrator, worker")
    if data == "worker" and not isinstance(loader, WorkerData):
        raise ConfigError(
            f"data is 'worker' and train_loader a {type(loader).__name__}: give WorkerData(dataset_factory, batch_size, "
            "shuffle=True), which names what the workers build"
        )


def refuse_group(spec: RunSpec) -> None:
    """Refuse data at the workers where one model is spread over them.

    Raises:
        ConfigError: the mode, and what to choose.
    """
    if spec.parallel is not None:
        raise ConfigError(
            f"data that lies at the workers goes with data mode through the orchestrator, and this run is of mode "
            f"{spec.parallel.mode} on the path {spec.parallel.path}: choose %guava_mode data --path relay (set_mode('data', "
            "path='relay')), or give a loader here with cache='disk', which sends each sample once"
        )


def refuse_static(spec: RunSpec) -> None:
    """Refuse to leave samples unloaded where workers do not keep them, or where it is not known which worker does.

    Raises:
        ConfigError: what to choose instead.
    """
    if spec.cache is None:
        raise ConfigError("cache_static is for workers that keep samples: give cache='memory' or cache='disk' with it")
    if spec.parallel is not None:
        raise ConfigError(
            f"cache_static goes with data mode through the orchestrator, and this run is of mode {spec.parallel.mode} on the "
            f"path {spec.parallel.path}: leave it out, the cache alone works there; or choose %guava_mode data --path relay"
        )


def feeds(
    loaders: tuple[object, object], specs: Sequence[DataSpec], batch: str | None = None
) -> tuple[LoaderFeed, LoaderFeed | None]:
    """Return the feeds to train and to validate with; those of `WorkerData` give ids and are numbered as in `specs`.

    `batch` says how batches are read, as for `LoaderFeed`.
    """
    made: list[LoaderFeed | None] = []
    number = 0
    for loader in loaders:
        if isinstance(loader, WorkerData):
            number += 1
            made.append(LoaderFeed(loader.loader(specs[number - 1].length), number))
        else:
            made.append(None if loader is None else LoaderFeed(loader, batch=batch))
    train, val = made
    assert train is not None  # a loader to train with is always given
    return train, val


def ask_data(
    cluster: Cluster, cells: Sequence[Cell], specs: Sequence[DataSpec], check_interrupt: Callable[[], None]
) -> tuple[DataSpec, ...]:
    """Have every worker build data sets; returns their records with what all agree on.

    Raises:
        PreparationError: a worker cannot build one, or they are not alike; the message says who and how.
        ClusterError: no worker is left.
    """
    request = secrets.randbits(62)
    job = Job(cluster)
    answers = job.collect(DataFacts, lambda facts: facts.request_id == request and _is_complete(facts, len(specs)))

    def all_answered() -> bool:
        check_interrupt()
        return all(rank in answers for rank in asked & (job.ready | job.suspects))

    with job.attached():
        asked = set(job.ready)
        cluster.send_all(asked, AskData(request, tuple(cells), tuple(specs)))
        try:
            job.pump(all_answered)
        except NobodyLeft as error:
            raise ClusterError("no worker is here: run %guava_worker with the join code elsewhere") from error
    if problems := [_sentence(cluster.name(r), a) for r, a in sorted(answers.items()) if a.problem or a.missing_module]:
        raise PreparationError("\n".join(problems))
    return _agreed({cluster.name(rank): answer.data for rank, answer in sorted(answers.items())})


def _is_complete(facts: DataFacts, count: int) -> bool:
    """Check that an answer is about all data sets, or says why not.

    Raises:
        RemoteProtocolError: it is about another number of them.
    """
    if not (facts.problem or facts.missing_module) and len(facts.data) != count:
        raise RemoteProtocolError(f"it tells of {len(facts.data)} data sets, and {count} were asked for")
    return True


def _sentence(name: str, answer: DataFacts) -> str:
    if answer.missing_module:
        return f"{name} cannot import {answer.missing_module!r}: {missing_advice(answer.missing_module)}"
    trace = f"\n{answer.traceback}" if answer.traceback else ""
    return f"{name} cannot make the data set: {answer.problem}{trace}"


def _agreed(facts: dict[str, tuple[DataSpec, ...]]) -> tuple[DataSpec, ...]:
    first, specs = next(iter(facts.items()))
    for name, others in facts.items():
        for ours, theirs in zip(specs, others, strict=True):
            what = ours.factory.name
            if ours.length != theirs.length:
                raise PreparationError(
                    f"{what} has {ours.length} samples at {first} and {theirs.length} at {name}: put the same data there"
                )
            if msgspec.structs.replace(ours, length=0) != msgspec.structs.replace(theirs, length=0):
                raise PreparationError(
                    f"{what} has other samples at {first} than at {name} (three were compared): put the same data there, in "
                    "the same order; or say check=False where they differ by design"
                )
    return specs
