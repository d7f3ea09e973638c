"""A pass between runs: has workers stand at the last committed state, walks the loader, and leaves everybody fit for more."""

from __future__ import annotations

import logging

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft, StopRequested
from guava_nb.cluster.job_events import Interrupted
from guava_nb.data.loader_feed import Feed
from guava_nb.errors import ClusterError, ConfigError, WorkerLost
from guava_nb.evaluation.choose import pass_for
from guava_nb.evaluation.passes import Pass, Progress, Question
from guava_nb.processes.interrupts import interrupts_call
from guava_nb.protocol.messages import Abort
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.sharded_replica_set import GroupLost, ShardedReplicaSet

__all__ = ["ask"]

log = logging.getLogger(__name__)


def ask(
    cluster: Cluster,
    replica_set: ReplicaSet,
    feed: Feed,
    question: Question,
    *,
    skip_batches: int = 0,
    grace_s: float = 5.0,
    progress: Progress | None = None,
) -> None:
    """Ask about every batch of the feed's next epoch; no run may be in progress.

    Args:
        cluster: who is here.
        replica_set: whose last committed state is asked.
        feed: the loader; closed at the end.
        question: what is asked, and what takes the answers.
        skip_batches: of the loader, that were done before.
        grace_s: seconds that a group gets to end the batch in work after an interrupt.
        progress: called a few times a second on the calling thread.

    Raises:
        KeyboardInterrupt: an interrupt came; it is raised after cleaning up, never in between.
        ClusterError: no worker is here, or a run is in progress.
        WorkerLost: too few workers are left.
        RemoteError: the user's code raised on a worker.
        ConfigError: a batch or an output has no form that this can take.
    """
    job = Job(cluster)
    replica_set.attach(job)
    walk = pass_for(job, replica_set, lambda lost: _form_again(job, replica_set, lost))
    with interrupts_call(lambda: job.post(Interrupted())), job.attached():
        try:
            replica_set.look_at(feed)
            _bring_up(job, replica_set)
            walk.run(feed, question, skip_batches=skip_batches, progress=progress)
        except BaseException as error:
            _leave(job, replica_set, walk, grace_s if isinstance(error, StopRequested) else 0.0)
            if isinstance(error, StopRequested):
                raise KeyboardInterrupt from None
            if isinstance(error, NobodyLeft):
                raise ClusterError("no worker is here: run %guava_worker with the join code elsewhere") from error
            if isinstance(error, GroupLost):
                raise WorkerLost(f"{error}; ask again when enough workers are here") from error
            raise
        finally:
            feed.close()


def _bring_up(job: Job, replica_set: ReplicaSet) -> None:
    try:
        replica_set.bring_up(job)
    except GroupLost as lost:
        _form_again(job, replica_set, lost)


def _form_again(job: Job, replica_set: ReplicaSet, lost: GroupLost) -> None:
    """Form another group of whoever is here, and again if somebody is lost meanwhile."""
    again: GroupLost | None = lost
    while again is not None:
        job.cluster.notice(f"{again}; a new group is formed")
        _give_up(job, replica_set, str(again))
        try:
            replica_set.bring_up(job)
            again = None
        except ConfigError as error:
            raise WorkerLost(f"{again}, and {error}") from error
        except GroupLost as another:
            again = another


def _leave(job: Job, replica_set: ReplicaSet, walk: Pass, grace_s: float) -> None:
    """Workers of a star go on by themselves; those of a group wait for each other, so nobody may be left in it."""
    if not isinstance(replica_set, ShardedReplicaSet) or not replica_set.team:
        return
    job.interrupts = 0
    try:
        if grace_s and replica_set.complete(job) and job.pump(lambda: not walk.outstanding, grace_s):
            return
    except (StopRequested, NobodyLeft) as hurry:  # a second interrupt, or nobody to wait for
        log.info("the batch in work is not waited for: %s", type(hurry).__name__)
    _wake(job, replica_set, "the pass over the data was given up")
    replica_set.retire()


def _give_up(job: Job, replica_set: ReplicaSet, reason: str) -> None:
    """Give a broken group up, and save what is there of the state."""
    _wake(job, replica_set, reason)
    replica_set.rescue(job)
    replica_set.disband()


def _wake(job: Job, replica_set: ReplicaSet, reason: str) -> None:
    """Wake everyone who is blocked in the group."""
    job.cluster.roster.generation += 1
    abort = Abort(replica_set.run_id, job.cluster.roster.generation, replica_set.step, reason)
    job.cluster.send_all(list(replica_set.at), abort)
