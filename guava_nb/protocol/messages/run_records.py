"""Joining a cluster and preparing a run: what a worker is, and what it builds."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from guava_nb.protocol.messages.wire_types import Message

__all__ = ["Accept", "CacheSpec", "Cell", "DataSpec", "EndRun", "Factory", "Hello", "Leave", "MetricSpec"]
__all__ += ["ParallelSpec", "Prepare", "Prepared", "RoundSpec", "RunSpec", "TensorInfo"]


class Hello(Message, frozen=True, kw_only=True):
    """Worker to orchestrator once its session stands: who I am and what I have."""

    NUMBER: ClassVar[int] = 16

    name: str
    program: str  # "spawned" or "worker" (the loop runs in the user's own process with the user's own model)
    versions: dict[str, str]  # guava_nb, protocol, python, torch, cuda, platform
    hostname: str
    device: str  # "cuda:0", "cpu"
    device_name: str
    device_uuid: str
    host_id: str = ""  # the same for processes that share one machine and its network
    has_bf16: bool = False  # the device computes bfloat16 by itself: others emulate it, and are slow
    own: tuple[str, ...] = ()  # what lives in the user's own process there: "model", "criterion", "optimizer", ...
    before: str = ""  # id, as hex, of this process's session that was given up: it comes back to the same seat


class Accept(Message, frozen=True):
    """Orchestrator to worker: you take part under this name, in the session of this id."""

    NUMBER: ClassVar[int] = 17

    name: str
    session: str = ""


class Leave(Message, frozen=True):
    """Worker to orchestrator: I leave after the last committed step; give my shards to others, and end my session.

    Until the session ends, the worker answers: where no other worker holds the state, it is fetched first.
    """

    NUMBER: ClassVar[int] = 51

    reason: str


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
        tensor_plan: pattern of module names to "colwise", "rowwise", "vocab", "partial" or "replicate"; empty finds a plan
            by itself.
        checkpoint_activations: patterns of module names whose activations are computed again in backward; "*" is every
            block that repeats.
        path: "auto", "relay" or "direct": how the members of the process group reach each other.
        gather: the user's code gathers over the replicas (`gather_batch`), so one without samples computes too.
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
    gather: bool = False


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


class RoundSpec(msgspec.Struct, frozen=True, array_like=True):
    """Rounds of local steps between two exchanges. How many steps a round has, each shard says.

    Attributes:
        outer: what the exchanged mean of the pseudo-gradients goes into: "nesterov", "average", "sparse" or
            "partial".
        outer_lr: learning rate of that outer step; 1 with momentum 0 takes the mean of the workers' weights.
        outer_momentum: of the outer step.
        batches_per_step: loader batches of one local step.
        density: of "sparse" and "partial": which part of the pseudo-gradient's elements a message has.
        bits: of each of them.
        decay: of "sparse": how much of what a message left out counts in the next one.
        sync_delay: local steps of the next round that are taken before the common weights of this one are mixed in.
        mixing: how much of its own weights a worker keeps then; None: what its steps came to since its message.
    """

    outer: str = "nesterov"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    batches_per_step: int = 1
    density: float = 1 / 64
    bits: int = 2
    decay: float = 0.95
    sync_delay: int = 0
    mixing: float | None = None


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
        frozen: full names of the parameters that take no gradient; None: as the factory builds them.
        buffers: what becomes of buffers that workers change unlike: "auto", "average", "first" or "sum".
        lockstep: a lone worker, too, waits for the commit of each step: a callback may ask for the state after it.
        compile: the model is compiled where it is built.
        channels_last: parameters of four dimensions lie in that memory format.
        rounds: workers take local steps between two exchanges; None: they exchange gradients in every step.
        wire: format of gradients and their sums between whole replicas and the hub, a name of
            `guava_nb.wire_formats.registry`; they then travel as a flat tensor of uint8.
        pretrained: "hf:NAME@COMMIT", weights that each machine loads from the Hugging Face hub into what the factory built;
            "" for none.
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
    frozen: tuple[str, ...] | None = None
    buffers: str = "auto"
    lockstep: bool = False
    compile: bool = False
    channels_last: bool = False
    rounds: RoundSpec | None = None
    wire: str = "fp32"
    pretrained: str = ""

    @property
    def wants_whole_batches(self) -> bool:
        """Whether a function of the user's sees batches in training, so that both ends of a pipeline need all of them."""
        return self.preprocess is not None or self.augment is not None or self.tokens is not None


class Prepare(Message, frozen=True):
    """Orchestrator to worker: build what this run needs. Cells are the whole ledger, in order of first appearance."""

    NUMBER: ClassVar[int] = 18

    run_id: str
    cells: tuple[Cell, ...]
    spec: RunSpec
    generation: int = -1  # of this order: what is older and still comes is of an earlier attempt
    # Id of the run that this one goes on from with the same code and options, or this run's own where a worker may have been
    # away: keep what you hold of it.
    after: str = ""
    after_step: int = -1  # its last step; of this run what is known here: the worker may be further
    want_digest: bool = False  # of the weights that were built
    # Numbers of states of this run, the best first, that may lie on this machine's disk: become the first that is there.
    saved: tuple[int, ...] = ()
    own: tuple[int, ...] = ()  # of own parts (`SaveState.own`): say which lie on this machine's disk


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One parameter or buffer of a model that lives at the worker."""

    name: str  # full, with dots
    shape: tuple[int, ...]
    dtype: str
    kind: str  # "parameter", "frozen" (no gradient), "buffer" or "hidden" (a buffer outside the state dict)
    same_as: str = ""  # full name of the first place where the same tensor stands


class Prepared(Message, frozen=True, kw_only=True):
    """Worker to orchestrator: built, or why not.

    `layout` is a digest of parameter names, shapes, dtypes and buckets; it must be equal everywhere.
    `missing_module` names an import that failed, `problem` any other failure with its `traceback`. `model` describes a
    model that lives at the worker, which the orchestrator cannot build. `facts` are those of `guava_nb.spec.own_facts`.
    `holds`: nothing was built, the state after `step` is here: the last one of the run before, or where this worker stands
    in the run itself, to which it came back, and its schedule has had so many `ticks`. `digest` is that of
    `guava_nb.replica.state_dict.weights_digest`, where it was asked for. `saved` is the number of the state that was read from
    disk, that after `step` and `ticks`, and `digest` the one of its file. `own` are those of the order's that lie there.
    """

    NUMBER: ClassVar[int] = 19

    run_id: str
    ok: bool
    layout: str = ""
    missing_module: str = ""
    problem: str = ""
    traceback: str = ""
    model: tuple[TensorInfo, ...] = ()
    generation: int = -1  # of the `Prepare` that this answers
    facts: dict[str, str] = {}
    holds: bool = False
    step: int = -1
    digest: str = ""
    ticks: int = 0
    saved: int = 0
    own: tuple[int, ...] = ()


class EndRun(Message, frozen=True):
    """Orchestrator to worker: this run is over; free its model."""

    NUMBER: ClassVar[int] = 35

    run_id: str
