"""What of torch takes a second to load, and is asked about here without being loaded.

DTensor and FSDP2 bring sympy, and torch's optimizers ask for torch.compile's engine (`torch._dynamo`) at each step, to have it
leave them alone. In a process that has loaded none of these no tensor is a DTensor and nothing is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["go_back", "is_dtensor", "is_optimized", "is_sharded_module", "spare_compiler", "take_step"]

_COMPILER, _SYMBOLIC = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"
#: Where torch keeps a method without its compiler, once that was loaded for it (`torch/_compile.py`).
_KEPT = "__dynamo_disable"
_BY_SCHEDULE = "_wrapped_by_lr_sched"
_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    return _is_a(value, "torch.distributed.tensor", "DTensor")


def is_sharded_module(module: object) -> bool:
    """Whether FSDP2 holds the parameters of a module."""
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule")


def is_optimized(module: object) -> bool:
    """Whether a module is what torch.compile made of another one."""
    return _is_a(module, _COMPILER, "OptimizedModule")


def _is_a(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def spare_compiler(*methods: Callable[..., Any]) -> None:
    """Let methods that torch keeps away from its compiler run without loading it first, while nothing else has loaded it.

    Where it is loaded later, they take torch's own way from then on. A torch that does this in another way is left alone.

    Args:
        methods: as they stand in their class; those of torch's optimizers are always among them.
    """
    for method in (*[getattr(Optimizer, name) for name in _METHODS], *methods):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None and _KEPT in method.__code__.co_consts and not hasattr(plain, _KEPT):
            setattr(plain, _KEPT, _while_unloaded(method, plain))


def _while_unloaded(method: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _COMPILER not in sys.modules:
            return plain(*args, **kwargs)
        if getattr(plain, _KEPT, None) is call:
            delattr(plain, _KEPT)
        return method(*args, **kwargs)

    return call


def go_back(value: Tensor, seed: Tensor, keep_graph: bool) -> None:
    """Run backward of `value`, one element, from the gradient `seed` of its shape.

    Given to torch as it is, the seed would be looked at with sympy. As a factor it is the same gradient, by one operation more.
    """
    if _SYMBOLIC in sys.modules:
        torch.autograd.backward(value, seed, retain_graph=keep_graph)
    else:
        torch.autograd.backward(value * seed, retain_graph=keep_graph)


def take_step(optimizer: Optimizer, step: Callable[[], object] | None = None) -> None:
    """Step an optimizer: as its `step()`, which is called wherever it may do more than compute.

    The function below torch's wrappers is called alone where the class is torch's, nothing is compiled, and neither hooks nor a
    profiler see the step: those wrappers load the compiler to tell it where a graph ends.

    Args:
        optimizer: of the parameters whose gradients are there.
        step: its `step` as it was before the caller put another in its place; None takes the one that is there.
    """
    step = step or optimizer.step
    compute = None if _COMPILER in sys.modules else _computation(optimizer, step)
    if compute is None:
        step()
        return
    if hasattr(step, _BY_SCHEDULE):
        optimizer._opt_called = True  # type: ignore[attr-defined]
    with torch.no_grad():
        compute(optimizer)


def _computation(optimizer: Optimizer, step: Callable[[], object]) -> Callable[[Optimizer], object] | None:
    kind = type(optimizer)
    tables = [vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    tables += [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    # A schedule puts a note that there was a step around it; whatever else stands in the place of the class's may do more.
    called: Any = getattr(step, "__wrapped__" if hasattr(step, _BY_SCHEDULE) else "__func__", None)
    if (
        not kind.__module__.startswith("torch.optim.")
        or called is not kind.step
        or any(tables)
        or optimizer.defaults.get("differentiable")
        or _profiler_enabled()
    ):
        return None
    layer: Any = called
    while layer is not None and layer.__globals__["__name__"].startswith(
        "torch."
    ):  # else one that another library put there
        if layer.__code__.co_name == "_use_grad":
            return layer.__wrapped__  # type: ignore[no-any-return]
        layer = getattr(layer, "__wrapped__", None)
    return None
