"""`DistributedConfig`: the settings, their defaults and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from guava_nb.config import sources
from guava_nb.config.field_table import FieldTable
from guava_nb.config.mesh import Mesh, divide_layers, largest_divisor, make_mesh
from guava_nb.config.modes import SCHEDULES, mode_name
from guava_nb.config.values import Origin, setting
from guava_nb.errors import ConfigError

__all__ = ["DistributedConfig"]


@dataclass(kw_only=True)
class DistributedConfig:
    """All settings of a session. Keyword arguments only; every assignment is checked at once.

    Times are in seconds, sizes in the unit of the name (`_mb`: 2**20 bytes).

    Model shape (what `get_layers_per_gpu` and tensor groups reckon with; your own model may ignore it):
        d_model (768), n_heads (12), n_layers (12): counts.

    Training:
        num_epochs (1): passes over the data of a run that names none. batch_size (8): samples of the global batch, where
        CPULoader makes the batches; a loader of your own has its own.
        learning_rate, weight_decay (None): for the optimizer where its own arguments do not say otherwise; None leaves
        torch's own default.
        max_grad_norm (None): global L2 norm to clip gradients to; None and 0 do not clip, like a plain PyTorch loop.
        accumulation_steps (1): loader batches per optimizer step.
        precision ("fp32"): "fp32", "fp64", or autocast to "bf16" or "fp16" (with a global loss scaler); "auto" takes bf16 where
        the device of every worker computes it by itself, else fp32.
        use_amp (False): with precision "fp32" the same as precision "fp16". See `effective_precision`.
        optimizer_site ("workers"): who keeps the optimizer: every worker, or the "orchestrator" with the master copy.
        scheduler_interval ("step"): the scheduler ticks per optimizer "step", per "epoch" or per "validation".
        sync_batchnorm (False): batch statistics over the global batch.
        count_flops (False): count floating point operations, once per run and worker (data mode); not with torch.compile.
        seed (0): root of every random stream. deterministic (False): only deterministic kernels.
        threads_per_worker (None): torch threads of a worker; None leaves torch's choice.

    Cluster:
        master_ip ("127.0.0.1"): where the orchestrator listens, and where workers find it.
        master_port (0): its one port; 0 takes a free one, which the join code then carries.
        gpu_host (""): the GPU machine, where that side listens and the orchestrator dials (CPU/GPU split).
        tunnel (""): how others reach the orchestrator: "local", "direct[:HOST[:PORT]]", "ngrok", "ngrok-http", "cloudflared",
        "ssh:[USER@]HOST[:PORT]", or one of another package; "" listens on master_ip and starts nothing.
        workers_on (""): what starts workers when the session opens, and ends them with it: "ssh:HOST,HOST", "slurm:N", "k8s:N",
        "ray:N", "docker:N", or of another package (guava_nb/launchers/README.md).
        num_workers (1): workers to wait for. tls (True): encrypt the connections.
        session_file (""): where certificate, secret and port of the session outlive its process, so that workers come back to
        the one that opens it anew; "off" keeps none. "" keeps none in a script, and one for each notebook.

    Data:
        loader_workers (0): processes of CPULoader's DataLoader. prefetch_steps (1): steps sent ahead of the one in work,
        at least. prefetch_bytes (64 MiB): batch bytes that a worker may hold ahead of need; 0 keeps to prefetch_steps.
        worker_cache ("off"): workers keep the samples they got in "memory" or on "disk", so that later epochs send only
        those that changed. worker_cache_mb (1024): what each keeps at most.
        worker_cache_dir (""): folder on the workers' machines; "" is ~/.cache/guava_nb/rows there.

    Parallelism:
        data_parallel (True), model_parallel, pipeline_parallel, tensor_parallel (False): axes in use.
        data_parallel_size (None), pipeline_parallel_size (None): replicas and stages; None follows from the workers.
        tensor_parallel_size (2): workers that share each layer, when tensor_parallel is on; None takes all.
        micro_batches (4): parts a batch is cut into for the pipeline.
        zero_stage (0): sharded over the replicas: 1 optimizer state, 2 gradients too, 3 parameters too.
        pipeline_schedule ("1f1b"): "gpipe", "1f1b", "interleaved" with stages_per_worker (1) above 1, or "auto": lines and steps
            are measured when a run begins, and the schedule and its micro-batches are chosen by them.
        pipeline_split (""): names of the modules that begin a new stage, with commas; empty balances by itself:
        pipeline_balance ("parameters"): so that stages use as many parameters (shared ones count in each), or as much "time",
        measured on the first worker with some samples of the loader.
        checkpoint_activations (""): names or patterns of modules, with commas, whose activations are computed again in
        backward instead of kept; "*" takes every block that repeats.
        path ("auto"): how workers reach each other: through the orchestrator ("relay"), or "direct"; "auto" takes the direct
        path where all reach each other, in data mode only with CUDA workers.

    Waiting:
        connect_timeout_s (10): for one attempt to connect; the TCP connection has 4 s of it, or 0.4 of it if that is more.
        heartbeat_s (2): fills silence. silence_s (15): this much without a byte is a dead connection.
        grace_s (30): a worker whose connections broke keeps its seat so long; one that does not answer gets so long.
        rejoin_timeout_s (300): a run whose workers are all gone waits so long for one.
        interrupt_grace_s (5): an interrupted step may still finish within this time.

    Wire:
        socket_buffer_mb (16): kernel buffer per socket; the system may clamp it. window_mb (256): bytes under way per
        channel of a session; above 256 at a worker only where it is as much at the orchestrator. bucket_mb (4): aimed size of
        a gradient bucket. compression ("auto"): of batches, gradients, parameters and checkpoints, lossless (zstd): "on",
        "off", or "auto" where measuring shows that they arrive sooner. budget_bytes (0): most bytes that a run may send and
        receive here, both together; 0 sets no limit. A text has a unit: GUAVA_BUDGET_BYTES=900MB.

    Checkpoints and checks:
        checkpoint_dir ("./checkpoints"): folder. save_interval (0): steps between checkpoints; 0 saves none.
        snapshot_every_steps (None): steps between snapshots to go back to; None takes them by time, as their cost allows, where
        the state is on one worker only, or in parts. snapshot_place ("auto"): a lone worker keeps them on its own disk
        ("worker") or sends them whole ("orchestrator"); "auto" keeps those there that take the line more than ten seconds.
        hash_every_steps (100): steps between comparisons of the workers' parameters; 0 compares at the start only.
        log_step_every (100): steps between lines of a run in Python's log (logger "guava_nb.training", level INFO).

    Accepted and checked, without effect (older programs set them; a session says so where one differs from its default):
        vocab_size (50257), d_ff (3072), max_seq_len (1024), dropout (0.1): the model is yours.
        activation_timeout (0), ack_timeout (0), max_resends (0), resend_probe_interval (5): a wait ends when the peer counts as
        lost, by silence_s and then grace_s; until then what a broken connection lost is sent again; heartbeat_s probes.
        compact_log (True), log_act (False): the panel and `run.history` show the steps.
    """

    d_model: int = setting(768, low=1)
    n_heads: int = setting(12, low=1)
    n_layers: int = setting(12, low=1)

    num_epochs: int = setting(1, low=1)
    batch_size: int = setting(8, low=1, env=("BATCH_SIZE",))
    learning_rate: float | None = setting(None, low=0)
    weight_decay: float | None = setting(None, low=0)
    max_grad_norm: float | None = setting(None, low=0)
    accumulation_steps: int = setting(1, low=1)
    precision: str = setting("fp32", choices=("fp32", "bf16", "fp16", "fp64", "auto"))
    use_amp: bool = setting(False)
    optimizer_site: str = setting("workers", choices=("workers", "orchestrator"))
    scheduler_interval: str = setting("step", choices=("step", "epoch", "validation"))
    sync_batchnorm: bool = setting(False)
    count_flops: bool = setting(False)
    seed: int = setting(0, low=0, high=2**63 - 1)
    deterministic: bool = setting(False)
    threads_per_worker: int | None = setting(None, low=1)

    master_ip: str = setting("127.0.0.1", env=("MASTER_IP", "CPU_HOST"))
    master_port: int = setting(0, low=0, high=65535, env=("MASTER_PORT", "TRAINING_PORT"))
    gpu_host: str = setting("", env=("GPU_HOST",))
    tunnel: str = setting("")
    workers_on: str = setting("")
    num_workers: int = setting(1, low=1, high=4096, env=("NUM_WORKERS",))
    tls: bool = setting(True)
    session_file: str = setting("")

    loader_workers: int = setting(0, low=0)
    prefetch_steps: int = setting(1, low=0)
    prefetch_bytes: int = setting(64 << 20, low=0)
    worker_cache: str = setting("off", choices=("off", "memory", "disk"))
    worker_cache_mb: int = setting(1024, low=1)
    worker_cache_dir: str = setting("")

    data_parallel: bool = setting(True, env=("DATA_PARALLEL",))
    model_parallel: bool = setting(False, env=("MODEL_PARALLEL",))
    pipeline_parallel: bool = setting(False, env=("PIPELINE_PARALLEL",))
    tensor_parallel: bool = setting(False, env=("TENSOR_PARALLEL",))
    data_parallel_size: int | None = setting(None, low=1)
    pipeline_parallel_size: int | None = setting(None, low=1)
    tensor_parallel_size: int | None = setting(2, low=1, env=("TENSOR_PARALLEL_SIZE",))
    micro_batches: int = setting(4, low=1, env=("MICRO_BATCHES",))
    zero_stage: int = setting(0, low=0, high=3)
    pipeline_schedule: str = setting("1f1b", choices=SCHEDULES)
    stages_per_worker: int = setting(1, low=1)
    pipeline_split: str = setting("")
    pipeline_balance: str = setting("parameters", choices=("parameters", "time"))
    checkpoint_activations: str = setting("")
    path: str = setting("auto", choices=("auto", "relay", "direct"))

    connect_timeout_s: float = setting(10.0, above=0)
    heartbeat_s: float = setting(2.0, above=0)
    silence_s: float = setting(15.0, above=0)
    grace_s: float = setting(30.0, low=0)
    rejoin_timeout_s: float = setting(300.0, low=0)
    interrupt_grace_s: float = setting(5.0, low=0)

    socket_buffer_mb: int = setting(16, low=1, high=1024)
    window_mb: int = setting(256, low=1)
    bucket_mb: float = setting(4.0, above=0, high=1024)
    compression: str = setting("auto", choices=("auto", "on", "off"))
    budget_bytes: int = setting(0, low=0)

    checkpoint_dir: str = setting("./checkpoints")
    save_interval: int = setting(0, low=0)
    snapshot_every_steps: int | None = setting(None, low=0)
    snapshot_place: str = setting("auto", choices=("auto", "orchestrator", "worker"))
    hash_every_steps: int = setting(100, low=0)
    log_step_every: int = setting(100, low=1, env=("LOG_STEP_EVERY",))

    vocab_size: int = setting(50257, low=1, instead="")
    d_ff: int = setting(3072, low=1, instead="")
    max_seq_len: int = setting(1024, low=1, instead="")
    dropout: float = setting(0.1, low=0, below=1, instead="")
    activation_timeout: float = setting(0.0, low=0, env=("ACT_TIMEOUT_SEC",), instead="grace_s")
    ack_timeout: float = setting(0.0, low=0, env=("ACK_TIMEOUT_SEC",), instead="silence_s")
    max_resends: int = setting(0, low=0, env=("RESENDS_MAX",), instead="grace_s")
    resend_probe_interval: float = setting(5.0, above=0, env=("RESEND_PROBE_SEC",), instead="heartbeat_s")
    compact_log: bool = setting(True, env=("COMPACT_LOG",), instead="")
    log_act: bool = setting(False, env=("LOG_ACT",), instead="")

    _origins: dict[str, Origin] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check the value; an unknown name is refused with the near one."""
        if name == "_origins":
            object.__setattr__(self, name, value)
            return
        object.__setattr__(self, _table().known(name, "assignment"), _table().checked(name, value, "argument"))
        self.__dict__.get("_origins", {}).pop(name, None)

    # ------------------------------------------------------------------------------------------------------ sources

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DistributedConfig:
        """Read the environment: GUAVA_<FIELD> for every field, before the older names (MASTER_IP, ACT_TIMEOUT_SEC ...).

        Args:
            environ: defaults to the process's own environment.

        Raises:
            ConfigError: a value is wrong, or a GUAVA_ variable looks like a misspelt field.
        """
        return cls._from_layers([sources.from_environ(environ, _table().for_sources())])

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DistributedConfig:
        """Make a configuration from what `to_dict` returned.

        Raises:
            ConfigError: an unknown key (the near one is named) or a wrong value.
        """
        return cls._from_layers(
            [{_table().known(key, "dictionary"): (value, "dictionary") for key, value in values.items()}]
        )

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        env_file: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> DistributedConfig:
        """Gather all sources: arguments, then the environment, then `.env`, then `config.yaml`, then the defaults.

        Args:
            path: YAML file; None reads `config.yaml` of the current folder if there is one.
            env_file: file of KEY=value lines; None reads `.env` of the current folder if there is one.
            environ: defaults to the process's own environment.
            **arguments: fields; they win over everything.

        Raises:
            ConfigError: a named file is missing or cannot be read, an unknown key, a wrong value.
        """
        table = _table().for_sources()
        return cls._from_layers(
            [
                {_table().known(name, "argument"): (value, "argument") for name, value in arguments.items()},
                sources.from_environ(environ, table),
                sources.from_env_file(env_file, table),
                sources.from_yaml(path, table),
            ]
        )

    @classmethod
    def _from_layers(cls, layers: list[sources.Layer]) -> DistributedConfig:
        """Join layers, the first that names a field wins. A losing value is not looked at."""
        joined: sources.Layer = {}
        for layer in reversed(layers):
            joined.update(layer)
        config = cls(**{name: _table().checked(name, value, origin) for name, (value, origin) in joined.items()})
        config._origins.update({name: origin for name, (_, origin) in joined.items()})
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data (for JSON, YAML or `from_dict`)."""
        return {name: getattr(self, name) for name in _table().names}

    def replace(self, **changes: Any) -> DistributedConfig:
        """Return a copy with some fields changed.

        Raises:
            ConfigError: an unknown name or a wrong value.
        """
        given = {_table().known(name, "argument"): (value, "argument") for name, value in changes.items()}
        kept = {name: (value, self.origin(name)) for name, value in self.to_dict().items()}
        return self._from_layers([given, kept])

    def origin(self, name: str) -> Origin:
        """Where a field's value came from: "argument", "environment variable X", "file config.yaml", "default"."""
        default = _table().default(_table().known(name, "configuration"))
        return self._origins.get(name, "default" if getattr(self, name) == default else "argument")

    def without_effect(self) -> dict[str, str]:
        """Return the settings that differ from their defaults although nothing reads them, each with what takes its place."""
        found = _table().without_effect().items()
        return {name: instead for name, instead in found if getattr(self, name) != _table().default(name)}

    # --------------------------------------------------------------------------------------------- what follows

    @property
    def effective_precision(self) -> str:
        """The precision to train in: `use_amp` makes "fp16" of "fp32", as AMP has always meant."""
        return "fp16" if self.use_amp and self.precision == "fp32" else self.precision

    @property
    def layers_per_gpu(self) -> dict[int, tuple[int, int]]:
        """`get_layers_per_gpu()`, always up to date."""
        return self.get_layers_per_gpu()

    def get_layers_per_gpu(self) -> dict[int, tuple[int, int]]:
        """Return [start, end) of the layers that each rank holds.

        Raises:
            ConfigError: the axes do not multiply to the number of workers, or a stage would be empty.
        """
        mesh = self.mesh()
        spans = divide_layers(self.n_layers, mesh.stages)
        return {rank: spans[mesh.stage_of(rank)] for rank in range(mesh.size)}

    def tensor_parallel_groups(self) -> list[list[int]]:
        """Return the ranks that share their layers: [[0, 1], [2, 3]] for groups of two among four workers.

        Raises:
            ConfigError: the axes do not multiply to the number of workers.
        """
        mesh = self.mesh()
        return [list(range(first, first + mesh.tensor)) for first in range(0, mesh.size, mesh.tensor)]

    def get_parallelism_strategy(self) -> str:
        """Return DATA_PARALLEL, MODEL_PARALLEL, PIPELINE_PARALLEL, TENSOR_PARALLEL, or HYBRID for several axes.

        Model and pipeline are one axis: a pipeline is model parallelism that works on micro-batches.
        """
        axes = {
            "DATA_PARALLEL": self.data_parallel,
            "PIPELINE_PARALLEL" if self.pipeline_parallel else "MODEL_PARALLEL": self._by_layers,
            "TENSOR_PARALLEL": self.tensor_parallel,
        }
        used = [name for name, on in axes.items() if on]
        if not used:
            raise ConfigError("no parallelism is on; set data_parallel=True (it serves a single worker too)")
        return used[0] if len(used) == 1 else "HYBRID"

    def mesh(self, num_workers: int | None = None) -> Mesh:
        """Return the sizes of the axes for so many workers (default: `num_workers`).

        Raises:
            ConfigError: they do not multiply to it; the message shows the arithmetic.
        """
        data = self.data_parallel_size if self.data_parallel else 1
        stages = self.pipeline_parallel_size if self._by_layers else 1
        tensor = self.tensor_parallel_size if self.tensor_parallel else 1
        count = self.num_workers if num_workers is None else num_workers
        if tensor is None:
            tensor = max(1, count // ((data or 1) * (stages or 1)))
        return make_mesh(count, data, stages, tensor)

    def mode(self, num_workers: int | None = None) -> str:
        """Return the mode that the axes stand for: "data", "pipeline", "tensor", "zero" or "hybrid".

        Raises:
            ConfigError: the axes do not multiply to the number of workers.
        """
        return mode_name(self.mesh(num_workers), self.zero_stage, self._by_layers, self.tensor_parallel)

    def adapt_to_gpus(self, num_gpus: int) -> DistributedConfig:
        """Fit the cluster to so many GPUs, in place: a size that no longer divides them is made smaller or left open.

        Returns:
            The same object, so that calls can be chained.

        Raises:
            ConfigError: `num_gpus` is no count.
        """
        self.num_workers = num_gpus
        if self.tensor_parallel and self.tensor_parallel_size is not None:
            self.tensor_parallel_size = largest_divisor(num_gpus, self.tensor_parallel_size)
        try:
            self.mesh()
        except ConfigError:
            self.data_parallel_size = self.pipeline_parallel_size = None
        return self

    def validate(self, num_workers: int | None = None) -> None:
        """Check what no single field shows.

        Args:
            num_workers: workers that are here; default the expected number.

        Raises:
            ConfigError: with the arithmetic, and where the values came from.
        """
        strategy, mesh = self.get_parallelism_strategy(), self.mesh(num_workers)
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"silence_s {self.silence_s:g} (from {self.origin('silence_s')}) must be at least twice heartbeat_s "
                f"{self.heartbeat_s:g} (from {self.origin('heartbeat_s')}), or one late heartbeat breaks a connection"
            )
        if self.use_amp and self.precision == "fp64":
            raise ConfigError('use_amp with precision "fp64" contradict each other; leave one of them out')
        if mesh.stages > 1 and strategy != "MODEL_PARALLEL" and self.batch_size < self.micro_batches:
            raise ConfigError(
                f"micro_batches {self.micro_batches} cannot be cut from batch_size {self.batch_size}: give at most as many as "
                "a batch has samples"
            )
        self._check_model_shape(mesh)

    def _check_model_shape(self, mesh: Mesh) -> None:
        """Only where the mesh divides the model: a model of another kind may leave these fields at their defaults."""
        if mesh.stages > 1:
            divide_layers(self.n_layers, mesh.stages)
        if mesh.tensor > 1 and self.n_heads % mesh.tensor:
            raise ConfigError(
                f"n_heads {self.n_heads} cannot be shared by tensor_parallel_size {mesh.tensor} workers: choose a number of "
                "workers that divides it"
            )
        if mesh.tensor > 1 and self.d_model % self.n_heads:
            raise ConfigError(
                f"d_model {self.d_model} is no multiple of n_heads {self.n_heads}, and each head takes an equal part of it"
            )

    @property
    def _by_layers(self) -> bool:
        return self.model_parallel or self.pipeline_parallel


@cache
def _table() -> FieldTable:
    return FieldTable(DistributedConfig, sizes=("budget_bytes",))
