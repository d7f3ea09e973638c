"""A run whose model lives at the workers: what they hold is step 0, and the orchestrator keeps a likeness of it.

The first of them is the *origin*: its weights are where the run begins, and others are brought to them. A lone origin is
sent nothing back, so a service that validates or predicts moves no weights at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job
from guava_nb.errors import ClusterError, ConfigError, PreparationError
from guava_nb.protocol.messages import Cell, Prepare, Prepared, RunSpec
from guava_nb.replica.model.resident import OWN_MODEL, held, likeness
from guava_nb.replica.replica import Replica
from guava_nb.replica.rounds.local_replica import whole_replica
from guava_nb.spec.cells import resolve
from guava_nb.sync.replica_set import Given, preparation_text
from guava_nb.sync.state_at_workers import NOT_HERE
from guava_nb.sync.whole_replica_set import WholeReplicaSet

__all__ = ["ResidentReplicaSet", "adopt", "is_own"]


class ResidentReplicaSet(WholeReplicaSet):
    """Replicas that were there before the run. Made by `adopt`."""

    def __init__(
        self, run_id: str, spec: RunSpec, cells: Sequence[Cell], master: Replica, origin: int, answer: Prepared
    ) -> None:
        """Take over a worker that has prepared the run.

        Args:
            run_id, spec, cells, master: as for `WholeReplicaSet`.
            origin: rank of the worker whose model it is.
            answer: what it said when it had prepared the run.
        """
        super().__init__(run_id, spec, cells, master)
        self.master_step = NOT_HERE
        self._prepared[origin], self._building[origin] = answer, answer.generation
        self.at[origin] = self.step
        self._origin: int | None = origin

    def _alone(self, ranks: Iterable[int]) -> bool:
        """Whether only the origin is asked, which holds the state already."""
        return self._origin is not None and set(ranks) == {self._origin} and self.at.get(self._origin) == self.step

    def require(self, job: Job, ranks: Iterable[int]) -> None:
        """Have workers build the run; the origin has."""
        ranks = set(ranks)
        if not self._alone(ranks):
            super().require(job, ranks)

    def give(self, job: Job, ranks: Collection[int], state: Callable[[], Mapping[str, Any]], step: int) -> None:
        """Bring workers to a state, as `load` does.

        Args:
            job, ranks, state, step: as for `WholeReplicaSet.give`.
        """
        self.load(job, ranks, state, step)

    def leave(self, job: Job) -> bool:
        """Leave nothing: the worker's process may end with its user's program."""
        return False

    def load(self, job: Job, ranks: Iterable[int], state: Given, step: int) -> None:
        """Bring workers to a state; from then on the run knows it, and the origin is one of them.

        Args:
            job, ranks, state, step: as for `WholeReplicaSet.load`.
        """
        ranks = set(ranks)
        if not (step == self.step and self._alone(ranks)):
            super().load(job, ranks, state, step)
        self._origin = None

    def is_gone(self, cluster: Cluster) -> bool:
        """Whether no worker has this state any more: its workers have left, and it was not fetched."""
        return self.master_step != self.step and not set(self.at) & set(cluster.roster.alive())


def is_own(spec: RunSpec) -> bool:
    """Whether a run's model lives at the workers."""
    return spec.model is not None and spec.model.name == OWN_MODEL


def adopt(
    run_id: str, spec: RunSpec, cells: Sequence[Cell], shared: ModuleType | None, cluster: Cluster
) -> ResidentReplicaSet:
    """Return replicas that begin with what the first worker with a model of its own holds.

    Args:
        run_id, spec, cells: of the run.
        shared: module of the shared cells.
        cluster: whose workers are asked.

    Raises:
        ClusterError: no such worker is here.
        ConfigError: the run asks for what such a worker cannot do.
        PreparationError: it cannot build the run.
    """
    if spec.parallel is not None or spec.optimizer_site == "orchestrator":
        raise ConfigError(
            "a model that lives in the worker's own process is trained in data mode with optimizer_site 'workers': its class "
            "is not known here, and it is whole there"
        )
    ranks = [rank for rank in cluster.roster.ready() if "model" in cluster.roster.members[rank].hello.own]
    if not ranks:
        raise ClusterError(
            "no worker with a model of its own is here: run GPUTrainer there, or register_model(Net) here"
        )
    origin = ranks[0]
    answer = _prepare(run_id, spec, cells, cluster, origin)
    master = whole_replica(
        spec,
        lambda name: held(name) if name.startswith("@") else resolve(name, shared),
        torch.device("cpu"),
        model=likeness(answer.model),
    )
    if master.layout.digest() != answer.layout:
        raise PreparationError(
            f"{cluster.name(origin)} described its model in a way that does not fit its own layout: install the same "
            "guava-nb on both sides"
        )
    return ResidentReplicaSet(run_id, spec, cells, master, origin, answer)


def _prepare(run_id: str, spec: RunSpec, cells: Sequence[Cell], cluster: Cluster, rank: int) -> Prepared:
    answers: list[Prepared] = []

    def on_prepared(sender: int, message: Prepared, payload: memoryview) -> None:
        if message.run_id == run_id and sender == rank:
            answers.append(message)

    job = Job(cluster)
    job.run_id = run_id
    job.on(Prepared, on_prepared)
    with job.attached():
        cluster.send(rank, Prepare(run_id, tuple(cells), spec))
        job.pump(lambda: bool(answers) or rank not in job.ready | job.suspects)
    if not answers:
        raise ClusterError(
            f"{cluster.name(rank)} was lost while it prepared the run: {cluster.roster.members[rank].detail}"
        )
    if not answers[0].ok:
        raise PreparationError(preparation_text(cluster.name(rank), answers[0]))
    return answers[0]
