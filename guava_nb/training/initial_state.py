"""Where a run's first state comes from: the factory, registered weights, the last run, a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.parallel.unloaded import spare_compiler, take_step
from guava_nb.protocol.messages import Cell, Factory, RunSpec
from guava_nb.replica.model.build import build_model
from guava_nb.replica.model.shared_memory import refuse_overlaps
from guava_nb.replica.model.structure import first_difference
from guava_nb.replica.rounds.local_replica import whole_replica
from guava_nb.spec.cell_checks import cells_behind
from guava_nb.spec.cells import resolve
from guava_nb.spec.own_code import is_own
from guava_nb.sync.group_replica_set import GroupReplicaSet
from guava_nb.sync.own_state import OwnParts
from guava_nb.sync.replica_set import ReplicaSet
from guava_nb.sync.state_at_workers import changed_in_python
from guava_nb.sync.whole_replica_set import WholeReplicaSet
from guava_nb.training import checkpoint
from guava_nb.training.plan import Logged, Position, TrainingPlan

__all__ = [
    "GOES_ON",
    "SCHEDULE_GOES_ON",
    "build_replicas",
    "check_saved",
    "from_checkpoint",
    "from_last_run",
    "goes_on",
    "unfit",
    "unlike",
]

# What a loaded optimizer state lacks, which torch would only find in the first step, at a worker.


def unfit(optimizer: Optimizer, saved: Any) -> str:
    """Return what the state of one of torch's optimizers lacks for a step, "" for nothing, or where that is not known.

    Args:
        saved: what it has loaded: torch turns all of it into floats without a word.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    for state in saved["state"].values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() and not (value.is_floating_point() or value.is_complex()):
                return f"{name!r} is a tensor of {value.dtype}"
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = optimizer.state.get(parameter)
            if not found:
                continue
            for name, value in _after_a_step(type(optimizer), group, parameter).items():
                if lacking := _lacking(found.get(name), value, parameter):
                    return f"{name!r} of a parameter of shape {tuple(parameter.shape)} {lacking}"
    return ""


def _after_a_step(kind: type[Optimizer], group: dict[str, Any], like: nn.Parameter) -> dict[str, Any]:
    """The state of a small parameter after a step; {} where it cannot be made."""
    small = nn.Parameter(torch.zeros([2] * like.dim(), dtype=like.dtype))
    small.grad = torch.zeros_like(small)
    spare_compiler()
    try:
        made = kind([{**group, "params": [small]}])  # type: ignore[call-arg]
        take_step(made)
    except Exception:  # settings of a kind that is not known here
        return {}
    return dict(made.state[small])


def _lacking(found: Any, usual: Any, parameter: nn.Parameter) -> str:
    if not isinstance(usual, Tensor):
        return "is no number" if isinstance(usual, int | float) and not isinstance(found, int | float | Tensor) else ""
    if not isinstance(found, Tensor):
        return "is missing" if usual.dim() else ("" if isinstance(found, int | float) else "is no number")
    if usual.dim() and usual.shape == torch.Size([2] * parameter.dim()) and found.shape != parameter.shape:
        return f"has shape {tuple(found.shape)}"
    same = found.is_floating_point() == usual.is_floating_point() and (usual.dim() or found.numel() == 1)
    return "" if same else f"is a tensor of {found.dtype} of shape {tuple(found.shape)}"


#: What a run begins with; what of the optimizer and what changed.
GOES_ON = "goes on from the weights of the last run{}{}; --fresh (fresh=True) starts anew"
#: Said after it.
SCHEDULE_GOES_ON = (
    ". Its schedule goes on, too, with the learning rate at which that run ended, not with that of a new optimizer"
)
#: What of a record says how messages of rounds travel: what they left out is of use to messages of the same kind.
_MESSAGES = ("rounds", "wire", "bucket_bytes")
_STATES = ("model", "buffers", "optimizer", "scheduler", "scaler", "outer")


def build_replicas(
    run_id: str, spec: RunSpec, cells: Sequence[Cell], shared: ModuleType | None, weights: torch.nn.Module | None
) -> ReplicaSet:
    """Return a replica set whose master was built from the factory, with the weights of a registered model if there is one.

    Args:
        run_id: name of the run.
        spec: its record.
        cells: shared ones, as text.
        shared: their module here; None: there is none.
        weights: the registered model; None: as the factory builds it.

    Raises:
        CheckpointError: the registered model is not what the factory builds.
        ConfigError: two tensors of it lie in the same memory, and the mode would part them.
        GuavaError: model, loss, optimizer or scheduler cannot be built.
    """

    def find(name: str) -> object:
        found: object = resolve(name, shared)
        return found

    model = build_model(spec, find)
    for module in model.modules():  # workers compile; the model that a user gets back runs on any machine
        module._compiled_call_impl = None
    if weights is not None:
        _check_instance(spec, weights, model)
    if spec.parallel is not None and spec.parallel.mode != "data":
        refuse_overlaps(model, f"mode {spec.parallel.mode!r}")
    master = whole_replica(spec, find, torch.device("cpu"), model)
    if weights is not None:
        built, state = dict(master.model.named_buffers()), weights.state_dict()
        hidden = {n: b for n, b in weights.named_buffers() if n not in state and not torch.equal(b.cpu(), built[n])}
        master.load_state({"model": state, "buffers": hidden})
    made = (WholeReplicaSet if spec.parallel is None else GroupReplicaSet)(run_id, spec, cells, master)
    made.from_seed = weights is None
    return made


def _check_instance(spec: RunSpec, instance: torch.nn.Module, built: torch.nn.Module) -> None:
    problem = checkpoint.differences(instance.state_dict(), built.state_dict(), "in the registered one")
    if not problem:
        problem = first_difference(
            instance, built, any_float=spec.precision == "fp64", hidden=spec.parallel is not None
        )
    if problem:
        name = type(instance).__name__
        raise CheckpointError(
            f"the registered model is not what its class builds at the workers ({problem}). Only its weights and requires_grad "
            f"travel, all else is built there by {name}(...): give register_model the arguments that it was built with "
            f"(--model-args), and make other changes in {name}.__init__ or in a subclass of it, in a %%guava_share cell. What "
            "__init__ draws at random belongs into a buffer (register_buffer), or is alike after torch.manual_seed(N) just "
            "before the instance is built, with N the run's seed (seed=, --seed; 0 where none is given)"
        )


def from_last_run(replica_set: ReplicaSet, last: ReplicaSet, fetch: Callable[[ReplicaSet], dict[str, Any]]) -> str:
    """Go on from the last run's weights where the model has the same parameters, and from its optimizer where that is the same.

    Args:
        fetch: brings the state of replicas here.

    Returns:
        What the run begins with, in a sentence.

    Raises:
        ConfigError: the model has other parameters, and what was trained would be thrown away.
        WorkerLost: the workers that hold those weights are gone.
    """
    changed, problem = _difference(replica_set, last), unlike(replica_set, last)
    if problem:
        check_saved(last, f"{changed or 'the model changed'} since, and its parameters are others now ({problem})")
        return f"begins with new weights: {changed} since the last run"
    state = fetch(last)
    same = _has_same_optimizer(replica_set, last)
    replica_set.from_seed, replica_set.goes_on = False, True
    replica_set.master.load_state({"model": state["model"], "buffers": state.get("buffers")})
    if same:
        try:
            replica_set.master.load_state(
                {key: value for key, value in state.items() if key not in ("model", "buffers")}
            )
        except CheckpointError:  # a function of the user's makes other groups of the parameters than before
            same = False
    optimizer = "" if same else " with a new optimizer"
    since = f" ({changed} since, and its parameters are the same)" if changed else ""
    schedule = SCHEDULE_GOES_ON if same and replica_set.spec.scheduler is not None else ""
    return GOES_ON.format(optimizer, since) + schedule


def check_saved(last: ReplicaSet, why: str) -> None:
    """Refuse a run that begins elsewhere while what the last one trained is in no file.

    Args:
        why: it begins elsewhere.

    Raises:
        ConfigError: it would be thrown away.
    """
    if last.is_saved:
        return
    trained = f"what the last one trained in {last.step + 1} steps" if last.step >= 0 else "the trained weights"
    raise ConfigError(
        f"this run would throw away {trained}: {why}, and no file has it. To keep it, save it before with save_checkpoint(path) "
        "(%guava_save PATH), or go on with the model as it was. To give it up and begin with new weights: fresh=True (--fresh)"
    )


def begun_anew(replica_set: ReplicaSet, last: ReplicaSet, strict: bool) -> str:
    """Return what begins anew although the weights go on, in a sentence; "" where nothing is known of.

    Args:
        replica_set: of the run that begins.
        last: of the run before.
        strict: refuse it (check="strict").

    Raises:
        ConfigError: the run is strict, and something that the last run changed begins anew.
    """
    return "" if unlike(replica_set, last) else _lost(replica_set, changed_in_python(last), "the last run", strict)


def _lost(replica_set: ReplicaSet, kept: Sequence[str], run: str, strict: bool) -> str:
    kept = [name for name in kept if _is_used(replica_set, name.strip("()"))]
    if not kept:
        return ""
    names = ", ".join(name.strip("()") for name in kept[:4])
    sentence = (
        f"{names}: {run} changed this outside of parameters, buffers and torch's optimizer state, and it begins anew now, "
        "while plain PyTorch goes on with it. Keep it in a buffer (self.register_buffer), let get_extra_state() of the model or "
        "state_dict() of the optimizer return it, or train all epochs in one run"
    )
    if strict and any(not name.startswith("(") for name in kept):
        raise ConfigError(f"{sentence}. To begin with all of it anew: fresh=True (--fresh)")
    return sentence


def _is_used(replica_set: ReplicaSet, place: str) -> bool:
    """Whether anything may read what is kept there: the user's code, as far as it is seen, or a library."""
    owner, _, name = place.rpartition(".")
    if replica_set.code is None or owner.partition(".")[0] != "model":
        return True
    modules = dict(replica_set.master.model.named_modules())
    module = modules.get(owner.partition(".")[2])
    if module is None or not is_own(vars(sys.modules.get(type(module).__module__, sys))):
        return True
    return replica_set.code.loads(name)


def goes_on(replica_set: ReplicaSet, last: ReplicaSet) -> bool:
    """Whether a run would go on from the last one's optimizer, too."""
    return not unlike(replica_set, last) and _has_same_optimizer(replica_set, last)


def unlike(replica_set: ReplicaSet, last: ReplicaSet) -> str:
    """What names and shapes the models of two runs have not in common."""
    before, now = (one.master.model.state_dict() for one in (last, replica_set))
    return checkpoint.differences(before, now, "in the last run's model")


def _difference(replica_set: ReplicaSet, last: ReplicaSet) -> str:
    """What the user changed of the model, "" where it is what it was: only what it depends on counts."""
    model = replica_set.spec.model
    assert model is not None
    if last.spec.model != model:
        return "another model was chosen"
    before, now = ({cell.name: cell.text for cell in one.cells} for one in (last, replica_set))
    behind = cells_behind(model.name, last.cells) | cells_behind(model.name, replica_set.cells)
    names = sorted(name for name in behind if before.get(name) != now.get(name))
    return f"shared cell {' and '.join(names)} changed" if names else ""


def _has_same_optimizer(replica_set: ReplicaSet, last: ReplicaSet) -> bool:
    if last.spec.frozen != replica_set.spec.frozen and not hasattr(torch.optim, replica_set.spec.optimizer.name):
        return False  # a function of the user's may have left out what was frozen
    return all(getattr(last.spec, n) == getattr(replica_set.spec, n) for n in ("optimizer", "scheduler", "precision"))


def from_checkpoint(
    replica_set: ReplicaSet, plan: TrainingPlan, path: Path, content: dict[str, Any], rewind: bool = True
) -> list[str]:
    """Go on from a checkpoint: state, step and place in the data.

    Args:
        rewind: bring the loader there; without, only the plan says where the run would begin.

    Returns:
        Sentences on what the checkpoint decides instead of this call.

    Raises:
        CheckpointError: it belongs to another model, optimizer or scheduler.
        ConfigError: all its epochs are done; or the run is strict, and something begins anew that no checkpoint has.
    """
    checkpoint.check_model(path, content, replica_set.master.model.state_dict(), replica_set.spec.model)
    spec, replica_set.from_seed = replica_set.spec, False
    notes = _compare(path, "optimizer", content["spec"].get("optimizer"), spec.optimizer)
    notes += _compare(path, "scheduler", content["spec"].get("scheduler"), spec.scheduler)
    try:
        replica_set.master.load_state({key: content[key] for key in _STATES if key in content})
    except Exception as error:  # a damaged state may raise any error
        raise CheckpointError(
            f"{path} was made with another optimizer or scheduler, or is damaged ({error}). Use the ones that it was made with, "
            "or train anew (fresh=True, --fresh)"
        ) from error
    if (saved := content.get("optimizer")) is not None and (lacking := unfit(replica_set.master.optimizer, saved)):
        raise CheckpointError(
            f"{path} is a damaged checkpoint: of the optimizer's state {lacking}. {checkpoint.ANOTHER}"
        )
    _begin_at(replica_set, plan, content)
    replica_set.note_saved(path, replica_set.step)
    if rewind:
        try:
            plan.start.rewind(plan.feed, plan.val_feed)
        except Exception as error:  # a damaged place may raise any error
            raise CheckpointError(
                f"{path} does not say where in the data to go on: {error}. {checkpoint.ANOTHER}"
            ) from error
    done = int(content["step"]) + 1
    if not plan.has_step_after(done):
        raise ConfigError(
            f"{path} has {done} steps and max_steps is {plan.max_steps}, counted from the very beginning: nothing is left to do. "
            "Ask for more steps (--max-steps)"
        )
    if plan.start.epoch >= plan.num_epochs:
        raise ConfigError(
            f"{path} is at the end of epoch {plan.start.epoch} and num_epochs is {plan.num_epochs}, counted from the very "
            "beginning: nothing is left to do. Ask for more epochs (--epochs)"
        )
    lost = _lost(replica_set, content.get("kept", ()), f"the run of {path}", plan.check == "strict")
    return notes + [lost] * bool(lost) + _only_its_end(path, plan)


def _begin_at(replica_set: ReplicaSet, plan: TrainingPlan, content: Mapping[str, Any]) -> None:
    """Begin at the step of a checkpoint, at its place in the data, with what its workers kept beside it."""
    replica_set.step = replica_set.master_step = int(content["step"])
    plan.start = Position(**content["position"])
    if "log" in content:
        name, steps, epochs = content["log"]
        plan.logged = Logged(Path(name).name, steps, epochs, steps + int(content["step"]) + 1)
    if "own" in content:  # what sums left out is of use only where they travel as they did
        spec, own = replica_set.spec, content["own"]
        is_like = all(content["spec"].get(name) == msgspec.to_builtins(getattr(spec, name)) for name in _MESSAGES)
        sums = own["sums"] if is_like else {}
        replica_set.go_on_with(OwnParts(own["number"], own["count"], replica_set.step, sums))


def _only_its_end(path: Path, plan: TrainingPlan) -> list[str]:
    """The sentence on an epoch of which all steps are done, and nothing that follows them."""
    start, epoch = plan.start, plan.start.epoch + 1
    if not start.batches or start.batches != plan.feed.batches_per_epoch:
        return []
    more = "" if plan.num_epochs > epoch else f", and nothing else: to train on, ask for more than {epoch} (--epochs)"
    return [
        f"{path} has all steps of epoch {epoch}; what ends it (a validation, the schedule, on_epoch) is done now{more}"
    ]


def _compare(path: Path, part: str, saved: Any, asked: Factory | None) -> list[str]:
    """Torch loads the state of one optimizer into another without a word, and fails at the first step."""
    try:
        made = msgspec.convert(saved, Factory | None)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} does not say with which {part} it was made ({error})") from error
    theirs = made.name.rpartition(":")[2] if made else "none"
    ours = asked.name.rpartition(":")[2] if asked else "none"
    if theirs != ours:
        raise CheckpointError(
            f"{path} was made with {part} {theirs}, this run asks for {ours}: use {theirs}, or train anew with fresh=True "
            "(--fresh)"
        )
    if made is None or asked is None or made.args == asked.args:
        return []
    settings = ", ".join(f"{name}={value!r}" for name, value in made.args.items()) or "its defaults"
    return [f"the {part} goes on with the settings of {path} ({settings}), not with those given now"]
