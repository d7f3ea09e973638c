"""A pass between runs: brings workers to the last committed state, walks the loader, and leaves them ready for more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft, StopRequested
from guava_nb.cluster.job_events import Interrupted
from guava_nb.data.loader_feed import LoaderFeed
from guava_nb.data.split import SplitFunction
from guava_nb.errors import ClusterError, ConfigError, WorkerLost
from guava_nb.evaluation.batch_orders import Question
from guava_nb.evaluation.passes import Progress, pass_over
from guava_nb.evaluation.validation import Validation
from guava_nb.processes.interrupts import interrupts_call
from guava_nb.sync.replica_set import GroupLost, ReplicaSet

__all__ = ["ask"]


def ask(
    cluster: Cluster,
    replica_set: ReplicaSet,
    feed: LoaderFeed,
    question: Question,
    *,
    skip_batches: int = 0,
    grace_s: float = 5.0,
    progress: Progress | None = None,
    split_fn: SplitFunction | None = None,
) -> None:
    """Ask about every batch of the feed's next epoch; no run may be in progress.

    Args:
        cluster: the workers of the session.
        replica_set: whose last committed state is asked.
        feed: the loader; closed at the end.
        question: what is asked, and what takes the answers.
        skip_batches: of the loader, that were done before.
        grace_s: seconds that a group gets to end the batch in work after an interrupt.
        progress: called a few times a second on the calling thread.
        split_fn: the user's function that cuts batches, where they are shared out; None cuts them as they are read.

    Raises:
        KeyboardInterrupt: an interrupt came; it is raised after cleaning up, never in between.
        ClusterError: no worker is here, or a run is in progress.
        WorkerLost: too few workers are left.
        RemoteError: the user's code raised on a worker.
        ConfigError: a batch or an output has no form that this can take.
    """
    job = Job(cluster)
    replica_set.attach(job)
    walk = pass_over(job, replica_set, lambda lost: _bring_up(job, replica_set, lost), split_fn)
    with interrupts_call(lambda: job.post(Interrupted())), job.attached(), closing(feed), _errors_for_users(job):
        try:
            replica_set.look_at(feed)
            _bring_up(job, replica_set)
            walk.run(feed, question, skip_batches=skip_batches, progress=progress)
            for note in question.notes().values() if isinstance(question, Validation) else ():
                cluster.notice(note)
        except BaseException as error:
            walk.leave(grace_s if isinstance(error, StopRequested) else 0.0)
            raise


@contextmanager
def _errors_for_users(job: Job) -> Iterator[None]:
    """Turn the exceptions that unwind a job into errors for users."""
    here = job.ready | job.suspects
    try:
        yield
    except StopRequested:
        raise KeyboardInterrupt from None
    except NobodyLeft as error:
        lost = "; ".join(
            f"{job.cluster.name(rank)} was lost: {job.cluster.roster.members[rank].detail}" for rank in sorted(here)
        )
        nothing = "no worker is here: run %guava_worker with the join code elsewhere"
        if lost:
            raise WorkerLost(f"{lost}; {nothing}, and ask again") from error
        raise ClusterError(nothing) from error
    except GroupLost as error:
        raise WorkerLost(f"{error}; ask again when enough workers are here") from error


def _bring_up(job: Job, replica_set: ReplicaSet, lost: GroupLost | None = None) -> None:
    """Have workers stand at the last committed step; after a loss, and each further one, in a new group of those left."""
    while True:
        if lost is not None:
            job.cluster.notice(f"{lost}; a new group is formed")
            replica_set.abort(job, list(replica_set.at), str(lost))
            replica_set.rescue(job)
            replica_set.disband()
        try:
            replica_set.bring_up(job)
            return
        except ConfigError as error:
            if lost is None:
                raise
            raise WorkerLost(f"{lost}, and {error}") from error
        except GroupLost as another:
            lost = another
