"""The first local steps of the next round, while the sum of the open one is on its way.

Whether and when they are taken changes no number: the replica takes the same steps in the round's turn otherwise. Knows a replica
and what has come of its next step; sends nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from guava_nb.protocol.messages import BatchShard
from guava_nb.replica.rounds.local_replica import LocalReplica
from guava_nb.replica.shard import ShardResult
from guava_nb.telemetry import BACKWARD, FORWARD, PhaseBook
from guava_nb.worker.device_prefetch import DevicePrefetch
from guava_nb.worker.pending_steps import PendingSteps
from guava_nb.worker.preparation import USER_ERRORS, PreparedRun
from guava_nb.worker.smaller_pieces import work_of

__all__ = ["EarlySteps", "key_of", "note_work"]

log = logging.getLogger(__name__)


class EarlySteps:
    """Begins a round whose predecessor was done here and is not committed.

    Args:
        prefetch: gives the batches.
        phases: is told what was done when.
        on_work: called when a round begins.
    """

    def __init__(self, prefetch: DevicePrefetch, phases: PhaseBook, on_work: Callable[[], None]) -> None:
        """Have begun none."""
        self._prefetch, self._phases, self._on_work = prefetch, phases, on_work
        self._begun: BatchShard | None = None

    def may_begin(self, run: PreparedRun | None, pending: PendingSteps[Any]) -> bool:
        """Whether the shards of the open round are done here, its sum is waited for, and the next one can begin."""
        if run is None or not isinstance(run.replica, LocalReplica) or not run.replica.can_begin_early:
            return False
        step, following = pending.current(), pending.next_one()
        if step is None or step.todo or not step.done or following is None or not following.todo:
            return False
        return following.todo[0][0] is not self._begun

    def begin(self, run: PreparedRun, pending: PendingSteps[Any], pieces: int) -> None:
        """Take the first steps of the next round. What is raised is told in the round's turn, where it is raised again."""
        replica, step = run.replica, pending.next_one()
        assert isinstance(replica, LocalReplica) and step is not None
        message, load = step.todo[0]
        self._begun, started = message, time.monotonic()
        self._on_work()
        try:
            parts = self._prefetch.take(key_of(message), load)
            step.todo[0] = message, lambda: parts
            forward_s = replica.begin_early(work_of(message, parts, message.part_rows or (message.rows,), pieces))
        except USER_ERRORS as error:
            log.info("round %d could not be begun early: %s", message.step + 1, error)
            return
        self._phases.add(FORWARD, started, started + forward_s)
        self._phases.add(BACKWARD, started + forward_s, time.monotonic())


def key_of(message: BatchShard) -> tuple[str, int, int, int]:
    """Return what tells a shard's attempt from all others."""
    return message.run_id, message.generation, message.step, message.shard


def note_work(phases: PhaseBook, result: ShardResult, started: float) -> None:
    """Note how long a shard's forward and backward took from `started` on; what was done of it early is noted already."""
    whole_s = result.forward_s + result.backward_s
    part = 1 - result.early_s / whole_s if whole_s else 1.0
    forward_ended = started + result.forward_s * part
    phases.add(FORWARD, started, forward_ended)
    phases.add(BACKWARD, forward_ended, forward_ended + result.backward_s * part)
