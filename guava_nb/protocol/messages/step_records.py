"""Training: state, shards, gradients, sums and commits."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from guava_nb.protocol.messages.row_records import CachedRows
from guava_nb.protocol.messages.wire_types import Channel, FlatTensor, Message, Tree

__all__ = [
    "Abort",
    "Commit",
    "CommitStep",
    "StepApplied",
    "FetchState",
    "GradientBucket",
    "LoadState",
    "ParameterBucket",
    "ParameterChange",
    "ShardReport",
]
__all__ += [
    "SaveState",
    "SavedState",
    "BatchShard",
    "State",
    "StateLoaded",
    "StepWithoutShard",
    "SumBucket",
    "SchedulerStep",
]


class LoadState(Message, frozen=True):
    """Orchestrator to worker: become this state. The tree holds model, optimizer, scheduler, scaler."""

    NUMBER: ClassVar[int] = 20
    CHANNEL: ClassVar[Channel] = Channel.CHECKPOINT

    run_id: str
    generation: int
    step: int  # last committed step, -1 for the start
    state: Tree
    want_hash: bool = True
    ticks: int = 0  # those that the state's schedule has, or that count no more: see `SchedulerStep`
    own: int = 0  # number of the own part that is to be read from this machine's disk beside it; 0: none


class StateLoaded(Message, frozen=True):
    """Worker to orchestrator: the state is in place."""

    NUMBER: ClassVar[int] = 21

    run_id: str
    step: int
    parameter_hash: str
    device_kind: str  # device type, torch version and the part of the model held; hashes must be equal within one
    generation: int = -1  # of the `LoadState` that this answers
    own: bool = False  # its own part was read, too


class SaveState(msgspec.Struct, frozen=True):
    """What is to be done with a state that stays at the worker."""

    number: int = 0  # write it to this machine's disk under this number; 0: do not
    known: int = (
        0  # the number of the one there that is known at the orchestrator: all others of the run may go; 0: none is
    )
    base: int = 0  # number of the weights to which differences are sent; 0: none
    held: int = -1  # differences to them that the orchestrator holds; -1: they are the weights as they are now
    count: int = 0  # elements of each 4,096 of the next difference; 0: send none
    step: int = -1  # after which the state is meant: a worker that has gone on keeps nothing
    own: bool = False  # write what only this worker has (`LocalReplica.own_part`), to be found after the session, too


class SavedState(msgspec.Struct, frozen=True):
    """What came of a `SaveState`."""

    digest: str = ""  # SHA-256 of the file, as hex; "" where none was asked for
    nbytes: int = 0  # of the file
    seconds: float = 0.0  # that it took until this was sent
    held: int = -1  # as it was asked for; -1 where the weights of that number are not here: no difference comes
    left_out: float = (
        0.0  # which part of the way from what is held to the weights of now the difference leaves out, 0 to 1
    )
    problem: str = ""  # why no file could be written


class FetchState(Message, frozen=True):
    """Orchestrator to worker: send the state as of the last committed step, with so many ticks of its schedule.

    It may come before the last of these ticks, which travel on another channel; the answer waits for them. With `save` it stays
    there, and the answer has a difference of its weights instead, where one was asked for; `model` sends it all the same.
    """

    NUMBER: ClassVar[int] = 22

    request_id: int
    run_id: str
    model: bool = True
    optimizer: bool = True
    ticks: int = 0
    save: SaveState | None = None


class State(Message, frozen=True):
    """Worker to orchestrator: the answer to `FetchState`.

    `kept` names what the user's code changed in this run outside of the state; in brackets what it filled for the first time.
    `ticks`: so many its schedule has had; more than were asked for where the next one came before the question.
    """

    NUMBER: ClassVar[int] = 23
    CHANNEL: ClassVar[Channel] = Channel.CHECKPOINT

    request_id: int
    run_id: str
    step: int
    state: Tree
    kept: tuple[str, ...] = ()
    ticks: int = 0
    saved: SavedState | None = None


class BatchShard(Message, frozen=True, kw_only=True):
    """Orchestrator to worker (BATCH): do this part of a step; here is its data.

    A step is done by every worker: those with no shard of it still get its sums and commit.

    Attributes:
        generation: the membership in which this attempt of the step was first issued; shards that are issued again
            after a loss keep it, an aborted step gets a new one.
        step: optimizer step, counted from 0 over the whole run.
        shard: index in summation order.
        rows: samples in this shard, over all parts of its batch; `group`: 0 on ranks that do not report the loss.
        global_rows: samples in the whole step; the loss is divided by it before backward.
        solo: the receiver is the only worker: it keeps its gradients, and commits by itself where the run has no lockstep;
            `group`: its ranks vote among themselves, and apply a step on which all agree.
        want_hash: report a hash of the parameters after this step.
        part_rows: `group`: samples of each part; 0 marks a stand-in row that only keeps the group's operations going.
        cached: one per part when the worker keeps rows; empty when all parts came whole.
        batch: a list of parts, each of rows of one loader batch; more than one with accumulation.
        source: the parts are int64 tensors of sample ids in this data set of `RunSpec.data`, from 1; 0: they are batches.
        axes: how each part is cut further, by `guava_nb.nested.marks_of`; empty where it must not be.
        part_steps: in a round of local steps the one that each part belongs to, from 0, in order; empty where it is one step.
        num_steps: optimizer steps of the round; this worker may have no samples in some.
        local_batches: into how many local batches each step of a round is cut; `part_steps` then counts these, and the worker
            takes a local step on each.
        buffers: `group`: policies of buffers that the one-step check found, for those that `RunSpec.buffers` leaves to us.
    """

    NUMBER: ClassVar[int] = 24
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    generation: int
    step: int
    shard: int
    rows: int
    global_rows: int
    batch: Tree
    solo: bool = False
    want_hash: bool = False
    part_rows: tuple[int, ...] = ()
    cached: tuple[CachedRows, ...] = ()
    source: int = 0
    axes: tuple[bytes, ...] = ()
    part_steps: tuple[int, ...] = ()
    num_steps: int = 1
    local_batches: int = 1
    buffers: str = ""


class StepWithoutShard(Message, frozen=True):
    """Orchestrator to worker without a shard in this step: it exists, wait for its sums and commit."""

    NUMBER: ClassVar[int] = 25
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    generation: int
    step: int
    want_hash: bool = False


class GradientBucket(Message, frozen=True, kw_only=True):
    """Worker to orchestrator (GRADIENT): one bucket of one shard, summed over its rows, divided by global_rows.

    `present` has a bit per parameter of the bucket, lowest bit first: set when the parameter got a gradient.
    Bucket index -1 carries the model's floating-point buffers after this shard's forward.
    """

    NUMBER: ClassVar[int] = 26
    CHANNEL: ClassVar[Channel] = Channel.GRADIENT

    run_id: str
    generation: int
    step: int
    shard: int
    bucket: int
    present: bytes
    tensor: FlatTensor


class ParameterChange(msgspec.Struct, frozen=True, array_like=True):
    """What a worker's forward, or the step function, changed of the trained parameters."""

    name: str  # of the first
    digest: str  # of the names and bits of all that changed
    norm: float  # sum of their norms
    rounding: float  # relative, of that


class ShardReport(Message, frozen=True, kw_only=True):
    """Worker to orchestrator: forward and backward of this shard are done and its buckets are on their way."""

    NUMBER: ClassVar[int] = 27

    run_id: str
    generation: int
    step: int
    shard: int
    loss_sum: float
    count: float
    finite: bool
    rows: int
    forward_s: float
    backward_s: float
    wait_s: float  # time without work since the last commit
    nonfinite: str = ""  # with no buckets: the first parameter or buffer that is not finite
    gradient_square: float | None = None  # squared norm of the gradient: of a lone worker, a share of a `group`'s rank
    tokens: float | None = None  # as the user's function counted them; None when not asked, or not counted here
    unlike: tuple[str, ...] = ()  # `group`: buffers that replicas changed differently, with no rule or choice for it
    changed: ParameterChange | None = None  # not of a lone worker
    owed: float | None = (
        None  # of a round: norm of all that messages left out so far, over that of the round's own gradient
    )
    frozen: tuple[str, ...] | None = None  # parameters that take no gradient any more; None without samples


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """Apply the step: every sum is multiplied by `scale`; with `skip` only the scaler learns of it.

    `clip` is the factor that clipping asks for where the hub knows the norm (`group`); elsewhere workers clip alike. `steps`
    are the optimizer steps of a round of local steps, else 1. `frozen` are parameters that take no gradient any more at workers
    with samples; None where no worker told.
    """

    scale: float
    skip: bool
    clip: float = 1.0
    steps: int = 1
    frozen: tuple[str, ...] | None = None


class SumBucket(Message, frozen=True, kw_only=True):
    """Orchestrator to worker (GRADIENT): one bucket of gradients, summed over all shards in shard order.

    Bucket index -1 carries the mean of the buffers. The last bucket of a step carries `commit`.

    Attributes:
        forwarded: the shards whose messages the payload has, one after another, in place of the sum; all others are the
            receiver's own. None: it has the sum, encoded as gradients are; or their mean by `partial`, exact.
        shards: how many there are, where messages are forwarded.
        void: with the commit, where messages leave something out: bucket and shard of each message that the receiver was asked
            for and that does not count, since another worker's came first. What it left out is not the receiver's to send.
    """

    NUMBER: ClassVar[int] = 28
    CHANNEL: ClassVar[Channel] = Channel.GRADIENT

    run_id: str
    generation: int
    step: int
    bucket: int
    present: bytes
    tensor: FlatTensor
    commit: Commit | None = None
    forwarded: tuple[int, ...] | None = None
    shards: int = 0
    void: tuple[tuple[int, int], ...] = ()


class ParameterBucket(Message, frozen=True, kw_only=True):
    """Orchestrator to worker (GRADIENT): one bucket of new parameter values, where the orchestrator has the optimizer.

    Bucket index -1 carries the mean of the buffers. The last bucket of a step carries `commit`.

    Attributes:
        void: as of `SumBucket`.
    """

    NUMBER: ClassVar[int] = 43
    CHANNEL: ClassVar[Channel] = Channel.GRADIENT

    run_id: str
    generation: int
    step: int
    bucket: int
    present: bytes
    tensor: FlatTensor
    commit: Commit | None = None
    void: tuple[tuple[int, int], ...] = ()


class CommitStep(Message, frozen=True):
    """Orchestrator to worker (GRADIENT): commit of a step whose last sum does not carry it: every step of a group."""

    NUMBER: ClassVar[int] = 29
    CHANNEL: ClassVar[Channel] = Channel.GRADIENT

    run_id: str
    generation: int
    step: int
    commit: Commit


class StepApplied(Message, frozen=True, kw_only=True):
    """Worker to orchestrator: the step is applied here."""

    NUMBER: ClassVar[int] = 30

    run_id: str
    generation: int
    step: int
    parameter_hash: str = ""
    learning_rate: float | None = None
    skipped: bool = False
    ready: ShardReport | None = None  # where the worker decided: its report on the shard, in the same message


class Abort(Message, frozen=True):
    """Orchestrator to worker (CONTROL): forget every step after `last_committed`; restore buffers and random state."""

    NUMBER: ClassVar[int] = 31

    run_id: str
    generation: int
    last_committed: int
    reason: str


class SchedulerStep(Message, frozen=True):
    """Orchestrator to worker (BATCH, so that it stands in order with the shards): advance the scheduler once.

    `number` counts the ticks of the run and of those that it goes on from: one that a state has already is not done again.
    """

    NUMBER: ClassVar[int] = 32
    CHANNEL: ClassVar[Channel] = Channel.BATCH

    run_id: str
    metric: float | None = None
    number: int = 0
