"""Messages that no worker was asked for: stale, doubled, of another's shard, of no step, of another run or generation.

Each must change nothing. They are tried in a state, and the state must be the same afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from guava_nb.cluster.job_events import FromWorker
from guava_nb.data.codec import pack
from guava_nb.protocol.messages import (
    CodeRan,
    CodeValues,
    Failure,
    FailureKind,
    FlatTensor,
    GradientBucket,
    GroupFormed,
    Message,
    Prepared,
    RowsWanted,
    ShardReport,
    State,
    StateLoaded,
    StepApplied,
)
from tests.support.explorer.fingerprint import job_key
from tests.support.explorer.invariants import ASKED
from tests.support.explorer.search import Violation

if TYPE_CHECKING:
    from tests.support.explorer.world import World

__all__ = ["try_unasked"]

_TENSOR = FlatTensor("float64", 1)
_BYTES = memoryview(bytearray(8))
_FAR = 1_000_000


@dataclass(frozen=True)
class _Claim:
    """What a report would be about."""

    run_id: str
    generation: int
    step: int
    shard: int

    def messages(self) -> Iterator[Message]:
        """All reports on it."""
        head = {"run_id": self.run_id, "generation": self.generation, "step": self.step}
        ready = ShardReport(
            **head, shard=self.shard, loss_sum=1e9, count=1.0, finite=True, rows=7, forward_s=0.0, backward_s=0.0,
            wait_s=0.0,
        )  # fmt: skip
        yield ready
        for bucket in (0, 1, 99):
            yield GradientBucket(**head, shard=self.shard, bucket=bucket, present=b"\1", tensor=_TENSOR)
        yield StepApplied(**head, ready=ready)


def try_unasked(world: World) -> None:
    """Have every member say what it was not asked, and see that nothing changes."""
    before = _key(world)
    for rank in list(world.job.cluster.roster.members):
        for message in _unasked_of(world, rank):
            name = f"{type(message).__name__} from {world.job.cluster.name(rank)}"
            try:
                world.active.handle(FromWorker(rank, message, memoryview(bytearray(8)), lambda: None))
            except Exception as error:
                raise Violation(ASKED, f"{name}: {type(error).__name__}: {error}; {message}") from error
        if _key(world) != before:
            raise Violation(ASKED, f"a message of {world.job.cluster.name(rank)} changed the run")


def _key(world: World) -> tuple[object, ...]:
    return (
        job_key(world.job), tuple(worker.line.key() for worker in world.workers),
        tuple((m.samples, m.step_s) for m in world.job.cluster.roster),
    )  # fmt: skip


def _unasked_of(world: World, rank: int) -> Iterator[Message]:
    job = world.job
    generation = job.cluster.roster.generation
    run = job.replica_set.run_id
    claims = {_Claim(run, generation, _FAR, 0), _Claim("other", generation, 0, 0)}
    if (at := job.replica_set.at.get(rank, -1)) >= 0:
        claims.add(_Claim(run, generation, at - 1, 0))  # of a step before the last one that it has applied
    for step, in_flight in job.window.exchange.in_flight.items():
        machine = in_flight.machine
        shards = [
            shard for shard in range(len(machine.tasks)) if not machine.was_asked(rank, shard, machine.generation)
        ]
        claims |= {_Claim(run, machine.generation, step, shard) for shard in (-1, _FAR, *shards)}
        claims |= {_Claim(run, machine.generation + by, step, 0) for by in (-1, 1, _FAR)}
    for claim in claims:
        yield from claim.messages()
    yield from _answers(world, rank, generation)


def _answers(world: World, rank: int, generation: int) -> Iterator[Message]:
    replicas = world.job.replica_set
    run = replicas.run_id
    tree, _ = pack({"value": 13, "step": _FAR})
    others = [request for request, asked in replicas._awaited.items() if asked != rank]
    for request in (*others, 0, _FAR):
        yield State(request, run, replicas.step, tree)
    for number in (generation + 1, -7):
        yield StateLoaded(run, _FAR, "other", "cpu", number)
        yield Prepared(run_id=run, ok=False, problem="none", generation=number)
        yield GroupFormed(run_id=run, generation=number, ok=False, problem="none", broken=True)
        for kind in FailureKind:
            yield Failure(run_id=run, kind=kind, type_name="E", text="t", traceback="", generation=number)
    yield StepApplied(run_id=run, generation=generation, step=_FAR, parameter_hash="other", learning_rate=0.5)
    yield CodeRan(request_id=_FAR)
    yield CodeValues(_FAR, tree)
    yield RowsWanted(run_id=run, keys=b"", step=_FAR, shard=0)
    yield RowsWanted(run_id=run, keys=b"", step=replicas.step + 1, shard=-1)
    yield Failure(run_id="other", kind=FailureKind.USER, type_name="E", text="t", traceback="")
