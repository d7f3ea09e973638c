"""Optimizer, learning-rate schedule and loss scale of one replica; and how a step of theirs that fails is undone.

Knows torch.optim; knows nothing of buckets or workers.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from guava_nb.errors import CheckpointError, ConfigError
from guava_nb.nested import leaves
from guava_nb.parallel.module_state import unheard
from guava_nb.parallel.unloaded import is_dtensor, spare_compiler
from guava_nb.protocol.messages import Factory
from guava_nb.replica.state_dict import plain
from guava_nb.spec.factories import Resolve, build, find

__all__ = [
    "INTERVALS",
    "OPTIMIZERS",
    "SCHEDULERS",
    "ApplyFailed",
    "LossScale",
    "Schedule",
    "StepUndo",
    "build_optimizer",
    "build_scheduler",
    "follows_metric",
    "is_gated",
    "is_of_the_user",
]

INTERVALS = ("step", "epoch", "validation")

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: cls
    for name, cls in vars(optim).items()
    if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
}
SCHEDULERS: dict[str, type[LRScheduler]] = {
    name: cls
    for name, cls in vars(lr_scheduler).items()
    if isinstance(cls, type) and issubclass(cls, LRScheduler) and cls is not LRScheduler and not name.startswith("_")
}
#: Those that a GPU steps by one kernel for all parameters.
_FUSED = (optim.Adam, optim.AdamW, optim.SGD)
_CLOSURE = (
    "optimizer {} evaluates the loss several times in one step, which the exchange of gradients cannot do; use one that steps "
    "once per gradient, such as AdamW"
)
#: Arguments of schedulers that are functions: given as the name of a shared one.
_FUNCTION_ARGUMENTS = ("lr_lambda", "scale_fn")


def build_optimizer(factory: Factory, named: Iterable[tuple[str, nn.Parameter]], resolve: Resolve) -> Optimizer:
    """Return the optimizer of a model's parameters, as `model.named_parameters()` gives them.

    A class gets the parameters, frozen ones too, so that its state dict fits the same class in a plain program. A
    shared function gets a list of (name, parameter), and makes groups as it likes.

    Raises:
        ConfigError: unknown name, arguments that do not fit, or an optimizer that cannot work on exchanged gradients.
        PreparationError: the user's function raised.
    """
    name = factory.name
    found = find("optimizer", name, OPTIMIZERS, "torch.optim", resolve)
    is_class = isinstance(found, type) and issubclass(found, Optimizer)
    if is_class:
        _refuse_unfit(name, found)
    pairs = list(named)
    given: Any = [parameter for _, parameter in pairs] if is_class else pairs
    if not given:
        raise ConfigError("the model has no parameters: there is nothing to train")
    fuses = name in OPTIMIZERS and _may_be_fused(found, factory.args, [parameter for _, parameter in pairs])
    args = {**factory.args, "fused": True} if fuses else factory.args
    spare_compiler()
    made = build("optimizer", name, found, given, from_torch=name in OPTIMIZERS, args=args)
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer {name!r} returned a {type(made).__name__}; it must return a torch.optim.Optimizer"
        )
    _refuse_unfit(name, type(made))
    if "_optimizer_step_pre_hooks" not in vars(
        made
    ):  # a wrapper that never called super().__init__() lacks torch's tables
        blank = vars(optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0))
        vars(made).update({key: value for key, value in blank.items() if key.startswith("_") and key not in vars(made)})
    _check_state(name, made)
    _check_owned(name, made, pairs)
    if fuses:
        _keep_to_itself(made)
    if name not in OPTIMIZERS and not name.startswith(
        "@"
    ):  # one in the user's own process is there once, and is not tried
        _refuse_by_trial(
            name, partial(build, "optimizer", name, found, from_torch=False, args=factory.args), pairs, is_class
        )
    return made


def _refuse_by_trial(
    name: str, again: Callable[[Any], Any], named: Sequence[tuple[str, nn.Parameter]], is_class: bool
) -> None:
    """Take a step on small stand-ins.

    Raises:
        ConfigError: it needs a function that computes the loss again, or keeps what no checkpoint would have.
    """
    stand_ins = [(name, _stand_in(parameter)) for name, parameter in named]
    called: list[bool] = []

    def closure() -> Tensor:
        called.append(True)
        return torch.zeros(())

    sentence = ""
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), unheard():
        optimizer = again([parameter for _, parameter in stand_ins] if is_class else stand_ins)
        if (error := _error_of(optimizer.step)) is not None:
            # Of the user's code. One that a closure does not change has another reason, which the first step will tell.
            needs_closure = _error_of(partial(optimizer.step, closure)) != error and called
            sentence = _CLOSURE.format(name) if needs_closure else ""
        elif left_out := _left_out(optimizer):
            sentence = (
                f"optimizer {name!r} holds another one in its {left_out!r}, whose state its own state_dict() leaves out, so it "
                "could reach neither a worker that joins nor a checkpoint: keep what it remembers in self.state[parameter], or "
                "return the state of both under 'state' in state_dict(), and take it in load_state_dict()"
            )
        else:
            try:
                plain(optimizer.state_dict(), "state_dict()")
            except CheckpointError as problem:
                sentence = f"optimizer {name!r}: {problem}"
    if sentence:
        raise ConfigError(sentence)


def _error_of(step: Callable[[], object]) -> str | None:
    try:
        step()
    except Exception as error:
        return repr(error)
    return None


def _left_out(optimizer: Optimizer) -> str:
    """Name an attribute with an optimizer that has state of which the state dict of this one has nothing; "" for none."""
    carried = {id(leaf) for leaf in leaves(optimizer.state_dict())}
    for name, value in vars(optimizer).items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Optimizer) and {id(leaf) for leaf in leaves(list(one.state.values()))} - carried:
                return name
    return ""


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(
        torch.ones([min(size, 2) for size in parameter.shape], dtype=parameter.dtype), parameter.requires_grad
    )
    made.grad = torch.ones_like(made) if made.requires_grad else None
    return made


def _may_be_fused(cls: Any, args: Mapping[str, Any], parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch's optimizer may step all parameters by one kernel of the GPU, and the user chose no other way.

    Not in double precision, which is there to compare: the kernel rounds otherwise than torch's default, and Adam makes
    steps of it where a gradient is next to nothing.
    """
    if not issubclass(cls, _FUSED) or {"fused", "foreach", "capturable", "differentiable"} & set(args):
        return False
    kinds = {is_dtensor(one) for one in parameters}  # one kernel cannot take both
    return len(kinds) == 1 and all(
        one.is_cuda and one.is_floating_point() and one.dtype != torch.float64 for one in parameters
    )


def _keep_to_itself(optimizer: Optimizer) -> None:
    """Leave out of states how the step is computed: they go to machines that have no GPU, and come from those."""

    def on_its_way_out(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "fused": None} for group in state["param_groups"]]}

    def on_its_way_in(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "fused": True} for group in state["param_groups"]]}

    optimizer.register_state_dict_post_hook(on_its_way_out)
    optimizer.register_load_state_dict_pre_hook(on_its_way_in)


def _refuse_unfit(name: str, cls: Callable[..., Any]) -> None:
    if issubclass(cls, optim.SparseAdam):  # type: ignore[arg-type]
        raise ConfigError(f"optimizer {name} needs sparse gradients, and exchanged gradients are dense; use Adam")
    closure = inspect.signature(cls.step).parameters.get("closure")  # type: ignore[attr-defined]
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(_CLOSURE.format(name))


def _check_state(name: str, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state cannot be sent to newcomers, nor saved.

    Raises:
        ConfigError: what torch's optimizers have is missing.
    """
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigError(
            f"optimizer {name!r} has no list param_groups: its __init__ must call super().__init__(params, defaults)"
        )
    state = optimizer.state_dict()
    lacking = [key for key in ("state", "param_groups") if not isinstance(state, dict) or key not in state]
    if lacking:
        raise ConfigError(
            f"optimizer {name!r} gives a state_dict() without {' and '.join(map(repr, lacking))}, so its state could reach "
            "neither a worker that joins nor a checkpoint: keep what it remembers in self.state[parameter], and leave "
            "state_dict() and load_state_dict() to torch.optim.Optimizer"
        )


def _check_owned(name: str, optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    own = {id(p) for _, p in named}
    strangers = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if not all("lr" in group for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer {name!r} has a parameter group without 'lr', where schedules and the history of a run read the learning "
            "rate: give it there, as in super().__init__(params, {'lr': 0.01})"
        )
    if strangers:
        raise ConfigError(
            f"optimizer {name!r} holds {strangers} tensors that are not parameters of the model; use those it was given"
        )


@dataclass(slots=True)
class Schedule:
    """A learning-rate scheduler and what drives it.

    Attributes:
        scheduler: torch's, or one with the same methods.
        interval: "step", "epoch" or "validation".
    """

    scheduler: LRScheduler
    interval: str

    def on_step(self) -> None:
        """One optimizer step was applied."""
        if self.interval == "step":
            self.scheduler.step()

    def on_tick(self, metric: float | None) -> None:
        """One epoch or validation is over.

        Raises:
            ConfigError: the scheduler follows a metric and there is none.
        """
        if self.interval == "step":
            return
        if not follows_metric(self.scheduler):
            self.scheduler.step()
            return
        if metric is None:
            raise ConfigError(
                f"{type(self.scheduler).__name__} follows the validation loss, and there is none; give val_loader="
            )
        self.scheduler.step(metric)  # type: ignore[arg-type]


def follows_metric(scheduler: Any) -> bool:
    """Whether a scheduler's step needs a figure to follow, as that of ReduceLROnPlateau does."""
    if isinstance(scheduler, ReduceLROnPlateau):
        return True
    first = next(iter(inspect.signature(scheduler.step).parameters.values()), None)
    return first is not None and first.default is first.empty and first.kind is first.POSITIONAL_OR_KEYWORD


def build_scheduler(factory: Factory | None, optimizer: Optimizer, resolve: Resolve, interval: str) -> Schedule | None:
    """Return the schedule, None when the learning rate stays.

    Raises:
        ConfigError: unknown name or interval, arguments that do not fit, or a metric-driven scheduler on every step.
        PreparationError: the user's function raised.
    """
    if interval not in INTERVALS:
        raise ConfigError(f"scheduler_interval is {interval!r}; choose one of {', '.join(INTERVALS)}")
    if factory is None:
        return None
    name = factory.name
    found = find("scheduler", name, SCHEDULERS, "torch.optim.lr_scheduler", resolve)
    from_torch = name in SCHEDULERS
    args = _with_functions(factory.args, resolve) if from_torch else factory.args
    made = build("scheduler", name, found, optimizer, from_torch=from_torch, args=args)
    if not all(hasattr(made, method) for method in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(
            f"scheduler {name!r} returned a {type(made).__name__}; it must return a torch learning-rate scheduler"
        )
    if follows_metric(made) and interval == "step":
        raise ConfigError(
            f'{type(made).__name__} follows a metric: use scheduler_interval="validation" (--scheduler-interval validation), or '
            '"epoch", which follows the loss of training where nothing is validated'
        )
    return Schedule(made, interval)


def _with_functions(args: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    def one(value: Any) -> Any:
        return find("schedule function", value, {}, "", resolve) if isinstance(value, str) else value

    return {
        key: ([one(v) for v in value] if isinstance(value, list) else one(value))
        if key in _FUNCTION_ARGUMENTS
        else value
        for key, value in args.items()
    }


@dataclass
class LossScale:
    """The factor that keeps fp16 gradients from vanishing, as plain data.

    The rule of torch.amp.GradScaler with its defaults. Plain numbers and a skip that is decided for all replicas at
    once keep the scale equal everywhere, bit for bit. All factors are powers of two, so scaling rounds nothing.
    """

    scale: float = 65536.0
    growth_tracker: int = 0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def update(self, skipped: bool) -> None:
        """Learn from one step: smaller after a skipped one, larger after `growth_interval` applied ones in a row."""
        if skipped:
            self.scale *= self.backoff_factor
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker >= self.growth_interval:
            self.growth_tracker = 0
            if self.scale * self.growth_factor <= _FLOAT32_MAX:
                self.scale *= self.growth_factor

    def state(self) -> dict[str, float | int]:
        """Return it as plain data, with the names of GradScaler's state."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.growth_tracker,
        }

    def load(self, state: dict[str, float | int]) -> None:
        """Take over what `state` returned, here or from a GradScaler."""
        self.scale = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.growth_tracker = int(state["_growth_tracker"])


class ApplyFailed(Exception):  # noqa: N818 - the error is the cause
    """Raised from what the user's optimizer or schedule raised, where the replica holds a whole state all the same.

    Attributes:
        applied: the step counts, and only its schedule did not follow; else the state is that before the step.
    """

    def __init__(self, applied: bool) -> None:
        """Say which state is held."""
        super().__init__("the schedule failed after the step" if applied else "the step failed and was undone")
        self.applied = applied


#: Up to this many bytes of parameters and state are copied before each step of an optimizer that is not torch's own.
_MOST_KEPT_BYTES = 256 << 20


class StepUndo:
    """What an optimizer and its schedule held before the last step, so that one that fails can be undone.

    torch's own optimizers check before they change anything: whether they did, the tensors' version counters tell, and
    nothing is copied. A user's own optimizer, and one with the user's hooks, may raise anywhere: it is copied before each
    step while it is small.
    """

    def __init__(self, optimizer: Optimizer, others: Sequence[Any]) -> None:
        """Keep nothing yet.

        Args:
            optimizer: of one replica.
            others: objects that move with it, such as its schedule.
        """
        self._optimizer, self._moving = optimizer, [optimizer, *(one for one in others if one is not None)]
        self._kept: tuple[list[tuple[Tensor, Tensor]], list[dict[str, Any]]] | None = None
        self._marks: list[tuple[int, int]] = []

    def begin(self, further: Iterable[Tensor] = ()) -> None:
        """Note what is there; `further` tensors of any shapes are kept with the parameters."""
        self._kept, self._marks = None, []
        if not is_of_the_user(self._optimizer):
            self._marks = self._versions()
            return
        tensors = [*self._parameters(), *further]
        state = [value for values in self._optimizer.state.values() for value in values.values()]
        kept_bytes = sum(one.numel() * one.itemsize for one in (*tensors, *state) if isinstance(one, Tensor))
        if kept_bytes > _MOST_KEPT_BYTES:
            return
        memo: dict[int, Any] = {id(one): one for one in (*tensors, *self._moving)}
        try:
            values = [copy.deepcopy(vars(one), memo) for one in self._moving]
        except Exception:  # it holds what cannot be copied: then its step cannot be undone
            return
        self._kept = [(one, one.detach().clone()) for one in tensors], values

    @torch.no_grad()
    def undo(self) -> bool:
        """Go back to what `begin` noted; returns whether all is as it was."""
        if self._kept is None:
            return bool(self._marks) and self._marks == self._versions()
        (tensors, values), self._kept = self._kept, None
        for tensor, value in tensors:
            tensor.copy_(value)
        for one, before in zip(self._moving, values, strict=True):
            vars(one).clear()
            vars(one).update(before)
        return True

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])

    def _versions(self) -> list[tuple[int, int]]:
        state = (value for values in self._optimizer.state.values() for value in values.values())
        return [(id(one), one._version) for one in (*self._parameters(), *state) if isinstance(one, Tensor)]


def is_gated(optimizer: Optimizer) -> bool:
    """Whether torch's own kernels leave a step out where `found_inf` says so, and nothing of the user's runs in it.

    Not SGD with momentum: a first step that is left out leaves its momentum as the memory was.
    """
    if not isinstance(optimizer, optim.Adam | optim.AdamW) and not (
        isinstance(optimizer, optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    ):
        return False
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and not is_of_the_user(optimizer)


def is_of_the_user(optimizer: Optimizer) -> bool:
    """Whether code of the user's runs in an optimizer's step: its class, or a hook. It may raise anywhere, and draw numbers."""
    # A wrapper that calls no __init__ of torch's has no tables of hooks.
    tables = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    tables += [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    return any(_is_users(one) for one in (type(optimizer), *(hook for table in tables for hook in table.values())))


def _is_users(one: Any) -> bool:
    return not str(getattr(one, "__module__", "")).startswith(("torch.", "guava_nb."))


_FLOAT32_MAX = math.ldexp(2.0 - 2.0**-23, 127)
