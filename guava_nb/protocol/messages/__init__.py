"""What can be said: every message as a typed record.

Knows the records and their numbers; knows nothing of framing, sockets or tensors' libraries. A record travels as
msgpack (one array per record, fields in order). Tensor bytes never stand inside a record: they follow it as the frame's
payload, described by `TensorSpec` in the record's `Tree` or `FlatTensor`.

Numbers in `MESSAGE_KINDS` are the wire format: never reuse one.
"""

# over budget: one table of everything that can be said; splitting it would hide the numbers from each other.

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

__all__ = ["CONTROL_CHANNELS", "KIND_OF", "MESSAGE_KINDS", "Channel", "Message", "channel_of", "counted_as"]


class Channel(IntEnum):
    """A traffic class. Lower numbers go first when several wait to be sent."""

    HEARTBEAT = 0
    CONTROL = 1
    METRICS = 2
    COLLECTIVE = 3
    GRADIENT = 4
    ACTIVATION = 5
    BATCH = 6
    CHECKPOINT = 7


#: Channels that live on the control connection; all others live on the bulk connection.
CONTROL_CHANNELS = frozenset({Channel.HEARTBEAT, Channel.CONTROL, Channel.METRICS})


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of every record."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a payload.

    Attributes:
        dtype: torch's name without the prefix, for instance "float32", "bfloat16".
        shape: sizes of the axes; () is a scalar.
        offset: first byte within the payload.
        nbytes: bytes in the payload.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """A nested value whose tensors lie in the payload; made and read by `guava_nb.data.codec`."""

    structure: bytes
    tensors: tuple[TensorSpec, ...] = ()


class FlatTensor(msgspec.Struct, frozen=True, array_like=True):
    """The whole payload is one flat tensor."""

    dtype: str
    numel: int


# ---------------------------------------------------------------------------------------------------------- connection


class Attach(Message, frozen=True):
    """Dialler to listener, first record after the mutual proof: this connection belongs to that session.

    Attributes:
        session_id: 16 bytes that name the session; public.
        identity: 32 secret bytes; who shows the same ones again resumes the session.
        purpose: "control", "bulk", "report" (a short visit that tells of a worker's death), or "measure" (one that
            measures the line).
        incarnation: how many times this session's connection of this purpose was dialled before.
        received: highest sequence number received whole, per channel of this connection.
        last_generation: generation of the last committed step, -1 before the first.
        last_step: last committed step, -1 before the first.
        last_kind: kind number of the last message handled.
        codecs: how chunks that come here may be compressed.
    """

    session_id: bytes
    identity: bytes
    purpose: str
    incarnation: int
    received: dict[int, int]
    last_generation: int = -1
    last_step: int = -1
    last_kind: int = 0
    codecs: tuple[str, ...] = ()


class Attached(Message, frozen=True):
    """Listener to dialler: accepted; `received` and `codecs` as in `Attach`.

    Attributes:
        resumed: the session was known.
        grace_s: how long the listener keeps a session whose connection broke.
        outage_s: behind a tunnel, how long it keeps all of them when the tunnel broke; 0 without one. Dial for so long.
    """

    resumed: bool
    received: dict[int, int]
    grace_s: float
    last_generation: int = -1
    last_step: int = -1
    last_kind: int = 0
    codecs: tuple[str, ...] = ()
    outage_s: float = 0.0


class Refused(Message, frozen=True):
    """Either side: no, for this reason; `next_step` tells a person what to do."""

    code: str
    reason: str
    next_step: str = ""


class Ping(Message, frozen=True):
    """Asks for a `Pong` with the same number; fills silence."""

    sent_ns: int


class Pong(Message, frozen=True):
    """Answers a `Ping`."""

    sent_ns: int


class Ack(Message, frozen=True):
    """Everything up to `sequence` on `channel` has been consumed: its bytes count no longer against the window."""

    channel: int
    sequence: int


class Goodbye(Message, frozen=True):
    """This side ends the session on purpose; nothing follows."""

    reason: str
    error: bool = False


# ------------------------------------------------------------------------------------------------------------- cluster


class Hello(Message, frozen=True):
    """Worker to orchestrator once its session stands: who I am and what I have."""

    name: str
    program: str  # "spawned" or "worker" (the loop runs in the user's own process with the user's own model)
    versions: dict[str, str]  # guava_nb, protocol, python, torch, cuda, platform
    hostname: str
    pid: int
    device: str  # "cuda:0", "cpu"
    device_name: str
    device_uuid: str
    device_memory_bytes: int | None
    cores: int
    memory_bytes: int | None
    accepts_source: bool = True
    speed_hint: float = 1.0
    host_id: str = ""  # the same for processes that share one machine and its network
    own: tuple[str, ...] = ()  # what lives in the user's own process there: "model", "criterion", "optimizer", ...


class Accept(Message, frozen=True):
    """Orchestrator to worker: you take part under this name."""

    name: str
    rank: int
    orchestrator_versions: dict[str, str]
    notes: tuple[str, ...] = ()  # differences that matter, one sentence each


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """One shared cell: its name and its newest text."""

    name: str
    text: str


class Factory(msgspec.Struct, frozen=True, array_like=True):
    """Something to call on the worker: a name from shared cells, or "package.module:name", or a torch name."""

    name: str
    args: dict[str, Any] = {}


class MetricSpec(msgspec.Struct, frozen=True, array_like=True):
    """One figure of a validation: its name in the result, and what makes it.

    The factory names a function `metric(outputs, targets)` or something that makes a torchmetrics metric.
    """

    name: str
    factory: Factory


class ParallelSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one model is spread over workers. Rank = (dp index * pp + pp index) * tp + tp index.

    Attributes:
        mode: "data", "pipeline", "tensor", "zero" or "hybrid".
        dp: replicas that share the batch.
        pp: pipeline stages, in ranks.
        tp: ranks that share each layer.
        zero_stage: 0 keeps everything on every replica; 1 shards optimizer state, 2 gradients too, 3 parameters too.
        schedule: "gpipe", "1f1b" or "interleaved".
        micro_batches: parts that a pipeline cuts a batch into.
        stages_per_rank: stages held by each rank, more than one with "interleaved".
        split: full names of the modules that begin a new stage; empty balances by itself.
        balance: "parameters" or "time": what is balanced.
        tensor_plan: pattern of module names to "colwise", "rowwise", "vocab" or "replicate"; empty finds a plan by itself.
        checkpoint_activations: patterns of module names whose activations are computed again in backward; "*" is every
            block that repeats.
        path: "auto", "relay" or "direct": how the members of the process group reach each other.
    """

    mode: str = "data"
    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero_stage: int = 0
    schedule: str = "1f1b"
    micro_batches: int = 1
    stages_per_rank: int = 1
    split: tuple[str, ...] = ()
    balance: str = "parameters"
    tensor_plan: dict[str, str] = {}
    checkpoint_activations: tuple[str, ...] = ()
    path: str = "auto"


class CacheSpec(msgspec.Struct, frozen=True, array_like=True):
    """Whether and where workers keep rows of batches.

    Attributes:
        mode: "memory" or "disk".
        budget_bytes: what the rows of one worker may take.
        directory: folder on the worker's machine, for "disk"; "" is the worker's own choice.
    """

    mode: str
    budget_bytes: int
    directory: str = ""


class DataSpec(msgspec.Struct, frozen=True, array_like=True):
    """A data set that lies at the workers: who makes it there, and what it must be like.

    Attributes:
        factory: called there; gives a data set with a length and samples by index.
        collate: makes a batch of a list of samples; None is torch's own.
        check: compare a few samples between workers.
        length: samples, equal at all workers; -1 while it is asked for.
        probe: digest of those few samples.
    """

    factory: Factory
    collate: Factory | None = None
    check: bool = True
    length: int = -1
    probe: str = ""


class CachedRows(msgspec.Struct, frozen=True, array_like=True):
    """How the rows of one part are put together from what came and what the worker holds.

    What came is the part with the rows that were sent, and all that is not per row.

    Attributes:
        keys: 16 bytes per row, BLAKE2b of the row's entry (`guava_nb.data.rows`); empty: the part came whole.
        states: a byte per row: 0 held by the worker, or the same as an earlier row; 1 sent; 2 sent, and to be kept.
        marks: a byte per tensor, array, list or tuple of the part, depth first: 1 if it has one entry per row.
        slots: for each of those marked 1 which leaf of an entry it is; a tensor that occurs twice is one leaf.
        drop: keys of rows to be dropped first, 16 bytes each.
    """

    keys: bytes = b""
    states: bytes = b""
    marks: bytes = b""
    slots: tuple[int, ...] = ()
    drop: bytes = b""


class RunSpec(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All a worker needs to take part in a run, as plain data.

    Attributes:
        model: factory of the model; named "@model" when it lives in the worker's own process (program "worker").
        criterion: `loss(outputs, targets)`; exactly one of criterion and step is set.
        step: `step(model, batch)`.
        optimizer: torch.optim class name with args, or a shared function of the named parameters.
        scheduler: torch.optim.lr_scheduler class name with args, or a shared function of the optimizer.
        scheduler_interval: "step", "epoch" or "validation".
        optimizer_site: "workers" or "orchestrator".
        precision: "fp32", "bf16", "fp16" (autocast; fp16 with a global loss scaler) or "fp64".
        max_grad_norm: global L2 norm to clip to; None does not clip.
        seed: root of every random stream of the run.
        bucket_bytes: aimed size of a gradient bucket.
        hash_every_steps: steps between comparisons of parameter hashes; 0 compares at the start only.
        sync_batchnorm: statistics over the global batch.
        threads: torch intra-op threads per worker; None leaves torch's choice.
        deterministic: only deterministic kernels; torch raises where there is none.
        parallel: how the model is spread, with the `group` exchange; None: whole replicas and the `star` exchange.
        metrics: of the run's validations; here so that a worker that cannot make them says so before training.
        preprocess: function of a batch that runs on the worker's device for every batch, before the model.
        augment: likewise before it, in training only, drawing from the shard's own random state.
        cache: what workers keep of the batches they got; None keeps nothing.
        data: data sets that lie at the workers; `source` of a batch is a place here, from 1.
        count_flops: count the floating point operations of one shard.
        tokens: function of a batch, as the model gets it, that returns its number of tokens.
    """

    model: Factory | None
    criterion: Factory | None
    step: Factory | None
    optimizer: Factory
    scheduler: Factory | None
    scheduler_interval: str = "step"
    optimizer_site: str = "workers"
    precision: str = "fp32"
    max_grad_norm: float | None = None
    seed: int = 0
    bucket_bytes: int = 4 << 20
    hash_every_steps: int = 100
    sync_batchnorm: bool = False
    threads: int | None = None
    deterministic: bool = False
    parallel: ParallelSpec | None = None
    metrics: tuple[MetricSpec, ...] = ()
    preprocess: Factory | None = None
    augment: Factory | None = None
    cache: CacheSpec | None = None
    data: tuple[DataSpec, ...] = ()
    count_flops: bool = False
    tokens: Factory | None = None

    @property
    def wants_whole_batches(self) -> bool:
        """Whether a function of the user's sees batches in training, so that both ends of a pipeline need all of them."""
        return self.preprocess is not None or self.augment is not None or self.tokens is not None


class Prepare(Message, frozen=True):
    """Orchestrator to worker: build what this run needs. Cells are the whole ledger, in order of first appearance."""

    run_id: str
    cells: tuple[Cell, ...]
    spec: RunSpec


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One parameter or buffer of a model that lives at the worker."""

    name: str  # full, with dots
    shape: tuple[int, ...]
    dtype: str
    kind: str  # "parameter", "frozen" (no gradient), "buffer" or "hidden" (a buffer outside the state dict)
    same_as: str = ""  # full name of the first place where the same tensor stands


class Prepared(Message, frozen=True):
    """Worker to orchestrator: built, or why not.

    `layout` is a digest of parameter names, shapes, dtypes and buckets; it must be equal everywhere.
    `missing_module` names an import that failed, `problem` any other failure with its `traceback`. `model` describes a
    model that lives at the worker, which the orchestrator cannot build.
    """

    run_id: str
    ok: bool
    layout: str = ""
    missing_module: str = ""
    problem: str = ""
    traceback: str = ""
    model: tuple[TensorInfo, ...] = ()


class FormGroup(Message, frozen=True):
    """Orchestrator to worker: become this rank of a process group; it is good for one generation.

    Attributes:
        name: prefix of everything that belongs to the group, new for every generation.
        rank: the receiver's rank in the group.
        members: names of all members, in order of rank.
        path: "relay" through the hub, or "direct" between the workers.
        backend: torch.distributed's name: "guava", "gloo" or "nccl".
        timeout_s: for the meeting of all members.
        interface: on the direct path the receiver's network interface, and
        addresses: of all members, in order of rank: those that were proved to be reachable.
        example: inputs of some samples, for the member that measures how long the model's modules take.
        machines: number of every member's machine, where GPUs of one machine use NCCL among themselves.
    """

    run_id: str
    generation: int
    name: str
    rank: int
    members: tuple[str, ...]
    path: str
    backend: str
    timeout_s: float
    interface: str = ""
    addresses: tuple[str, ...] = ()
    example: Tree | None = None
    machines: tuple[int, ...] = ()


class GroupFormed(Message, frozen=True):
    """Worker to orchestrator: the group stands and the model is spread over it, or why not.

    Attributes:
        broken: the group, not the model, was in the way: a member did not come or was lost.
        layout: how the model is spread, in words for people.
    """

    run_id: str
    generation: int
    ok: bool
    problem: str = ""
    traceback: str = ""
    broken: bool = False
    layout: str = ""


class ProbeListen(Message, frozen=True):
    """Orchestrator to worker: listen on free ports of your addresses, so that others can try to reach you.

    Attributes:
        probe_id: of this probe; all its records carry it.
        secret: who dials must prove to hold it; drawn anew for every listener.
        loopback: listen on the loopback too, since all members are on one host.
        timeout_s: when to stop listening if nothing more is heard.
    """

    probe_id: int
    secret: bytes
    loopback: bool
    timeout_s: float


class ProbeAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker listens: an address of a network interface, and a port."""

    interface: str
    address: str
    port: int


class ProbeListening(Message, frozen=True):
    """Worker to orchestrator: here I listen; or why I cannot."""

    probe_id: int
    addresses: tuple[ProbeAddress, ...]
    problem: str = ""


class ProbeTarget(msgspec.Struct, frozen=True, array_like=True):
    """Another member, its listener's secret, and where it may be reached."""

    member: int
    secret: bytes
    addresses: tuple[ProbeAddress, ...]


class ProbeDial(Message, frozen=True):
    """Orchestrator to worker: try to reach these members at all of their addresses, all at once."""

    probe_id: int
    targets: tuple[ProbeTarget, ...]
    timeout_s: float


class ProbeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Whether a member answered at an address; `problem` is empty if it did."""

    member: int
    address: str
    problem: str = ""


class ProbeReport(Message, frozen=True):
    """Worker to orchestrator: who answered."""

    probe_id: int
    answers: tuple[ProbeAnswer, ...]


class ProbeEnd(Message, frozen=True):
    """Orchestrator to worker: stop listening."""

    probe_id: int


class LoadState(Message, frozen=True):
    """Orchestrator to worker: become this state. The tree holds model, optimizer, scheduler, scaler."""

    run_id: str
    generation: int
    step: int  # last committed step, -1 for the start
    state: Tree
    want_hash: bool = True


class StateLoaded(Message, frozen=True):
    """Worker to orchestrator: the state is in place."""

    run_id: str
    generation: int
    step: int
    parameter_hash: str
    device_kind: str  # device type and torch version; hashes must be equal within one


class FetchState(Message, frozen=True):
    """Orchestrator to worker: send the state as of the last committed step."""

    request_id: int
    run_id: str
    model: bool = True
    optimizer: bool = True


class State(Message, frozen=True):
    """Worker to orchestrator: the answer to `FetchState`."""

    request_id: int
    run_id: str
    step: int
    state: Tree


class Shard(Message, frozen=True):
    """Orchestrator to worker (BATCH): the instruction STEP with its data.

    A step is done by every worker: those with no shard of it still get its means and commit.

    Attributes:
        generation: the membership in which this attempt of the step was first issued; shards that are issued again
            after a loss keep it, an aborted step gets a new one.
        step: optimizer step, counted from 0 over the whole run.
        shard: index in summation order.
        num_shards: shards of this step.
        rows: samples in this shard, over all parts.
        global_rows: samples in the whole step; the loss is divided by it before backward.
        parts: loader batches this shard takes rows from (more than one with accumulation); the tree is a list of them.
        solo: the receiver is the only worker and may commit by itself.
        want_hash: report a hash of the parameters after this step.
        sample_ids: first and last sample id of the shard, for error messages only.
        part_rows: `group`: samples of each part; 0 marks a stand-in row that only keeps the group's operations going.
        cached: one per part when the worker keeps rows; empty when all parts came whole.
        source: the parts are int64 tensors of sample ids in this data set of `RunSpec.data`, from 1; 0: they are batches.
    """

    run_id: str
    generation: int
    step: int
    shard: int
    num_shards: int
    rows: int
    global_rows: int
    parts: int
    batch: Tree
    solo: bool = False
    want_hash: bool = False
    sample_ids: tuple[int, int] | None = None
    part_rows: tuple[int, ...] = ()
    cached: tuple[CachedRows, ...] = ()
    source: int = 0


class StepInfo(Message, frozen=True):
    """Orchestrator to worker without a shard in this step: it exists, wait for its means and commit."""

    run_id: str
    generation: int
    step: int
    num_shards: int
    want_hash: bool = False


class GradientBucket(Message, frozen=True):
    """Worker to orchestrator (GRADIENT): one bucket of one shard, summed over its rows, divided by global_rows.

    `present` has a bit per parameter of the bucket, lowest bit first: set when the parameter got a gradient.
    Bucket index -1 carries the model's floating-point buffers after this shard's forward.
    """

    run_id: str
    generation: int
    step: int
    shard: int
    bucket: int
    present: bytes
    tensor: FlatTensor


class Ready(Message, frozen=True):
    """Worker to orchestrator: forward and backward of this shard are done and its buckets are on their way."""

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
    culprit: str = ""  # with no buckets: the first parameter or buffer that is not finite
    gradient_square: float | None = None  # `group`: this rank's share of the squared norm of the gradient
    tokens: float | None = None  # as the user's function counted them; None when not asked, or not counted here


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """Apply the step: every mean is multiplied by `scale`; with `skip` only the scaler learns of it.

    `clip` is the factor that clipping asks for where the hub knows the norm (`group`); elsewhere workers clip alike.
    """

    scale: float
    skip: bool
    clip: float = 1.0


class SumBucket(Message, frozen=True):
    """Orchestrator to worker (GRADIENT): one bucket summed over all shards in shard order.

    With optimizer_site="orchestrator" it carries new parameter values instead. The last bucket of a step carries
    `commit`.
    """

    run_id: str
    generation: int
    step: int
    bucket: int
    present: bytes
    tensor: FlatTensor
    commit: Commit | None = None


class CommitStep(Message, frozen=True):
    """Orchestrator to worker (GRADIENT): commit where there is no last mean to carry it (a model without gradients)."""

    run_id: str
    generation: int
    step: int
    commit: Commit


class Committed(Message, frozen=True):
    """Worker to orchestrator: the step is applied here."""

    run_id: str
    generation: int
    step: int
    parameter_hash: str = ""
    update_s: float = 0.0
    learning_rate: float | None = None
    skipped: bool = False
    ready: Ready | None = None  # from a lone worker: its report on the shard, in the same message


class Abort(Message, frozen=True):
    """Orchestrator to worker (CONTROL): forget every step after `last_committed`; restore buffers and random state."""

    run_id: str
    generation: int
    last_committed: int
    reason: str


class Tick(Message, frozen=True):
    """Orchestrator to worker (BATCH, so that it stands in order with the shards): advance the scheduler once."""

    run_id: str
    metric: float | None = None


class Evaluate(Message, frozen=True):
    """Orchestrator to worker (BATCH): forward only on this batch, at the last committed state.

    When `grouped`, every member of the group gets one, and `rows` is 0 for a stand-in row. `metrics` are wanted beside
    loss and accuracy. `cached` (at most one) and `source` are those of `Shard`.
    """

    run_id: str
    request_id: int
    rows: int
    batch: Tree
    grouped: bool = False
    metrics: tuple[MetricSpec, ...] = ()
    cached: tuple[CachedRows, ...] = ()
    source: int = 0


class Evaluated(Message, frozen=True):
    """Worker to orchestrator (BATCH): sums over the batch; `correct` is None where accuracy has no meaning.

    `metrics` is a list with the state of each metric after this batch alone; without a structure where none was asked for,
    or where this rank's figures do not count.
    """

    run_id: str
    request_id: int
    loss_sum: float
    count: float
    correct: int | None
    rows: int
    metrics: Tree = Tree(b"")


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """What comes back of a model's outputs; nothing else crosses the wire.

    Attributes:
        top_k: the best classes of each row, with their probabilities.
        threshold: rows whose best probability is below it send no classes.
        full: the probabilities of all classes too.
        raw: the outputs as they are, instead of all the above.
        step: `step(model, batch)` that gives the outputs; None calls the model on the inputs.
    """

    top_k: int = 1
    threshold: float | None = None
    full: bool = False
    raw: bool = False
    step: Factory | None = None


class Predict(Message, frozen=True):
    """Orchestrator to worker (BATCH): the model's outputs on this batch, at the last committed state.

    When `grouped`, every member of the group gets one, and `rows` is 0 for a stand-in row. `cached` (at most one) and
    `source` are those of `Shard`.
    """

    run_id: str
    request_id: int
    rows: int
    batch: Tree
    wanted: Wanted
    grouped: bool = False
    cached: tuple[CachedRows, ...] = ()
    source: int = 0


class Predicted(Message, frozen=True):
    """Worker to orchestrator (BATCH): names to tensors, see `guava_nb.replica.outputs`; no structure without outputs."""

    run_id: str
    request_id: int
    rows: int
    columns: Tree = Tree(b"")


class EndRun(Message, frozen=True):
    """Orchestrator to worker: this run is over; free its model."""

    run_id: str


# ------------------------------------------------------------------------------------------- rows and data at the worker


class CacheHeld(Message, frozen=True):
    """Worker to orchestrator, after `Prepare` of a run with a cache: what I hold, in short.

    Attributes:
        count: rows.
        digest: exclusive or of their keys, 16 bytes.
        budget_bytes: what I will keep at most; less than asked where there is no room.
        problem: why nothing can be kept here, in a sentence; empty if all is well.
    """

    run_id: str
    count: int
    digest: bytes
    budget_bytes: int
    problem: str = ""


class ListRows(Message, frozen=True):
    """Orchestrator to worker: I believe otherwise; list the rows that you hold."""

    run_id: str


class RowList(Message, frozen=True):
    """Worker to orchestrator: 20 bytes per row in the payload: its key, and the bytes of its entry as uint32."""

    run_id: str
    tensor: FlatTensor


class RowsWanted(Message, frozen=True):
    """Worker to orchestrator: I do not hold these rows (any more).

    Attributes:
        keys: 16 bytes each.
        step, shard: the shard that waits for them, to be sent again; -1: none.
        request_id: the `Evaluate` that waits for them; 0: none.
        reason: why, where it is worth a sentence to a person.
    """

    run_id: str
    keys: bytes
    step: int = -1
    shard: int = -1
    request_id: int = 0
    reason: str = ""


class AskData(Message, frozen=True):
    """Orchestrator to worker: build these data sets of these cells, and say what they are like."""

    request_id: int
    cells: tuple[Cell, ...]
    data: tuple[DataSpec, ...]


class DataFacts(Message, frozen=True):
    """Worker to orchestrator: the answer to `AskData`: the same records with length and probe, or why not."""

    request_id: int
    data: tuple[DataSpec, ...]
    missing_module: str = ""
    problem: str = ""
    traceback: str = ""


# -------------------------------------------------------------------------------------------------- store, collectives


class StoreAsk(Message, frozen=True):
    """Member to hub: do this to the shared keys.

    Attributes:
        request_id: the reply carries it; counted by the asking session.
        op: "set", "get", "wait", "add", "compare_set", "check", "delete", "num_keys", "list_keys", "append",
            "multi_get", "multi_set", "lend" (set until this session ends), "claim" (lend if it is free; gives what
            holds then), "queue_push", "queue_pop", "queue_len", "forget" (every key that begins so), or "cancel"
            (nobody waits for request `number` any more).
        keys: what it is about; "num_keys" and "list_keys" take a prefix.
        values: one per key, or for "compare_set" the expected and the wanted value.
        number: what "add" adds; for "queue_pop" 0 does not wait.
    """

    request_id: int
    op: str
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class StoreReply(Message, frozen=True):
    """Hub to member: the answer to `StoreAsk`; a wait is answered when it is over."""

    request_id: int
    values: tuple[bytes, ...] = ()
    number: int = 0
    problem: str = ""


class OpenGroup(Message, frozen=True):
    """Member to hub: this session is this rank of this group from now on. Sent before anything else of the group."""

    group: str
    rank: int
    size: int
    member: str  # the worker's name, for sentences


class LeaveGroup(Message, frozen=True):
    """Member to hub: done with the group. Hub to the other members: that rank left."""

    group: str
    rank: int = -1


class CallSpec(msgspec.Struct, frozen=True, array_like=True):
    """What a rank called; all ranks of a group must call the same in the same order.

    Attributes:
        kind: name of the collective.
        reduce: name of the reduction, "" where nothing is reduced.
        dtype: torch's name of the element type.
        counts: numbers of elements, in an order that belongs to the kind; what ranks may disagree on is left out.
        root: rank of the root, -1 where there is none.
    """

    kind: str
    reduce: str = ""
    dtype: str = "uint8"
    counts: tuple[int, ...] = ()
    root: int = -1


class Piece(Message, frozen=True):
    """A part of a collective (COLLECTIVE): up from one rank, or down as a part of a sum or passed on from a rank.

    Attributes:
        group: name of the group.
        sequence: number of the collective in its group, from 1.
        target: rank that gets it, -1 for all.
        source: rank it came from, set by the hub; -1 is the hub itself: a sum.
        offset: first element within what goes from this source to this target.
        total: elements of all pieces from this source to this target.
        tensor: the elements; empty with target -2: the rank only says that it has called.
        reduce: name of the reduction; "" passes the bytes on undecoded.
        confirm: answer with `Taken` when this piece, the rank's last one, has come.
        call: with the rank's first piece.
    """

    group: str
    sequence: int
    target: int
    source: int
    offset: int
    total: int
    tensor: FlatTensor
    reduce: str = ""
    confirm: bool = False
    call: CallSpec | None = None


class Parcel(Message, frozen=True):
    """A part of a tensor that one rank sends to another (COLLECTIVE); passed on undecoded.

    Attributes:
        group: name of the group.
        source: rank it came from, set by the hub.
        target: rank that gets it.
        tag: the receiver asks by source and tag.
        number: counts what this source sends to this target, from 1.
        offset: first element of this part.
        total: elements of the whole tensor.
        tensor: the elements of this part.
        confirm: answer with `Taken` (its `sequence` is minus this `number`) when this last part has come.
    """

    group: str
    source: int
    target: int
    tag: int
    number: int
    offset: int
    total: int
    tensor: FlatTensor
    confirm: bool = False


class Taken(Message, frozen=True):
    """Hub to member (COLLECTIVE): the hub has all of what this rank sent; its memory may be used again."""

    group: str
    sequence: int
    target: int = -1


class Expire(Message, frozen=True):
    """Member to hub (COLLECTIVE): this rank has waited long enough for this collective; end it for everyone."""

    group: str
    sequence: int
    waited_s: float


class OperationFailed(Message, frozen=True):
    """Hub to member (COLLECTIVE): this collective ends with this error; `missing` are the ranks that did not call."""

    group: str
    sequence: int
    reason: str
    timed_out: bool = False
    missing: tuple[int, ...] = ()


class GroupEnded(Message, frozen=True):
    """Hub to member (COLLECTIVE): the group is broken, nothing in it will ever complete; the reason names who."""

    group: str
    reason: str


# ---------------------------------------------------------------------------------------------------- a visit to measure


class Filler(Message, frozen=True):
    """Either side: bytes that mean nothing, to measure the line with."""

    tensor: FlatTensor


class Measure(Message, frozen=True):
    """Visitor to listener: send me so many bytes of `Filler`, then `Measured`."""

    nbytes: int


class Measured(Message, frozen=True):
    """Listener to visitor: so much `Filler` came since the last `Measured`."""

    nbytes: int


class MeasureLine(Message, frozen=True):
    """Orchestrator to worker: visit my listener and measure the line, with bursts of at most so many bytes."""

    measuring_id: int
    burst_bytes: int


class LineMeasured(Message, frozen=True):
    """Worker to orchestrator: what it found; `error` says why it found nothing."""

    measuring_id: int
    round_trip_s: float = 0.0
    up_bytes_s: float = 0.0
    down_bytes_s: float = 0.0
    used_bytes: int = 0
    error: str = ""


# ------------------------------------------------------------------------------------------------------------- reports


class Log(Message, frozen=True):
    """Worker to orchestrator (METRICS): lines it printed; `dropped` were left out by the rate limit."""

    stream: str
    lines: tuple[str, ...]
    dropped: int = 0


class Failure(Message, frozen=True):
    """Worker to orchestrator: user code raised, or the worker could not do what was asked."""

    run_id: str
    generation: int
    step: int
    shard: int
    kind: str  # "user", "memory", "internal"; "group": a member is gone; "torn": so while parameters were exchanged
    type_name: str
    text: str
    traceback: str
    request_id: int = 0  # of the `Evaluate` or `Predict` that failed


class CrashReport(Message, frozen=True):
    """From the process that watched a worker: it ended by itself with this status; its last lines."""

    name: str
    exit_status: int
    tail: tuple[str, ...]


class BoardEnergy(msgspec.Struct, frozen=True, array_like=True):
    """Energy of one board in a stretch of time; `joules` None: not measured.

    Attributes:
        key: of the hardware; whoever measures the same board tells the same one.
        method: how it was measured.
        readings: how many the figure rests on.
        uncovered_s: seconds without a figure.
        too_short: the stretch is not much longer than the sensor's own pace: the figure says little.
        problem: of the last reading; "" when there was none.
    """

    key: str
    name: str
    method: str
    joules: float | None
    readings: int = 0
    uncovered_s: float = 0.0
    too_short: bool = False
    problem: str = ""


class PhaseReport(msgspec.Struct, frozen=True, array_like=True):
    """Time and energy of one phase of the steps since this worker prepared its run."""

    phase: str
    seconds: float
    joules: float | None


class TaskEnergy(msgspec.Struct, frozen=True, array_like=True):
    """Time and energy of what the user named a task, of those that ended; `joules` None: not measured.

    Tasks may lie within one another and within phases: they are views of the same time.

    Attributes:
        times: how often it was done.
    """

    task: str
    seconds: float
    joules: float | None
    times: int = 0


class Energy(Message, frozen=True):
    """Worker to orchestrator (METRICS), about once a second during a run, and as the answer to `AskEnergy`.

    Attributes:
        mark: of the question that this answers; 0 when nobody asked.
        seconds: since this worker prepared the run; `boards` and `phases` are of that stretch.
        why: what has no sensor, and why, in one sentence; "" when everything has.
        busy, memory_used_bytes, memory_bytes, power_w: of the device, at this moment; None where it does not tell.
        cpu_busy, host_memory_used_bytes, host_memory_bytes: of the machine.
        rates: bytes a second of the machine: disk read, disk written, network out, network in; None where unknown.
        flops: floating point operations of one sample, forward and backward; None when not counted.
        tasks: what the user's own code named.
        up_bytes_s: what the line to the orchestrator does at least; None until it was seen.
    """

    run_id: str
    mark: int
    seconds: float
    boards: tuple[BoardEnergy, ...] = ()
    phases: tuple[PhaseReport, ...] = ()
    why: str = ""
    busy: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    cpu_busy: float | None = None
    host_memory_used_bytes: int | None = None
    host_memory_bytes: int | None = None
    rates: tuple[float | None, ...] = ()
    flops: float | None = None
    tasks: tuple[TaskEnergy, ...] = ()
    up_bytes_s: float | None = None


class AskEnergy(Message, frozen=True):
    """Orchestrator to worker: tell your energy now; the answer carries the mark."""

    run_id: str
    mark: int


class Leave(Message, frozen=True):
    """Worker to orchestrator: I leave after the last committed step; give my shards to others, and end my session.

    Until the session ends, the worker answers: where nobody else holds the state, it is fetched first.
    """

    reason: str


#: Kind numbers of the records. 0 is the continuation of a payload and is no record.
MESSAGE_KINDS: dict[int, type[Message]] = {
    1: Attach,
    2: Attached,
    3: Refused,
    4: Ping,
    5: Pong,
    6: Ack,
    7: Goodbye,
    16: Hello,
    17: Accept,
    18: Prepare,
    19: Prepared,
    20: LoadState,
    21: StateLoaded,
    22: FetchState,
    23: State,
    24: Shard,
    25: StepInfo,
    26: GradientBucket,
    27: Ready,
    28: SumBucket,
    29: CommitStep,
    30: Committed,
    31: Abort,
    32: Tick,
    33: Evaluate,
    34: Evaluated,
    35: EndRun,
    36: FormGroup,
    37: GroupFormed,
    38: ProbeListen,
    39: ProbeListening,
    40: ProbeDial,
    41: ProbeReport,
    42: ProbeEnd,
    48: Log,
    49: Failure,
    50: CrashReport,
    51: Leave,
    64: StoreAsk,
    65: StoreReply,
    72: OpenGroup,
    73: LeaveGroup,
    74: Piece,
    75: Parcel,
    76: Taken,
    77: Expire,
    78: OperationFailed,
    79: GroupEnded,
    80: Predict,
    81: Predicted,
    92: CacheHeld,
    93: ListRows,
    94: RowList,
    95: RowsWanted,
    96: AskData,
    97: DataFacts,
    100: Filler,
    101: Measure,
    102: Measured,
    112: Energy,
    113: AskEnergy,
    118: MeasureLine,
    119: LineMeasured,
}
KIND_OF: dict[type[Message], int] = {record: kind for kind, record in MESSAGE_KINDS.items()}

#: Where a sequenced record travels when not on CONTROL. What must stay in order stands on one channel.
_CHANNELS: dict[type[Message], Channel] = {
    Shard: Channel.BATCH,
    StepInfo: Channel.BATCH,
    Tick: Channel.BATCH,
    Evaluate: Channel.BATCH,
    Evaluated: Channel.BATCH,
    Predict: Channel.BATCH,
    Predicted: Channel.BATCH,
    GradientBucket: Channel.GRADIENT,
    SumBucket: Channel.GRADIENT,
    CommitStep: Channel.GRADIENT,
    LoadState: Channel.CHECKPOINT,
    State: Channel.CHECKPOINT,
    RowList: Channel.CHECKPOINT,
    Log: Channel.METRICS,
    Energy: Channel.METRICS,
    AskEnergy: Channel.METRICS,
    **dict.fromkeys(
        (OpenGroup, LeaveGroup, Piece, Parcel, Taken, Expire, OperationFailed, GroupEnded), Channel.COLLECTIVE
    ),
}


def channel_of(message: Message) -> Channel:
    """Return the channel on which a sequenced record travels."""
    return _CHANNELS.get(type(message), Channel.CONTROL)


def counted_as(message: Message, payload_bytes: int) -> Channel:
    """Return the channel under which a record's bytes are reported: BATCH is for samples, not for orders about them."""
    channel = channel_of(message)
    if channel is not Channel.BATCH:
        return channel
    if isinstance(message, StepInfo | Tick):
        return Channel.CONTROL
    if not isinstance(message, Shard | Evaluate | Predict):
        return channel
    if message.source:
        return Channel.CONTROL
    if payload_bytes or not message.cached or any(not c.keys or c.states.strip(b"\0") for c in message.cached):
        return channel
    return Channel.CONTROL
