"""The state of everything, as one value that can be compared and hashed.

The job is straight code, so where it stands is part of the state: the functions it is in, the place in each, and their
local numbers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Hashable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from guava_nb.data.loader_feed import LoadedBatch
from guava_nb.hub.bucket_sum import BucketSum
from guava_nb.protocol.messages import Message
from guava_nb.replica.buffer_merge import BufferMerge
from guava_nb.sync.step_in_flight import StepInFlight
from guava_nb.training.plan import Position
from guava_nb.worker.early_steps import key_of

if TYPE_CHECKING:
    from tests.support.explorer.orchestrator import ExploredJob
    from tests.support.explorer.world import World

__all__ = ["job_key", "world_key"]

_PLAIN = (int, float, str, bytes, bool, type(None))


def freeze(value: Any) -> Hashable:
    """A value of plain parts as a hashable one."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, msgspec.msgpack.encode(value))
    if isinstance(value, Mapping):
        return tuple(sorted(((freeze(k), freeze(v)) for k, v in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(freeze, value), key=repr))
    if isinstance(value, tuple | list | deque):
        return tuple(map(freeze, value))
    if isinstance(value, Position):
        return value.epoch, value.batches, value.samples
    if isinstance(value, BucketSum):
        waiting = tuple((k, freeze(t)) for k, t in sorted(value._waiting.items()))
        return value._next, value._present, freeze(value._total), waiting
    if isinstance(value, BufferMerge):
        return freeze(value._changes)
    if isinstance(value, torch.Tensor):
        return tuple(value.to_dense().flatten().tolist())
    if hasattr(value, "tolist"):
        return freeze(value.tolist())
    if hasattr(value, "__slots__") and not isinstance(value, Message):
        return tuple(freeze(getattr(value, name)) for name in value.__slots__ if hasattr(value, name))
    raise TypeError(f"{type(value).__name__} is no part of a state")


def _place(frame: FrameType | None) -> Hashable:
    """Where the job stands, from `ExploredJob.take_one` outwards."""
    places = []
    while frame is not None and frame.f_code.co_name != "go":
        if "guava_nb" in frame.f_code.co_filename:
            local = tuple((k, v) for k, v in frame.f_locals.items() if isinstance(v, int | float | str))
            sets = tuple((k, freeze(v)) for k, v in frame.f_locals.items() if isinstance(v, set) and k != "late")
            places.append((frame.f_code.co_name, frame.f_lasti, local, sets))
        frame = frame.f_back
    return tuple(places)


def _in_flight(step: StepInFlight) -> Hashable:
    machine = step.machine
    tasks = tuple((task.index, task.owner, *sorted(task.earlier)) for task in machine.tasks)
    return (
        machine.step, machine.generation, machine.solo, machine.decided, tasks, freeze(machine._arrived),
        tuple(sorted(machine._ready)), machine._complete, machine._held, step.members, freeze(step.sums), freeze(step.messages),
    )  # fmt: skip


def job_key(job: ExploredJob) -> Hashable:
    """The orchestrator's state, without where its job stands."""
    replicas, members, accounting = job.replica_set, job.membership, job.accounting
    window, recovery, cluster = job.window, job._recovery, job.cluster
    roster = tuple((m.rank, m.state) for m in cluster.roster)
    feeder: Any = window._feeder
    group: Any = replicas
    return (
        replicas.run_id, roster, cluster.roster.generation, freeze(cluster._leaving), freeze(job.failed),
        freeze(job.ready), freeze(job.suspects), job.interrupts,
        freeze(members.behind), members.formed, freeze(members._unfit),
        freeze(accounting.position), accounting.snapshot.step, freeze(accounting.snapshot.position),
        freeze(accounting.snapshot.state), accounting.team, freeze(accounting._ledger._drawn),
        freeze(accounting._ledger._committed), freeze(accounting.poison._at_work), freeze(accounting.poison._lost),
        None if feeder is None else feeder.key(), tuple(_in_flight(f) for f in window.exchange.in_flight.values()),
        window.exchange.next_step, freeze(window._credit._shards), freeze(window._credit._held),
        replicas.step, replicas.master_step, getattr(replicas.master, "value", None), getattr(replicas.master, "fails", None),
        freeze(replicas.at), freeze(replicas.generation_of),
        freeze(set(replicas._prepared)), freeze(replicas._loaded), freeze(replicas._states), freeze(replicas._awaited),
        freeze(replicas._building), freeze(replicas._loading), freeze(replicas._aborted),
        freeze(replicas._ahead_to), freeze(replicas._sent), replicas._requests.__reduce__()[1],
        freeze(replicas._hashes._known), freeze(recovery.held), freeze(job.leaving), freeze(job._boundary.due),
        len(job.run.history), job.run.state,
        freeze(replicas.sums.rests()) if hasattr(replicas, "sums") else (),
        getattr(group, "team", None), getattr(group, "generation", None), getattr(group, "_broken", None),
        freeze(getattr(group, "_away", {})), getattr(group, "_retired", None), getattr(group, "_breaks", None),
        freeze(getattr(group, "_formed", {})),
    )  # fmt: skip


def _worker_key(worker: Any) -> Hashable:
    steps, loop, replica = worker.steps, worker.loop, worker.replica
    pending = steps._pending
    todo = tuple(
        (n, s.generation, s.announced, tuple(m.shard for m, _ in s.todo), tuple(sorted(s.done)),
         tuple((b, tuple(t.tolist())) for b, (_, t) in sorted(s.buckets.items())), freeze(s.commit), freeze(s.ready))
        for n, s in sorted(pending._steps.items())
    )  # fmt: skip
    order = worker.seat.order
    return (
        worker.name, worker.alive, worker.rank, worker.blocked, worker.left, worker.line.key(), loop._leaving,
        loop._leave_deadline, pending.committed, todo, pending.abandoned, steps._generation, steps._built_in,
        pending._spared, pending._floor, steps._is_halted,
        None if replica is None else (replica.value, replica.step, freeze(replica.pending), replica.before, replica.fails),
        getattr(replica, "own_key", tuple)(), None if steps._early._begun is None else key_of(steps._early._begun),
        None if order is None else order.generation, worker.seat.broken, worker.seat.generation,
    )  # fmt: skip


def world_key(world: World) -> Hashable:
    """The state of everything. Called while the job waits for an event."""
    active = world.active
    events = tuple((type(e).__name__, getattr(e, "rank", -1)) for e in active.events)
    asked = None if active is world.job else (freeze(active.ready), freeze(active.suspects))
    return hash((
        _place(sys._getframe(1)), job_key(world.job), events, asked, tuple(_worker_key(w) for w in world.workers),
        world.groups.key(), freeze(world.left), world.clock.now, len(world.log), world.ticks,
        None if world.job.saved is None else world.job.saved.step, world.runs,
    ))  # fmt: skip


_ = LoadedBatch
