"""Which exchange and which pass go with an ensemble: replicas have a star, parts of one model have a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from guava_nb.evaluation.group_pass import GroupPass
from guava_nb.evaluation.passes import Pass, StarPass
from guava_nb.sync.exchange import OnApplied, OnCommit
from guava_nb.sync.group_exchange import GroupExchange
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.send_credit import Credit
from guava_nb.sync.sharded_replica_set import GroupLost, ShardedReplicaSet
from guava_nb.sync.star_exchange import StarExchange

if TYPE_CHECKING:
    from guava_nb.cluster.job import Job

__all__ = ["AnyExchange", "GroupLost", "pass_for", "tools_for"]

AnyExchange = StarExchange | GroupExchange


def pass_for(job: Job, replica_set: ReplicaSet, form_again: Callable[[GroupLost], None] | None = None) -> Pass:
    """Return what walks a loader on this ensemble; `form_again` as for `GroupPass`."""
    return (
        GroupPass(job, replica_set, form_again)
        if isinstance(replica_set, ShardedReplicaSet)
        else StarPass(job, replica_set)
    )


def tools_for(
    job: Job, replica_set: ReplicaSet, on_commit: OnCommit, on_applied: OnApplied, credit: Credit
) -> tuple[Pass, AnyExchange]:
    """Return what validates on this ensemble and what does its steps."""
    walk = pass_for(job, replica_set)
    if isinstance(replica_set, ShardedReplicaSet):
        return walk, GroupExchange(job, replica_set, on_commit, on_applied, credit)
    return walk, StarExchange(job, replica_set, on_commit, on_applied, credit)
