"""Faults to be planted, one machine at a time, and where each is looked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from guava_nb.cluster.roster import Roster
from guava_nb.hub.bucket_sum import BucketSum
from guava_nb.sync.group_replica_set import GroupReplicaSet
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.send_credit import SendCredit
from guava_nb.sync.step_in_flight import StepInFlight
from guava_nb.sync.step_machine import Reissue, StepMachine
from guava_nb.training.run import Run
from guava_nb.training.step_accounting import SampleLedger, StepAccounting
from tests.support.explorer import invariants
from tests.support.explorer.configurations import BREAKS, OWING, STEPS
from tests.support.explorer.world import Configuration

__all__ = ["PLANTED", "Planted"]

_ONE = ((0, 1),)
_LONE: dict[str, Any] = {"workers": 1, "faults": {"die": 1, "join": 1}, "together": 2}


@dataclass(frozen=True)
class Planted:
    """A fault: which method does what instead, where it shows, and which invariant must catch it."""

    name: str
    owner: type
    method: str
    instead: Callable[..., Any]
    configuration: Configuration
    caught_by: str
    runs: int = 0
    seed: int = 0


def _early(machine: Any) -> Any:
    return [] if machine.solo or len(machine._ready) < len(machine.tasks) else machine._finish()


def _to_the_lost(machine: Any, rank: int, survivors: Any) -> Any:
    return [Reissue(task.index, rank) for task in machine.owed_by(rank)]


def _without_first(ledger: Any, epoch: int, ids: Any) -> None:
    _commit(ledger, epoch, list(ids)[1:])


def _asks_nothing(machine: Any, rank: int, shard: int, generation: int) -> bool:
    return 0 <= shard < len(machine.tasks)


def _no_range(machine: Any, rank: int, shard: int, generation: int) -> bool:
    return bool(generation == machine.generation and rank == machine.tasks[shard].owner)


def _drops_late(total: Any, shard: int, tensor: Any, present: bytes) -> None:
    _add(total, shard, tensor * 0 if shard else tensor, present)


def _twice(accounting: Any, step: Any, commit: Any, loss_sum: float, count: float) -> None:
    _on_commit(accounting, step, commit, loss_sum, count)
    accounting._ledger.commit(step.epoch, step.sample_ids())


def _any_answer(replicas: Any, rank: int, message: Any, payload: Any) -> None:
    replicas._prepared[rank] = message


def _any_group(replicas: Any, job: Any, rank: int, message: Any) -> None:
    _note_break(replicas, job, rank, msgspec.structs.replace(message, generation=replicas.generation))


def _keeps_holders(replicas: Any, step: int) -> None:
    held = replicas.at
    replicas.take_back(step)
    replicas.at = held


def _place_of_the_last_step(accounting: Any, step: int | None = None) -> Any:
    if not accounting._run.history:
        return accounting.snapshot.position
    feed = accounting._plan.feed.position(accounting._feed_epoch, accounting._feed_batches)
    return replace(accounting.position, feed=feed)


_commit, _add, _on_commit = SampleLedger.commit, BucketSum.add, StepAccounting.on_commit
_note_break = GroupReplicaSet.note_break


def _c(**changes: Any) -> Configuration:
    return Configuration(**changes)


PLANTED = (
    Planted("a step is committed before its buckets are complete", StepMachine, "_decide", _early,
            _c(batches=_ONE), invariants.WAIT),
    Planted("a lost worker's shard is issued to it again", StepMachine, "on_away", _to_the_lost,
            _c(batches=_ONE, faults={"die": 1}), invariants.WAIT),
    Planted("a worker may report on any shard", StepMachine, "was_asked", _asks_nothing,
            _c(batches=_ONE, unasked=True), invariants.ASKED),
    Planted("a shard's number is not looked at", StepMachine, "was_asked", _no_range,
            _c(batches=_ONE, unasked=True, exchange="group"), invariants.ASKED),
    Planted("a contribution is lost in the sum", BucketSum, "add", _drops_late,
            _c(batches=_ONE), invariants.PARAMETERS),
    Planted("a sum is counted for another bucket", StepInFlight, "add", lambda step, *rest: None,
            _c(batches=_ONE), invariants.GOES_ON),
    Planted("a sample is forgotten at the commit", SampleLedger, "commit", _without_first,
            _c(batches=_ONE), invariants.ONCE),
    Planted("going back forgets no sample", SampleLedger, "truncate", lambda *rest: None,
            _c(**_LONE), invariants.ONCE),
    Planted("a commit is counted twice", StepAccounting, "on_commit", _twice, _c(batches=_ONE), invariants.ONCE),
    Planted("going back keeps the history", Run, "rewind", lambda *rest: None, _c(**_LONE), invariants.HISTORY),
    Planted("credit is never given back", SendCredit, "worked", lambda *rest: None,
            _c(batches=_ONE), invariants.CREDIT),
    Planted("a return is no news", Roster, "resume", lambda *rest: False,
            _c(workers=1, faults={"cut": 1}), invariants.WAIT),
    Planted("an answer to an earlier order counts", ReplicaSet, "_on_prepared", _any_answer,
            _c(workers=1, faults={"cut": 2, "interrupt": 1, "die": 1, "join": 1}, together=4), invariants.WAIT, 600),
    Planted("who held the state before holds it after going back", ReplicaSet, "go_back", _keeps_holders,
            _c(batches=STEPS, site="orchestrator", faults={"cut": 1, "die": 1, "join": 1}, together=3), invariants.AHEAD, 200, 1),
    Planted("a report on another group counts against the one that stands", GroupReplicaSet, "note_break", _any_group,
            _c(batches=_ONE, unasked=True, exchange="group"), invariants.ASKED),
    Planted("a step that was undone counts as held", ReplicaSet, "_has_undone", lambda *rest: False,
            _c(exchange="parts", faults={"undone": 1}), invariants.COSTS),
    Planted("after going back the data go on behind what was lost", StepAccounting, "where", _place_of_the_last_step,
            _c(workers=1, snapshot_every=1, faults={"die": 1, "interrupt": 1, "join": 1}, together=3), invariants.ONCE),
    Planted("no one is told that a message does not count", StepInFlight, "void", lambda *rest: {},
            _c(**OWING, faults=BREAKS, together=4), invariants.OWED, 40),
)  # fmt: skip
