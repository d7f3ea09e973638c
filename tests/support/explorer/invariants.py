"""What must hold in every state, each under its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.support.explorer.search import Violation

if TYPE_CHECKING:
    from tests.support.explorer.world import World

__all__ = ["INVARIANTS", "at_each_state", "at_the_end", "one_history"]

ONCE = "each sample is committed once"
HISTORY = "one history"
AHEAD = "no worker is ahead of the log"
PARAMETERS = "parameters are a function of the log"
WAIT = "no wait without an enabled event"
ASKED = "a message does what its sender was asked"
GOES_ON = "the run goes on"
CREDIT = "credit is given back"
COSTS = "an error costs no step but its own"
OWED = "what a message left out is owed once, by its sender"
INVARIANTS = (ONCE, HISTORY, AHEAD, PARAMETERS, WAIT, ASKED, GOES_ON, CREDIT, COSTS, OWED)


def one_history(world: World, step: int) -> None:
    """A step is about to be committed: it must be the next one."""
    if step != len(world.log):
        raise Violation(HISTORY, f"step {step} is committed after {len(world.log)} steps")


def at_each_state(world: World) -> None:
    """Look at log and workers."""
    planned = [ids for _ in range(world.configuration.epochs) for ids in world.configuration.batches]
    for step, (was, ids) in enumerate(zip(world.log, planned, strict=False)):
        if sorted(was) != sorted(ids):
            raise Violation(ONCE, f"step {step} was committed with {was}, and its batch has {ids}")
    if len(world.log) > len(planned):
        raise Violation(ONCE, f"{len(world.log)} steps were committed of {len(planned)}")
    for worker in world.workers:
        replica = worker.replica
        if not worker.alive or replica is None:
            continue
        ahead = worker.steps._ahead  # a lone worker's step that the device has taken, of which it has not heard yet
        has = worker.steps.committed + (ahead is not None and ahead.launched.read().finite)
        if replica.step != has or not -1 <= replica.step < len(world.expected) - 1:
            raise Violation(PARAMETERS, f"{worker.name} says step {worker.steps.committed} and has {replica.step}")
        if not _is_expected(world, replica.step, replica.value):
            raise Violation(
                PARAMETERS, f"{worker.name} after step {replica.step} has other parameters than a plain run"
            )
    _not_ahead(world)
    if world.configuration.owes:
        _owed(world)


def _is_expected(world: World, step: int, value: int) -> bool:
    """Whether these are the parameters after a step; where messages leave something out, that is looked at by `_owed`."""
    return world.configuration.owes or value == world.expected[step + 1]


def _owed(world: World) -> None:
    """What sums came to and what is still owed is what the committed samples came to: less only where an owner is lost."""
    if not world.job.membership.formed:
        return
    steps, team = len(world.log), [world._ranks[rank] for rank in world.job.membership.current()]
    if any(not worker.alive or worker.replica is None or worker.replica.step != steps - 1 for worker in team):
        return  # a commit is on its way
    replicas: Any = [worker.replica for worker in team]
    if len({replica.value for replica in replicas}) > 1:
        raise Violation(PARAMETERS, f"workers differ after step {steps - 1}")
    counted = Counter(sample for ids in world.log for sample in ids)
    rests = [world.job.replica_set.sums.rests(), *(replica.wire.rests() for replica in replicas)]  # type: ignore[attr-defined]
    for sample in range(world.configuration.samples):
        known = float(replicas[0].total[sample]) + sum(float(rest["0"][sample]) for rest in rests if rest)
        is_lost = bool(world.happened() - {"cut", "late"}) or world.runs > 1 or len(team) < world.configuration.workers
        if known > counted[sample] + 1e-9 or (not is_lost and known < counted[sample] - 1e-9):
            raise Violation(
                OWED,
                f"after step {steps - 1} {known:g} of sample {sample} was sent or is owed, and {counted[sample]} counted",
            )


def _not_ahead(world: World) -> None:
    """A worker that takes part may hold a step that is not in the log only if it may be applied first."""
    job = world.job
    first = {
        t.owner: f.machine.step
        for f in job.window.exchange.in_flight.values()
        if f.machine.is_applied_first
        for t in f.machine.tasks
    }
    if not job.membership.formed:
        return
    for rank in job.membership.current():
        worker = world._ranks[rank]
        most = max(len(world.log) - 1, first.get(rank, -1))
        if worker.alive and worker.steps.committed > most:
            raise Violation(
                AHEAD, f"{worker.name} has applied step {worker.steps.committed}, the log has {len(world.log)} steps"
            )


def _present(world: World) -> int:
    return sum(worker.alive and not worker.line.away and not worker.line.closed for worker in world.workers)


def _costs(world: World, state: str) -> None:
    """A run that failed has lost its last step if that was undone, and none if an error changed nothing."""
    happened, can_undo = world.happened(), world.configuration.undoes
    harmless = {"undone", "schedule", "forward", "nan"}
    if world.configuration.exchange in ("group", "voting") and _present(world) > 1:
        harmless |= {"torn"}  # each of the others holds all of the model; an earlier run may have left one worker alone
    if state == "failed" and can_undo and len(happened) == 1 and happened <= harmless:
        costs = int(happened == {"undone"})
        if len(world.log) < world.longest - costs:
            raise Violation(COSTS, f"{world.longest} steps were committed, {len(world.log)} are left")


def is_whole(world: World, state: Mapping[str, Any]) -> None:
    """This state was left by a run that has ended: it must be that after the last step in the log."""
    steps = len(world.log)
    if (state["step"], world.job.replica_set.step) != (steps - 1, steps - 1):
        raise Violation(HISTORY, f"the state that is left is of step {state['step']}, the log has {steps} steps")
    if not _is_expected(world, steps - 1, state["value"]):
        raise Violation(
            PARAMETERS, f"the state that is left after step {steps - 1} has other parameters than a plain run"
        )


def at_the_end(world: World, state: str) -> None:
    """The run is over: look at its books."""
    job, planned = world.job, len(world.configuration.batches) * world.configuration.epochs
    if state == "done" and len(world.log) != planned:
        raise Violation(ONCE, f"the run is done after {len(world.log)} of {planned} steps")
    first = job.accounting.first_step
    history = [record["step"] - 1 for record in job.run.history]
    if history != list(range(first, len(world.log))):
        raise Violation(HISTORY, f"the history has steps {history}, the log {len(world.log)}")
    if job.replica_set.step != len(world.log) - 1:
        raise Violation(HISTORY, f"the run stands at step {job.replica_set.step}, the log has {len(world.log)} steps")
    _costs(world, state)
    books = (job.run.lost_samples, job.run.duplicated_samples)
    if state == "done" and books != (0, 0):
        raise Violation(ONCE, f"the ledger says {books} lost and doubled")
    held = {rank: job.window._credit.held_bytes(rank) for rank in world._ranks}
    if state == "done" and any(held.values()):
        raise Violation(CREDIT, f"the run is over, and workers count as holding {held} bytes")
    master = job.replica_set.master
    if state == "done" and (master.step != planned - 1 or not _is_expected(world, planned - 1, master.value)):  # type: ignore[attr-defined]
        raise Violation(PARAMETERS, "the trained model is not that of a plain run")
