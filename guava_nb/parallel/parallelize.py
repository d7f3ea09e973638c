"""One model onto one mesh, in one order.

Everything that cannot be split right is refused here, before anything is trained, with the sizes in the sentence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from guava_nb.config.modes import check_combination
from guava_nb.errors import ConfigError
from guava_nb.parallel.checkpointing import checkpoint_activations
from guava_nb.parallel.interface import ModelPart
from guava_nb.parallel.loss_interface import Learning, MakeOptimizer
from guava_nb.parallel.mesh import MeshAxes
from guava_nb.parallel.optimizer_trial import check_optimizer, check_sharded_optimizer
from guava_nb.parallel.replicas import zero1
from guava_nb.parallel.replicas.call_order import Habit
from guava_nb.parallel.replicas.data_axis import make_data_axis
from guava_nb.parallel.state.full_state import FullOrder
from guava_nb.parallel.state.local_tensors import full_names_of, hold
from guava_nb.parallel.tensor.plan_search import make_plan
from guava_nb.parallel.tensor.tensor_plan import Plan, apply_plan
from guava_nb.parallel.tensor.tensor_sums import TensorSums
from guava_nb.parallel.whole_model_part import WholeModelPart
from guava_nb.protocol.messages import ParallelSpec
from guava_nb.random_streams import streams_kept

__all__ = ["MODES", "check_model", "check_parallel", "describe", "parallelize", "refuse_left_behind"]

# What a model's plain attributes hold of parameters that spreading has replaced: lists of them, optimizers, other modules.
#
# A layer that is shared out, and what FSDP2 shards, gets new parameters under the old names. Who kept the old ones would go on
# with the values of before, or with gradients that no step sees.

#: Attributes that torch gives every module.
_TORCHS = frozenset(vars(nn.Module()))
#: Objects that are looked into, one inside another.
_DEPTH = 4


def refuse_left_behind(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Check that no attribute holds a parameter that is the model's no more.

    Args:
        model: what this rank has of it, spread.
        before: the parameters that it had as a whole, by name.

    Raises:
        ConfigError: one does.
    """
    names = {id(parameter): name for name, parameter in before.items()}
    now, seen = {id(parameter) for parameter in model.parameters()}, {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _TORCHS:
                continue
            for found, holder in _parameters(value, _DEPTH, set(seen)):
                if id(found) in names and id(found) not in now:
                    raise ConfigError(_text(f"{name}.{key}".lstrip("."), type(holder), names[id(found)]))


def _parameters(value: Any, depth: int, seen: Set[int]) -> Iterator[tuple[nn.Parameter, Any]]:
    """The parameters that a value holds, each with the optimizer or other object that has it."""
    if isinstance(value, nn.Parameter):
        yield value, value
        return
    if id(value) in seen or not depth or type(value).__module__.startswith(("guava_nb.", "torch.distributed")):
        return
    seen |= {id(value)}
    if isinstance(value, Optimizer):
        inside: Any = [group["params"] for group in value.param_groups]
    elif isinstance(value, nn.Module):
        inside = list(value.parameters())
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    else:
        inside = list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []
    for one in inside:
        for parameter, holder in _parameters(one, depth - 1, seen):
            yield parameter, value if isinstance(value, Optimizer | nn.Module) else holder


def _text(place: str, kind: type, name: str) -> str:
    if issubclass(kind, Optimizer):
        way = (
            "it would step values that the run does not use. Give the run one optimizer for all parameters (--optimizer), whose "
            "function may make groups of them, or train with one worker"
        )
    else:
        way = (
            "it would be read as it was before the run. Take parameters from their modules each time, or use data mode or "
            "zero_stage=1 (--zero 1)"
        )
    what = f"an optimizer ({kind.__name__}) of" if issubclass(kind, Optimizer) else "parameter"
    return f"the model's attribute {place!r} holds {what} {name!r}, of which each worker gets a part of its own here: {way}"


# What a spread model looks like, in one sentence for people.

#: How far above its fair share a stage may be before the user is told.
_UNEVEN = 1.7

_WORDS = {
    "column": "columns of {}",
    "row": "rows of {}",
    "head": "classes of {}",
    "vocab": "words of {}",
    "attention": "heads of {}",
}


def describe(begins: Sequence[str], counts: Sequence[int], plan: Plan) -> str:
    """Say where stages begin and what ranks share; "" where there is neither.

    Args:
        begins: full name of the module that each stage begins with; empty without stages.
        counts: parameters of each stage.
        plan: of the whole model.
    """
    texts = []
    if len(begins) > 1:
        sized = zip(begins, counts, strict=True)
        stages = ", ".join(f"{at + 1} with {name} ({count:,} parameters)" for at, (name, count) in enumerate(sized))
        texts.append(f"stages begin: {stages}")
        most, fair = max(counts), sum(counts) / len(counts)
        if most > _UNEVEN * fair:
            texts.append(
                f"stage {counts.index(most) + 1} has {most / fair:.1f} times its fair share, because the model can be cut "
                "at calls of whole modules only: call its blocks one by one in the model's forward, or put them into an "
                "nn.Sequential"
            )
    kinds: dict[str, list[str]] = {}
    for name, split in plan.splits.items():
        kinds.setdefault(split.kind, []).append(name)
    if kinds:
        parts = [_WORDS[kind].format(_collapsed(names)) for kind, names in kinds.items()]
        texts.append(f"shared out: {'; '.join(parts)}; all else is whole on every worker")
    return ". ".join(texts)


def _collapsed(names: Iterable[str]) -> str:
    """Names of blocks that repeat, once: "blocks.*.up (x6)"."""
    counts: dict[str, list[str]] = {}
    for name in names:
        counts.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name), []).append(name)
    return ", ".join(f"{pattern} (x{len(same)})" if len(same) > 1 else same[0] for pattern, same in counts.items())


MODES = ("data", "pipeline", "tensor", "zero", "hybrid")


def parallelize(
    model: nn.Module,
    spec: ParallelSpec,
    mesh: MeshAxes,
    device: torch.device,
    learning: Learning,
    *,
    example: Any = None,
    sync_batchnorm: bool = False,
    habit: Habit | None = None,
) -> ModelPart:
    """Spread a whole model over a mesh; every rank calls it with an equal model at the same time.

    Args:
        model: the whole model; it is taken apart.
        spec: how to spread it.
        mesh: over the default process group.
        device: where this rank computes; the model is moved there.
        learning: loss and optimizer.
        example: inputs of a typical micro-batch on `device`, on rank 0; only a pipeline balanced by time needs it.
        sync_batchnorm: batch norms see the rows of all replicas.
        habit: what former groups have shown of the model's calls; changed.

    Raises:
        ConfigError: the model cannot be spread like this.
    """
    check_parallel(spec, mesh, sync_batchnorm)
    check_model(model)
    before = dict(model.named_parameters())
    order, plan = _look_at_whole(model, spec, learning.make_optimizer)
    if spec.tp > 1:
        _agree(plan, device)
    # 1. Stages. They are cut first, while names and modules are still the user's; then each stage goes on below.
    if spec.pp > 1 or spec.mode == "pipeline":
        # Only now: torch's pipelining is slow to import, and the other modes never need it.
        from guava_nb.parallel.pipeline.parallelize_stages import pipeline_part

        stages = pipeline_part(model, spec, mesh, device, learning, plan, example)
        stages.layout = describe(stages.begins, stages.stage_parameters, plan)
        refuse_left_behind(stages.model, before)
        return stages
    names = full_names_of(model)
    # 2. Layers over "tp". Replaced layers keep their names; what is in no plan stays whole on every rank.
    # FSDP2 hangs its hooks on a model's outputs, so there they must be tensors of the ordinary kind.
    late = spec.zero_stage < 2 or spec.dp == 1
    partial = apply_plan(model, plan, mesh.group("tp"), late) if spec.tp > 1 else []
    model.to(device)
    # 3. Activation checkpointing, inside what FSDP2 wraps, so that a block is gathered once for its recomputation.
    if spec.checkpoint_activations:
        checkpoint_activations(model, spec.checkpoint_activations)
    if spec.zero_stage >= 2 and spec.dp > 1:
        check_sharded_optimizer(model, mesh.axis("dp"), spec.zero_stage, learning.make_optimizer)
    # 4. Replicas over "dp", last, because they sum or shard whatever parameters the steps above left here.
    data = make_data_axis(model, spec.zero_stage, mesh, names, sync_batchnorm, habit, spec.gather, learning.buffers)
    refuse_left_behind(model, before)
    holding = hold(model, names, order, mesh, mesh.dp if spec.zero_stage else 0)
    optimizer = learning.make_optimizer(holding.named)
    owned = spec.zero_stage == 1 and spec.dp > 1
    if owned:
        zero1.own_share(optimizer, holding.named, mesh.group("dp"))
    tensor = TensorSums(mesh.group("tp") if spec.tp > 1 else None, partial, holding.layouts)
    part = WholeModelPart(
        model, holding, learning.objective, optimizer, data, tensor, holding.members(optimizer), owned
    )
    part.layout = describe((), (), plan)
    return part


def _look_at_whole(model: nn.Module, spec: ParallelSpec, make_optimizer: MakeOptimizer) -> tuple[FullOrder, Plan]:
    optimizer = make_optimizer(dict(model.named_parameters()))
    with streams_kept(model):
        plan = make_plan(model, spec.tensor_plan, spec.tp) if spec.tp > 1 else Plan({})
        check_optimizer(model, spec, plan, make_optimizer)
    return FullOrder.of(model, optimizer), plan


def _agree(plan: Plan, device: torch.device) -> None:
    """Make sure that every rank found the same plan: unlike splits would wait for each other or add up nonsense.

    Raises:
        ConfigError: they differ.
    """
    number = int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:7], "little")
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes[0] != -extremes[1]:
        raise ConfigError(
            "the workers found different tensor plans for this model; they need equal models and equal shared cells, or a "
            "tensor_plan (--plan) that names the layers"
        )


# --------------------------------------------------------------------------------------------------------- validation


def check_parallel(spec: ParallelSpec, mesh: MeshAxes, sync_batchnorm: bool = False) -> None:
    """Check what can be said without a model.

    Args:
        spec: what the run asks for.
        mesh: the axes that there are.
        sync_batchnorm: as in `TrainingOptions`.

    Raises:
        ConfigError: names, sizes or combinations that make no sense.
    """
    sizes = (spec.dp, spec.pp, spec.tp)
    if spec.mode not in MODES:
        raise ConfigError(f"parallel mode {spec.mode!r} is unknown; choose one of {', '.join(MODES)}")
    if (mesh.sizes.data, mesh.sizes.stages, mesh.sizes.tensor) != sizes:
        raise ConfigError(f"the run asks for dp {spec.dp} x pp {spec.pp} x tp {spec.tp}, the mesh is {mesh.sizes}")
    alone = {"data": ("pp", "tp"), "zero": ("pp", "tp"), "pipeline": ("dp", "tp"), "tensor": ("dp", "pp")}
    for axis in alone.get(spec.mode, ()):
        if getattr(spec, axis) > 1:
            raise ConfigError(
                f"mode {spec.mode!r} has no axis {axis}, {axis}={getattr(spec, axis)} needs mode 'hybrid'"
            )
    if not 0 <= spec.zero_stage <= 3:
        raise ConfigError(f"zero_stage (--zero) is {spec.zero_stage}; it is 0, 1, 2 or 3")
    if spec.mode == "zero" and spec.zero_stage == 0:
        raise ConfigError("mode 'zero' needs zero_stage 1, 2 or 3 (--zero)")
    check_combination(spec.mode, spec.pp, spec.zero_stage, spec.schedule, spec.stages_per_rank, sync_batchnorm)


def check_model(model: nn.Module) -> None:
    """Check what every mode needs of a model.

    Raises:
        ConfigError: lazy layers, sparse gradients, or a state dict that holds more than parameters and buffers.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet; run the lazy layer once inside the model factory")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name!r} makes sparse gradients, and exchanged gradients are dense; use sparse=False")
    known = set(full_names_of(model))
    strange = [key for key, value in model.state_dict().items() if key not in known and isinstance(value, Tensor)]
    if strange:
        raise ConfigError(
            f"the model's state dict holds {strange[0]!r}, which is neither a parameter nor a buffer "
            f"({len(strange)} such keys); a spread model cannot gather it"
        )
