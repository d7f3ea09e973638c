"""A few steps that workers play before a run, each by itself, to learn how long one takes there. Nothing of them stays.

Each worker builds the model, takes its share of one batch as a lone worker does, and reports its seconds as in any run. So it
is the user's own model, loss, optimizer and precision on the real device, and no gradient crosses a line.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection

from guava_nb.cluster.cluster import Cluster
from guava_nb.cluster.job import Job, NobodyLeft
from guava_nb.cluster.report_checks import without_invalid
from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.data.split import RowSplitter, share_ranges
from guava_nb.protocol.messages import EndRun, ShardReport, StepApplied
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.step_in_flight import StepHead, plan_step

__all__ = ["play_steps"]

#: Steps of each worker; the first one compiles and warms up, and counts only where there is no other.
_STEPS = 4
#: After this time a worker begins no further step, and after the second one it is not waited for.
_ENOUGH_S, _MOST_S = 8.0, 60.0


def play_steps(
    cluster: Cluster, replica_set: ReplicaSet, batch: LoadedBatch, splitter: RowSplitter
) -> dict[int, float]:
    """Have all workers that are here play a few steps; no run may be in progress. At most a minute beside building the model.

    Args:
        replica_set: replicas made for this only: of whole models, without a cache, a callback or rounds.
        batch: of the loader; each worker takes an equal part of it, or all of it where it cannot be cut.
        splitter: cuts it.

    Returns:
        Seconds per sample by rank, of those that could play.

    Raises:
        PreparationError: a worker cannot build the run.
        ClusterError: a run is in progress.
    """
    job = Job(cluster)
    replica_set.attach(job)
    trial = _Trial(job, replica_set, batch, splitter)
    job.on(StepApplied, trial.on_applied)
    try:
        with job.attached():
            ranks = sorted(job.ready)
            try:
                replica_set.require(job, ranks)
                trial.play(ranks)
            finally:
                here = job.ready | job.suspects
                cluster.send_all([rank for rank in ranks if rank in here], EndRun(replica_set.run_id))
    except NobodyLeft:
        return {}
    return trial.found()


class _Trial:
    """The steps that were asked for and the reports on them."""

    def __init__(self, job: Job, replica_set: ReplicaSet, batch: LoadedBatch, splitter: RowSplitter) -> None:
        self._job, self._replica_set, self._batch = job, replica_set, batch
        self._splitter = RowSplitter() if batch.source else splitter
        self._parts: dict[int, LoadedBatch] = {}
        self._seconds: dict[int, list[float]] = {}
        self._asked: dict[int, int] = {}  # by rank the step that is waited for
        self._began = 0.0

    def play(self, ranks: Collection[int]) -> None:
        """Send the first steps and wait for the last ones."""
        self._parts, self._began = self._cut(ranks), time.monotonic()
        for rank in ranks:
            self._send(rank, 0)
        self._job.pump(self._is_over, _MOST_S)

    def found(self) -> dict[int, float]:
        """Return seconds per sample by rank."""
        return {
            rank: statistics.median(each[1:] or each) / self._parts[rank].rows for rank, each in self._seconds.items()
        }

    def on_applied(self, rank: int, message: StepApplied, payload: memoryview) -> None:
        """Take a worker's report on the step that it was asked for, and ask for the next one."""
        report = message.ready
        if message.run_id != self._replica_set.run_id or report is None or self._asked.get(rank) != message.step:
            return
        self._note(rank, report)
        del self._asked[rank]
        if message.step + 1 < _STEPS and time.monotonic() < self._began + _ENOUGH_S:
            self._send(rank, message.step + 1)

    def _note(self, rank: int, report: ShardReport) -> None:
        report, odd = without_invalid(report)
        seconds = report.forward_s + report.backward_s
        if odd:
            self._job.cluster.tell_invalid(rank, "step", odd)
        elif seconds > 0:
            self._seconds.setdefault(rank, []).append(seconds)

    def _is_over(self) -> bool:
        # One whose connection broke comes back with its report; without it a line with breaks would count as one not known.
        here = self._job.ready | self._job.suspects
        return not any(rank in here and rank not in self._job.failed for rank in self._asked)

    def _cut(self, ranks: Collection[int]) -> dict[int, LoadedBatch]:
        batch = self._batch
        if batch.rows < len(ranks) or self._splitter.problem:
            return dict.fromkeys(ranks, batch)
        ranges = share_ranges(batch.rows, [1.0] * len(ranks))
        parts = self._splitter.split(batch.batch, ranges, batch.rows)
        return {
            rank: LoadedBatch(batch.index, part, batch.sample_ids[first:last], last - first, batch.source)
            for rank, part, (first, last) in zip(ranks, parts, ranges, strict=True)
        }

    def _send(self, rank: int, step: int) -> None:
        replicas, cluster = self._replica_set, self._job.cluster
        head = StepHead(replicas.run_id, cluster.roster.generation, step, solo=True)
        _, shards = plan_step(head, [self._parts[rank]], [rank], [1.0], self._splitter, replicas.writer)
        shard, outgoing = shards[0]
        self._asked[rank] = step
        cluster.send(rank, *replicas.writer.write(rank, shard, outgoing))
