"""Units of a model that FSDP2 gathers and reduces, run in one order on every replica whatever each of them uses.

FSDP2 sends in the order in which its hooks run, and takes every replica to run the same modules. A mixture of experts, layer
drop or an early exit does not: then replicas would wait for ever, or gather halves of different layers. So `CallOrder`
gives every call its turn, and a replica that does not use a unit calls the unit's hooks without its forward.

Backward needs the same order. Autograd runs what was recorded last first, and each call here records an entry and an
exit of its own, which hang on the loss whatever becomes of the outputs. Between the two lies the call's own backward. At
the entry, before FSDP2 reduces, parameters without a gradient get zeros, since FSDP2 reduces what a module has; what
was truly used is remembered: unused everywhere must end without a gradient, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from guava_nb.errors import GroupBroken, TrainingError
from guava_nb.nested import leaves, map_leaves
from guava_nb.parallel.module_state import late_gradient
from guava_nb.parallel.replicas.call_order import EXIT, CallOrder, Habit, Unplanned

__all__ = ["SharedUnits"]

_TOKEN = "_guava_token"  # noqa: S105 - the name of an argument


class _Mark(torch.autograd.Function):
    """A place in the graph: a number that is never read, and what its backward shall do."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: Callable[[], None] | None) -> Tensor:
        """Return a scalar `[]` that is never read; `call` is called when its gradient comes."""
        ctx.call = call
        return torch.empty_like(token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.call is not None:
            ctx.call()
        return gradient, None


class _Join(torch.autograd.Function):
    """A loss whose backward reaches all marks, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *marks: Tensor) -> Tensor:
        """Return a copy of the loss, `[]`; each mark is a scalar of `_Mark`."""
        ctx.marks, ctx.device = len(marks), marks[0].device
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zero = torch.zeros((), device=ctx.device)
        return (gradient, *[zero] * int(ctx.marks))


@dataclass(slots=True)
class _Unit:
    """One sharded module.

    Attributes:
        module: the module; its own hooks of FSDP2 are kept here instead.
        name: for messages.
        places: module, attribute and full name of each of its parameters.
        parts: this replica's parts of them, in the same order.
        enter, leave: FSDP2's hooks.
        nested: other units lie inside.
        took: full names of the parameters that took gradients when it was sharded.
        takes: of each parameter, whether it takes a gradient since the last forward.
    """

    module: nn.Module
    name: str
    places: list[tuple[nn.Module, str, str]]
    parts: list[nn.Parameter]
    enter: Callable[..., Any]
    leave: Callable[..., Any]
    nested: bool
    took: frozenset[str]
    takes: list[bool]


_REENTRANT = (
    "{} is computed again in backward, and its first forward recorded no gradient, as in torch.utils.checkpoint with "
    "use_reentrant=True; the sums of ZeRO 2 and 3 are not complete then. Give use_reentrant=False, which computes the same, or "
    "use data mode or zero_stage=1 (--zero 1)"
)
_IN_BACKWARD = (
    "a hook switches requires_grad of parameter {!r} while backward runs. ZeRO 2 and 3 have gathered it then and give it back "
    "before the next step: switch it in the forward or in the step function, or use data mode or zero_stage=1 (--zero 1)"
)


class SharedUnits:
    """The sharded modules of one model; inner ones are added before those that they lie in.

    Args:
        group: the replicas.
        device: of the parameters.
        habit: what is known of the model's calls.

    Attributes:
        used: full names of parameters that got a gradient since `clear`.
        counting: whether backward adds to `used`.
        began: FSDP2 has made what it needs for a forward.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, habit: Habit) -> None:
        """Hold no units yet."""
        self._group, self._device, self._habit = group, device, habit
        self._agreed = False  # on the habit
        self._units: list[_Unit] = []
        self._orders: dict[str, CallOrder] = {}
        self._order = self._order_of("training")
        self._open: list[Tensor | None] = []  # entries of the calls that run, outer ones first
        self._exits: list[Tensor] = []
        self._followed: set[int] = set()  # numbers of the units whose forward in this pass has a backward
        self._over = ""  # why this group cannot go on
        self.used: set[str] = set()
        self.counting = True
        self.began = False

    # -------------------------------------------------------------------------------------------------------- the units

    def add(self, module: nn.Module, name: str, names: Mapping[str, str], shard: Callable[[], object]) -> None:
        """Shard a module and put this object's hooks in the place of those that FSDP2 gives it.

        Args:
            module: to be sharded.
            name: for messages.
            names: local to full name of the parameters of its own group.
            shard: calls `fully_shard`.
        """
        kept = set(module._forward_pre_hooks) | set(module._forward_hooks)
        places = [
            (module.get_submodule(local.rpartition(".")[0]), local.rpartition(".")[2], full)
            for local, full in names.items()
        ]
        took = frozenset(full for owner, own, full in places if getattr(owner, own).requires_grad)
        shard()
        (before,) = set(module._forward_pre_hooks) - kept
        (after,) = set(module._forward_hooks) - kept
        inner = {id(m) for m in module.modules() if m is not module}
        unit = _Unit(
            module, name, places, [getattr(owner, own) for owner, own, _ in places],
            module._forward_pre_hooks[before], module._forward_hooks[after],
            any(id(other.module) in inner for other in self._units), took, [full in took for _, _, full in places],
        )  # fmt: skip
        module._forward_pre_hooks[before] = partial(self._on_enter, unit, len(self._units))
        module._forward_hooks[after] = partial(self._on_leave, unit)
        self._units.append(unit)

    def _on_enter(self, unit: _Unit, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _in_backward():  # a checkpoint computes activations again: the call had its turn in forward
            if torch.is_grad_enabled() and number not in self._followed:
                raise TrainingError(_REENTRANT.format(unit.name or "the model"))
            return unit.enter(module, args, kwargs)
        # Where nothing could need a gradient FSDP2 gathers for forward only: that is another kind of turn. What user code freezes
        # for a while keeps its kind.
        backward = torch.is_grad_enabled() and (
            bool(unit.took) or any(tensor.requires_grad for tensor in leaves((args, kwargs)))
        )
        self._take_turns(2 * number + (not backward), unit.name)
        args, kwargs, token = self._enter(unit, args, kwargs, backward)
        self._open.append(token)
        if backward:
            self._followed.add(number)
        return args, kwargs

    def _on_leave(self, unit: _Unit, module: nn.Module, args: Any, output: Any) -> Any:
        if _in_backward():
            return unit.leave(module, args, output)
        _keep_switches(unit)
        return self._leave(unit, args, output, self._open.pop())

    # ---------------------------------------------------------------------------------------------------------- a call

    def _enter(self, unit: _Unit, args: Any, kwargs: Any, backward: bool) -> tuple[Any, Any, Tensor | None]:
        """Do what FSDP2 does before a call.

        Returns:
            The call's arguments, and the scalar `[]` by which its backward is seen; None without a backward.
        """
        if not backward:
            args, kwargs = unit.enter(unit.module, args, kwargs)
            self.began = True
            return args, kwargs, None
        token = torch.empty((), device=self._device, requires_grad=True)
        # FSDP2 reduces when the gradients of a call's inputs are there, and this is one that every call has.
        args, kwargs = unit.enter(unit.module, args, {**kwargs, _TOKEN: token})
        self.began = True
        return args, kwargs, _mark(kwargs.pop(_TOKEN), partial(self._complete, unit))

    def _leave(self, unit: _Unit, args: Any, output: Any, token: Tensor | None) -> Any:
        """Do what FSDP2 does after a call, with the scalar that `_enter` gave; returns the call's output."""
        if unit.nested:
            self._take_turns(EXIT, unit.name)
        if token is None:
            return unit.leave(unit.module, args, output)
        output, mark = unit.leave(unit.module, args, (_owned(output), _mark(token)))
        self._exits.append(mark)
        return output

    def _stand_in(self, turn: int) -> None:
        """Do what FSDP2 does around a forward and a backward, without them."""
        unit, backward = self._units[turn // 2], turn % 2 == 0
        with torch.set_grad_enabled(backward):
            _, _, token = self._enter(unit, (), {}, backward)
            self._leave(unit, (), (), token)

    def _complete(self, unit: _Unit) -> None:
        """A call's backward is through, and FSDP2 is about to reduce: whole gradients must be there."""
        for (owner, own, full), takes in zip(unit.places, unit.takes, strict=True):
            parameter = owner._parameters[own]
            assert parameter is not None
            if parameter.requires_grad != takes:
                raise TrainingError(_IN_BACKWARD.format(full))
            if full not in unit.took:  # one that is frozen here for a while may not be so on other replicas
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif self.counting:
                self.used.add(full)

    # --------------------------------------------------------------------------------------------------------- a pass

    def _take_turns(self, wanted: int, name: str) -> None:
        try:
            for turn in self._order.until(wanted):
                self._stand_in(turn)
        except Unplanned as error:
            self._over = (
                f"{name or 'the model'!r} is run once more, or in another order, than in the steps before; ZeRO 2 and 3 "
                "did not expect that. It is done again in a new group, whose replicas agree on every block"
            )
            raise GroupBroken(self._over) from error

    def begin(self, kind: str) -> None:
        """Begin a pass of a kind: "training", or any other name for passes without a backward.

        Raises:
            GroupBroken: a pass before had a turn that no plan foresaw.
        """
        if self._over:  # the others wait where this replica is not
            raise GroupBroken(self._over)
        if not self._agreed:
            self._habit.may_plan, self._agreed = bool(self._smallest(self._habit.may_plan)), True
        self._order = self._order_of(kind)
        self._order.begin()
        self._open.clear()
        self._exits.clear()
        self._followed.clear()

    def _order_of(self, kind: str) -> CallOrder:
        return self._orders.setdefault(kind, CallOrder(self._habit, self._smallest))

    def end_forward(self, loss: Tensor) -> Tensor:
        """Stand in for what other replicas still run; returns the loss, a scalar, on which all calls hang."""
        self._take_turns(EXIT, "")
        self._order.end()
        for unit in self._units:
            _keep_switches(unit)
        # Not kept here: their graph leads back to the modules and so to this, through autograd, where Python finds no circle, and
        # model, group and the group's sockets would stay for good.
        exits, self._exits = self._exits, []
        return _Join.apply(loss, *exits) if exits else loss  # type: ignore[no-untyped-call]

    def end_evaluation(self) -> None:
        """Stand in for what other replicas still run in a pass without a backward."""
        self._take_turns(EXIT, "")
        self._order.end()
        self.settle(bool(-self._smallest(-self.strayed)))

    @property
    def strayed(self) -> bool:
        """Whether this replica stood in for a unit since the last `settle`."""
        return self._order.strayed

    def settle(self, any_strayed: bool) -> None:
        """End a step, all replicas with the same word."""
        self._order.settle(any_strayed, len(self._units))
        self.used.clear()

    def _smallest(self, number: int) -> int:
        tensor = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return int(tensor)


def _mark(token: Tensor, call: Callable[[], None] | None = None) -> Tensor:
    """Return a scalar `[]` that stands in the graph; `token` is one, too."""
    marked: Tensor = _Mark.apply(token, call)  # type: ignore[no-untyped-call]
    return marked


def _keep_switches(unit: _Unit) -> None:
    """Keep what user code made of `requires_grad`: it was done to gathered parameters, which follow the parts at each gathering.

    Raises:
        TrainingError: one takes a gradient that took none when it was sharded.
    """
    unit.takes = [getattr(owner, own).requires_grad for owner, own, _ in unit.places]
    for (_, _, full), part, takes in zip(unit.places, unit.parts, unit.takes, strict=True):
        if takes and full not in unit.took:
            raise late_gradient(full)
        if takes != part.requires_grad:
            part.requires_grad_(takes)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _owned(output: Any) -> Any:
    """Return the output with copies in place of views.

    FSDP2 hangs the hook that gathers parameters for backward on what a module returns. A view that is changed in place
    later (`x = block(x); x += y`) loses it: ZeRO 3 then fails in backward, ZeRO 2 may leave gradients unsummed. torch only
    warns of it, at every view, also of those that are not changed. A copy costs one activation and takes both away.
    """
    if not any(map(_is_view, leaves(output))):
        return output
    return map_leaves(output, lambda tensor: tensor.clone() if _is_view(tensor) else tensor)


def _is_view(tensor: Tensor) -> bool:
    """Whether a tensor of any shape is a view that takes a gradient."""
    return tensor.requires_grad and tensor._base is not None
