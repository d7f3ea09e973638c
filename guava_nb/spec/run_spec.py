"""From what a user says about a model, a loss and an optimizer to the records that a worker can follow.

Everything wrong with it is found here, on the orchestrator, before any worker is asked.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import msgspec
import torch
from torch import nn

from guava_nb.config import DistributedConfig
from guava_nb.errors import ConfigError, SourceError
from guava_nb.protocol.messages import (
    CacheSpec,
    Cell,
    Factory,
    Hello,
    MetricSpec,
    ParallelSpec,
    RoundSpec,
    RunSpec,
)
from guava_nb.spec.cells import resolve
from guava_nb.spec.own_facts import reads
from guava_nb.spec.round_options import SPARSE_METHODS
from guava_nb.spec.training_options import Reference, TrainingOptions, option_infos, same_named

__all__ = [
    "build_spec",
    "factory_for",
    "factory_name",
    "mode_of",
    "parallel_spec",
    "plain_arguments",
    "precision_for",
    "round_spec",
    "uses_gather",
    "why_not_local",
]

_GATHER = "gather_batch"
#: Arguments of torch's losses that are tensors.
_CLASS_WEIGHTS = ("weight", "pos_weight")


def plain_arguments(what: str, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments that can travel as plain data.

    Raises:
        ConfigError: a value is not a number, text, bool, None, or a list or dict of these.
    """
    plain = dict(arguments or {})
    for name, value in plain.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError) as error:
            way = (
                "Give a list of its numbers, .tolist(), if that will do; else make"
                if hasattr(value, "tolist")
                else "Make"
            )
            raise ConfigError(
                f"{what}: argument {name!r} is a {type(value).__name__}, and only numbers, text, bools, None, lists and dicts "
                f"travel to workers. {way} the object inside a function of a %%guava_share cell and name that function"
            ) from error
    return plain


def factory_name(what: str, reference: Reference, shared: ModuleType | None) -> str:
    """Return the name under which workers find something: shared, importable, or torch's own.

    Raises:
        SourceError: it exists in this notebook or script only.
    """
    if isinstance(reference, str):
        return reference
    name, module = getattr(reference, "__qualname__", ""), getattr(reference, "__module__", "")
    if shared is not None and hasattr(shared, name):
        return name
    if not name:
        kind = type(reference).__name__
        raise ConfigError(
            f"{what} is an object of {kind}, and workers build their own from a name: give {kind} itself or its name, with "
            f"{what}_args={{...}}, or a function in a %%guava_share cell that does the same"
        )
    if isinstance(reference, MethodType):
        raise ConfigError(
            f"{what} {name} is a method of an object, which is here only: give a function in a %%guava_share cell"
        )
    if module in ("__main__", "", None) or "<locals>" in name or "<lambda>" in name:
        raise SourceError(
            f"{what} {name or reference!r} exists only here. Put its definition into a %%guava_share cell (in a script: "
            "orch.share(source)), or into a module that the workers can import, and give its name"
        )
    _refuse_another(what, reference, f"{module}:{name}")
    return f"{module}:{name}"


def _refuse_another(what: str, reference: object, name: str) -> None:
    """Refuse an object whose name leads to another one: workers would take that.

    Raises:
        SourceError: it does.
    """
    try:
        found = resolve(name, None)
    except SourceError:  # told where it is looked up
        return
    if found is reference or getattr(reference, "_torchdynamo_orig_callable", None) is found:
        return
    path = name.partition(":")[2]
    raise SourceError(
        f"{what} is not the {path} that its module has, and workers would take that one from {name}: it was decorated or made "
        f"anew here. Rebind the name in the module ({path} = decorator({path}), or @decorator above its definition), or put it "
        "into a %%guava_share cell"
    )


def factory_for(what: str, ref: Reference, args: Mapping[str, Any] | None, shared: ModuleType | None) -> Factory:
    """Return the record from which workers make something; errors as for `factory_name` and `plain_arguments`.

    Args:
        what: "model", "optimizer" and so on: for errors.
        ref: a name or an object.
        args: keyword arguments; plain values only, and class weights of a loss of torch as they are.
        shared: module of the shared cells; None: there are none.
    """
    if isinstance(ref, str) and "(" in ref:
        option = {"criterion": "loss"}.get(what, what)
        raise ConfigError(
            f"{what} {ref!r}: give the name alone, {ref.partition('(')[0]}, and its arguments beside it: {what}_args={{...}}, "
            f"in a notebook --{option}-args as JSON"
        )
    if isinstance(ref, partial):  # functools.partial(F.cross_entropy, label_smoothing=0.1)
        if ref.args:
            raise ConfigError(f"{what} is a functools.partial with arguments that have no names: give them by name")
        args, ref = {**ref.keywords, **(args or {})}, ref.func
    name = factory_name(what, ref, shared)
    if what == "criterion" and (name.startswith("torch.nn") or hasattr(nn, name) or hasattr(nn.functional, name)):
        # The worker makes tensors of these lists again, in the run's precision.
        args = {key: value.tolist() if key in _CLASS_WEIGHTS and hasattr(value, "tolist") else value
                for key, value in (args or {}).items()}  # fmt: skip
    return Factory(name, plain_arguments(what, args))


def optimizer_arguments(
    optimizer: Reference, given: Mapping[str, Any] | None, config: DistributedConfig, shared: ModuleType | None = None
) -> dict[str, Any]:
    """Return the optimizer's arguments: those given, then what the configuration sets; what neither says is torch's own.

    A shared function gets what the configuration sets if it takes an argument of this name.
    """
    found: Any = optimizer
    if isinstance(optimizer, str):
        found = getattr(torch.optim, optimizer, None) or getattr(shared, optimizer, None)
    accepted = inspect.signature(found).parameters if callable(found) else {}
    set_here = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    chosen = {name: value for name, value in set_here.items() if value is not None and name in accepted}
    return {**chosen, **(given or {})}


def parallel_spec(
    config: DistributedConfig,
    num_workers: int,
    tensor_plan: Mapping[str, str] | None = None,
    reach: Callable[[], bool] = lambda: False,
    gather: bool = False,
) -> ParallelSpec | None:
    """Return how a model is spread over the workers that are here; None: whole replicas that meet at the hub.

    Args:
        config: axes, zero stage and path.
        num_workers: that are here.
        tensor_plan: see `ParallelSpec`.
        gather: the run's code gathers over the replicas, which whole replicas that meet at the hub cannot.
        reach: asked in data mode with path "auto": would whole replicas be served better by a direct group?

    Raises:
        ConfigError: the axes do not multiply to the number of workers.
    """
    mesh, mode = config.mesh(num_workers), config.mode(num_workers)
    if mode == "data" and not (config.sync_batchnorm or gather) and not _direct_replicas(config, num_workers, reach):
        return None
    return ParallelSpec(
        mode=mode,
        dp=mesh.data,
        pp=mesh.stages,
        tp=mesh.tensor,
        zero_stage=config.zero_stage,
        schedule="1f1b" if config.pipeline_schedule == "auto" else config.pipeline_schedule,
        micro_batches=config.micro_batches if config.pipeline_parallel else 1,
        stages_per_rank=config.stages_per_worker,
        split=_names(config.pipeline_split),
        balance=config.pipeline_balance if config.pipeline_parallel and not config.pipeline_split else "parameters",
        tensor_plan=dict(tensor_plan or {}),
        checkpoint_activations=_names(config.checkpoint_activations),
        path=config.path,
        gather=gather,
    )


def precision_for(wanted: str, members: Collection[Hello]) -> str:
    """Return the precision of a run; "auto" is bf16 where every worker's card computes it by itself, else fp32."""
    if wanted != "auto":
        return wanted
    return "bf16" if members and all(member.has_bf16 for member in members) else "fp32"


def _direct_replicas(config: DistributedConfig, num_workers: int, reach: Callable[[], bool]) -> bool:
    """Whether whole replicas form a process group; at the hub they can come and go within a step, and may be unlike."""
    if num_workers < 2 or config.path == "relay":
        return False
    return config.path == "direct" or (config.optimizer_site == "workers" and reach())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _cache_spec(config: DistributedConfig, mode: str | None) -> CacheSpec | None:
    """What workers keep of batches."""
    if mode is None or mode == "off":
        return None
    return CacheSpec(mode, config.worker_cache_mb << 20, config.worker_cache_dir if mode == "disk" else "")


def mode_of(spec: RunSpec) -> str:
    """Return the mode that a run's record stands for."""
    return "data" if spec.parallel is None else spec.parallel.mode


def build_spec(
    config: DistributedConfig,
    shared: ModuleType | None,
    model: Factory,
    options: TrainingOptions,
    parallel: ParallelSpec | None = None,
    metrics: Sequence[MetricSpec] = (),
) -> RunSpec:
    """Return the record of a run.

    Its fields come from the options of the same names, else from the configuration; those of another form are made here.

    Args:
        options: settled.

    Raises:
        ConfigError, SourceError: something is wrong or exists only here.
    """
    if parallel is not None and options.optimizer_site == "orchestrator":
        cause = _not_at_the_hub(config, parallel, "the workers hold parts of the model, and each steps its own")
        raise ConfigError(f"optimizer_site is 'orchestrator', and {cause}, or leave optimizer_site at 'workers'")
    if options.sync == "local" and (cause := why_not_local(config, options, parallel)):
        raise ConfigError(f"sync is 'local', and {cause}, or leave sync at 'step'")
    if options.wire != "fp32":
        _refuse_wire(config, options, parallel)
    return RunSpec(
        **{
            **same_named(RunSpec.__struct_fields__, config, options),
            **_factories(config, shared, options),
            "model": model,
            "parallel": parallel,
            "metrics": tuple(metrics),
            "bucket_bytes": int(config.bucket_mb * (1 << 20)),
            "threads": options.threads or config.threads_per_worker,
            "cache": _cache_spec(config, options.cache),
            "data": (),  # what lies at the workers, they tell
            "lockstep": any(map(_looks_at_steps, options.callbacks)),
            "rounds": round_spec(options),
        }
    )


def round_spec(options: TrainingOptions) -> RoundSpec | None:
    """Return the rounds of local steps that settled options ask for; None for an exchange in every step."""
    if options.sync == "step":
        return None
    assert options.outer is not None and options.outer_lr is not None and options.accumulation_steps is not None
    momentum, sparse = options.outer_momentum or 0.0, options.outer_args or {}
    _check_outer_args(options.outer, sparse)
    return RoundSpec(
        options.outer, options.outer_lr, momentum, options.accumulation_steps, **sparse,
        sync_delay=options.sync_delay or 0, mixing=options.mixing,
    )  # fmt: skip


def _check_outer_args(outer: str, given: Mapping[str, Any]) -> None:
    if given and outer not in SPARSE_METHODS:
        raise ConfigError(
            f"outer_args is given, and outer={outer!r} takes none: leave it out, or choose outer='sparse' or outer='partial'"
        )
    rules: Mapping[str, tuple[Callable[[float], bool], str]] = {
        "density": (lambda value: 0 < value <= 1, "give a number above 0, up to 1"),
        "bits": (lambda value: value in (1, 2, 4, 8, 32), "give 1, 2, 4, 8 or 32"),
        "decay": (lambda value: 0 <= value <= 1, "give a number from 0 to 1"),
    }
    for name, value in given.items():
        if name == "decay" and outer == "partial":
            raise ConfigError(
                "outer_args names 'decay', and with outer='partial' all that was left out stays: leave decay out"
            )
        if name not in rules:
            raise ConfigError(f"outer_args names {name!r}; it may name {', '.join(rules)}")
        if not isinstance(value, int | float) or not rules[name][0](value):
            raise ConfigError(f"outer_args: {name} is {value!r}; {rules[name][1]}")


def why_not_local(config: DistributedConfig, options: TrainingOptions, parallel: ParallelSpec | None) -> str:
    """Return why a run cannot have rounds of local steps, and what to change; "" where it can.

    Args:
        config: of the session.
        options: of the run.
        parallel: how the model is spread; None: whole replicas.
    """
    if parallel is not None:
        return _not_at_the_hub(config, parallel, "workers hold parts of one model, and none can take a step alone")
    if options.optimizer_site == "orchestrator":
        return (
            "optimizer_site is 'orchestrator', so no worker has an optimizer to take steps with; leave it at 'workers'"
        )
    if options.precision == "fp16":
        return "fp16 scales the loss alike on all workers, while each takes steps of its own; use bf16 or fp32 (--precision)"
    return ""


def _refuse_wire(config: DistributedConfig, options: TrainingOptions, parallel: ParallelSpec | None) -> None:
    """Refuse a wire format that would have no effect, or a wrong one.

    Raises:
        ConfigError: gradients do not pass the orchestrator, or are multiplied by a loss scale that changes between steps.
    """
    if parallel is not None and (parallel.pp > 1 or parallel.mode == "pipeline"):
        return  # what passes between stages; nothing is left over for a next step
    if parallel is not None:
        cause = _not_at_the_hub(config, parallel, "the workers exchange gradients among themselves")
        raise ConfigError(f"wire is {options.wire!r}, and {cause}, or leave wire at 'fp32'")
    if options.precision == "fp16":
        raise ConfigError(
            f"wire is {options.wire!r}, and with precision 'fp16' a loss scale that changes multiplies the gradients, so what "
            "one step leaves out cannot be added to the next; use precision bf16 or fp32, or leave wire at 'fp32'"
        )


def _not_at_the_hub(config: DistributedConfig, parallel: ParallelSpec, in_parts: str) -> str:
    """Say why gradients do not meet at the orchestrator; `in_parts`: why not where workers hold parts of a model."""
    if parallel.mode == "data":
        return _past_the_orchestrator(config, parallel)
    return f"in mode {parallel.mode} {in_parts}; use data mode"


def _past_the_orchestrator(config: DistributedConfig, parallel: ParallelSpec) -> str:
    """Say what makes whole replicas exchange gradients among themselves."""
    what, instead = ("path='direct'", "choose path='relay' (--path relay)")
    if parallel.gather:
        what, instead = (
            "gather_batch, which a shared cell or the code of model, loss or step names,",
            "leave it out of them",
        )
    elif config.sync_batchnorm:
        what, instead = "sync_batchnorm", "leave it off (--sync-batchnorm off)"
    return f"{what} makes the workers exchange gradients among themselves, past the orchestrator; {instead}"


def _looks_at_steps(callback: Any) -> bool:
    """Whether a callback has an on_step of its own, not that of our base class, which does nothing."""
    hook = getattr(callback, "on_step", None)
    return hook is not None and getattr(hook, "__module__", None) != "guava_nb.training.plan"


def _factories(
    config: DistributedConfig, shared: ModuleType | None, options: TrainingOptions
) -> dict[str, Factory | None]:
    """What every option of a name stands for, with its arguments where it has an option for them."""
    made: dict[str, Factory | None] = {}
    for name in (one.name for one in option_infos(type(options)) if one.kind == "name"):
        reference, arguments = getattr(options, name), getattr(options, f"{name}_args", None)
        if name == "optimizer":
            arguments = optimizer_arguments(reference, arguments, config, shared)
        absent = reference is None and name != "optimizer"  # there always is one
        made[name] = None if absent else factory_for(name, reference, arguments, shared)
    return made


def uses_gather(cells: Iterable[Cell], references: Iterable[Reference | None]) -> bool:
    """Whether the code of a run names `gather_batch`: then its workers must form a process group.

    Args:
        cells: that are shared.
        references: model, loss and step; of those that can be imported the code that they reach is looked at.
    """
    if any(_GATHER in cell.text for cell in cells):
        return True
    found: dict[str, object] = {}
    for number, one in enumerate(references):
        with contextlib.suppress(SourceError):  # that it cannot be found is told where it is used
            found[str(number)] = resolve(one, None) if isinstance(one, str) and ":" in one else one
    return reads(found, _GATHER)
