"""The state that a run left with its workers: brings it here in the background, and says who holds it until then."""

from __future__ import annotations

import threading
from collections.abc import Callable

from guava_nb.cluster.cluster import Cluster
from guava_nb.config.units import show_bytes
from guava_nb.errors import GuavaError
from guava_nb.sync.handover import fetch_between_runs
from guava_nb.sync.replica_set import ReplicaSet

__all__ = ["COPY_AFTER_S", "LeftState"]

#: Seconds after the end of a run in which the next one may begin without workers that copy their state meanwhile.
COPY_AFTER_S = 1.0


class LeftState:
    """Knows the replicas whose state is at the workers only. Thread-safe.

    Args:
        newest: gives the replicas whose state is not to be lost, None where there are none.
    """

    def __init__(self, newest: Callable[[], ReplicaSet | None]) -> None:
        """Nothing was left yet."""
        self._newest = newest
        self._timer: threading.Timer | None = None

    def run_ended(self, replica_set: ReplicaSet, cluster: Cluster) -> None:
        """A run ended: begin to copy what it left, unless the next one begins at once."""
        self.wait_no_more()
        if replica_set.master_step != replica_set.step and replica_set.holders(cluster):
            self._timer = threading.Timer(COPY_AFTER_S, replica_set.begin_copy, (cluster,))
            self._timer.daemon = True
            self._timer.start()

    def wait_no_more(self) -> None:
        """The next run begins, or the session ends."""
        if self._timer is not None:
            self._timer.cancel()

    def note(self, cluster: Cluster | None) -> str:
        """Return who holds the only copy, in a sentence; "" where the state is here."""
        left = self._newest()
        if cluster is None or left is None or _is_here(left):
            return ""
        state, holders = _name(left), [cluster.name(rank) for rank in left.holders(cluster)]
        if not holders:
            return f"{state} is lost: the workers that had it are gone. {_left_over(left)}"
        who = " and ".join(holders)
        have = "has" if len(holders) == 1 else ("each have" if left.elastic else "together have")
        size = show_bytes(left.master.weights_bytes)
        return f"{who} {have} {state} ({size} of weights), and this machine does not have it yet: it comes in the background"

    def bring_home(self, cluster: Cluster, patience_s: float) -> str:
        """The session ends: bring what is only at the workers here; an interrupt gives that up.

        Returns:
            What is lost, in a sentence; "" for nothing.
        """
        self.wait_no_more()
        left = self._newest()
        if left is None or _is_here(left):
            return ""
        why = "the workers that had it are gone"
        try:
            if left.holders(cluster):
                fetch_between_runs(left, cluster, patience_s)
                return ""
        except (KeyboardInterrupt, GuavaError) as error:
            why = str(error) or "an interrupt ended the wait for it"
        return f"the session ends without {_name(left)} ({why}). {_left_over(left)}"


def _is_here(replica_set: ReplicaSet) -> bool:
    copy, step = replica_set.copy, replica_set.step
    return replica_set.master_step == step or (copy is not None and copy.step == step and copy.is_whole)


def _name(replica_set: ReplicaSet) -> str:
    return f"the state after {replica_set.nth(replica_set.step)} of {replica_set.run_id}"


def _left_over(replica_set: ReplicaSet) -> str:
    file = replica_set.newest_file()
    return f"What is left is {replica_set.fallback().name}" + (f", and its newest checkpoint, {file}" if file else "")
